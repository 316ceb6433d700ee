"""Heartbeats of engines: fast while they come up, as one is registered at its second; then slow, as each wakes all."""

import os

from ipyparallel.controller.heartmonitor import HeartMonitor

FAST, SLOW = 100, 5000  # milliseconds between two
SILENCE = 30_000  # until an engine counts as dead
ARGUMENTS = [f"--HeartMonitor.period={FAST}", f"--HeartMonitor.max_heartmonitor_misses={SILENCE // FAST}"]


def slow_down() -> None:
    """In a controller, before it starts: heartbeats become slow once all engines that its keeper wants are there."""
    of_new_hearts, engines = HeartMonitor.handle_new_hearts, int(os.environ.get("DTLIB_RANKS", 0))

    def handle_new_hearts(self, hearts):
        of_new_hearts(self, hearts)
        if engines and len(self.hearts) >= engines:
            self.caller.callback_time = SLOW
            self.max_heartmonitor_misses = SILENCE // SLOW

    HeartMonitor.handle_new_hearts = handle_new_hearts
