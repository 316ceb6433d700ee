NOTEBOOKS = {"lecture": "00_start_here"}
