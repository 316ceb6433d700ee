NOTEBOOKS = {"lecture": "14_capstone", "exercises": "14_capstone_exercises"}
