"""Side-by-side measurements: ``python -m benchmarks NAME``, one file a question."""
