NOTEBOOKS = {"lecture": "10_two_models", "exercises": "10_two_models_exercises"}
