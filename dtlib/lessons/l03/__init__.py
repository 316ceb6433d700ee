NOTEBOOKS = {"lecture": "03_collectives", "exercises": "03_collectives_exercises"}
