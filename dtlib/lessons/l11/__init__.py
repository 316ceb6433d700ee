"""Lesson 11: beyond one machine."""
