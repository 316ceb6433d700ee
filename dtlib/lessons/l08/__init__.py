NOTEBOOKS = {
    "lecture": "08_tensor_and_hybrid",
    "exercises": "08_tensor_and_hybrid_exercises",
    "appendix": "08b_replicator",
}
