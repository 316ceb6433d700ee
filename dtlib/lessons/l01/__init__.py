NOTEBOOKS = {"lecture": "01_why_distribute"}
