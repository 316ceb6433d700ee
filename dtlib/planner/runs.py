"""A whole run: days, and how often to save."""

from math import sqrt


def days_of(seconds_a_step: float, tokens: float, tokens_a_step: float) -> float:
    """For a run of ``tokens``."""
    return seconds_a_step * tokens / tokens_a_step / 86400


def save_interval(seconds_to_save: float, seconds_between_failures: float) -> float:
    """Seconds from one checkpoint to the next: sqrt(2 C M), C to save one and M between failures of the whole machine,
    which loses least (J. W. Young, CACM 17, 1974)."""
    return sqrt(2 * seconds_to_save * seconds_between_failures)
