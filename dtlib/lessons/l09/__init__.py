NOTEBOOKS = {"lecture": "09_data_input", "exercises": "09_data_input_exercises"}
