NOTEBOOKS = {
    "lecture": "07_pipelines",
    "exercises": "07_pipelines_exercises",
    "puzzle": "07_schedule_puzzle_exercises",
    "appendix": "07b_pipelines_in_earnest",
}
