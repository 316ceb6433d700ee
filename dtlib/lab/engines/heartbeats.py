"""Heartbeats of engines: fast during the start, then slow.

The controller registers an engine at its second heartbeat, so a fast one shortens the start. Later each heartbeat wakes
every engine.
"""

import os

from ipyparallel.controller.heartmonitor import HeartMonitor

FAST, SLOW = 100, 5000  # milliseconds between two heartbeats
DEAD_AFTER = 30_000  # milliseconds until an engine counts as dead
ARGUMENTS = [f"--HeartMonitor.period={FAST}", f"--HeartMonitor.max_heartmonitor_misses={DEAD_AFTER // FAST}"]


def slow_down() -> None:
    """Make a controller's heartbeats slow once all its engines are registered; call this before it starts."""
    of_new_hearts, engines = HeartMonitor.handle_new_hearts, int(os.environ.get("DTLIB_RANKS", 0))

    def handle_new_hearts(self, hearts):
        of_new_hearts(self, hearts)
        if engines and len(self.hearts) >= engines:
            self.caller.callback_time = SLOW
            self.max_heartmonitor_misses = DEAD_AFTER // SLOW

    HeartMonitor.handle_new_hearts = handle_new_hearts
