NOTEBOOKS = {"lecture": "12_sequences", "exercises": "12_sequences_exercises"}
