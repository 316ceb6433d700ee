"""Real data, real models, real metrics: what the lessons train.

``vision.workload(config)`` and ``summarization.workload(config)`` each give a ``Workload``.
"""
