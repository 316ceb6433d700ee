"""Strategies: ways to train one model on many ranks. Strategies do not import each other."""
