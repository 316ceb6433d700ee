"""Predictions and checks."""
