NOTEBOOKS = {
    "lecture": "04_data_parallel",
    "exercises": "04_data_parallel_exercises",
    "appendix": "04b_data_parallel_appendix",
}
