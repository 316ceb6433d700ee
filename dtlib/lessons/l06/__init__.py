NOTEBOOKS = {"lecture": "06_zero", "exercises": "06_zero_exercises"}
