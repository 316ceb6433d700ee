NOTEBOOKS = {"lecture": "05_large_batches", "exercises": "05_large_batches_exercises"}
