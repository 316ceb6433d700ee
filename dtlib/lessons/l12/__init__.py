NOTEBOOKS = {"lecture": "12_sequences_and_experts", "exercises": "12_sequences_and_experts_exercises"}
