"""Real data, real models, real metrics: what the lessons train.

``vision.workload(config)``, ``summarization.workload(config)`` and ``decoder.workload(config)`` each give a
``Workload``.
"""
