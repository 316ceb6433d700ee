"""Every user of a machine reaches its loopback interface: connections are encrypted, and need the owner's keys."""

from dtlib.lab.engines import heartbeats

heartbeats.slow_down()
c = get_config()  # noqa: F821

c.IPController.enable_curve = True
