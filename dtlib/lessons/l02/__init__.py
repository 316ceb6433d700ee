NOTEBOOKS = {"lecture": "02_pi", "exercises": "02_pi_exercises"}
