NOTEBOOKS = {"lecture": "11_beyond_one_machine", "exercises": "11_beyond_one_machine_exercises"}
