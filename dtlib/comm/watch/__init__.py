"""Observe communication: compare calls, record them, and report which rank the others wait for."""
