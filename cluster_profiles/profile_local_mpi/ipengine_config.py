"""What every engine of this profile is told when it starts."""

c = get_config()  # noqa: F821

# Engines on this machine are interrupted by their process id: no helper process beside each one.
c.IPEngine.enable_nanny = False
c.HistoryManager.enabled = False
