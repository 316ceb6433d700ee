"""Plausible mistakes that judges must reject, and unusual answers that they must accept."""
