"""Predictions, exercises and quizzes: judge what a learner enters."""
