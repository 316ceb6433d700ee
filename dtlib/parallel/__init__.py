"""Strategies: how to train one model on many ranks. They do not import each other."""
