"""A whole training run: its duration in days, and the best checkpoint interval."""

from math import sqrt


def days_of(seconds_a_step: float, tokens: float, tokens_a_step: float) -> float:
    """Return the days that a run of ``tokens`` tokens takes."""
    return seconds_a_step * tokens / tokens_a_step / 86400


def save_interval(seconds_to_save: float, seconds_between_failures: float) -> float:
    """Return the seconds between checkpoints that lose the least time: sqrt(2 C M) (J. W. Young, CACM 17, 1974).

    C are the seconds to save a checkpoint, and M the mean seconds between failures of the whole machine.
    """
    return sqrt(2 * seconds_to_save * seconds_between_failures)
