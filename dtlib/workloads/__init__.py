"""Real data, real models, real metrics: what the lessons train."""
