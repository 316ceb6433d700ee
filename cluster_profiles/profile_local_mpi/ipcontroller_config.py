"""Every user of a machine reaches its loopback interface: connections are encrypted, and need the owner's keys."""

c = get_config()  # noqa: F821

c.IPController.enable_curve = True
