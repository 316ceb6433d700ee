"""The training tasks of the lessons, with real data, real models and real metrics.

``vision.workload(config)``, ``summarization.workload(config)`` and ``decoder.workload(config)`` each return a
``Workload``.
"""
