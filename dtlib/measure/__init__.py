"""Measurements on each rank: traces of operations, memory, and progress bars."""
