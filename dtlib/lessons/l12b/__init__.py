NOTEBOOKS = {"lecture": "12b_experts", "exercises": "12b_experts_exercises"}
