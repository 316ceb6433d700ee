"""The exercises, by name. Beside each lesson's judges stand plausible wrong answers (``*_wrong.py``), which the tests
prove to be rejected, each for its own reason."""

from dtlib.lab.checks import Exercise
from dtlib.lab.exercises import pi, start

EXERCISES = {
    "first-sum": Exercise("total", start.observe_total, start.judge_total),
    "pi-streams": Exercise("count_my_points", pi.observe_count, pi.judge_count),
    "pi-on-ranks": Exercise("estimate_pi", pi.observe_estimate, pi.judge_estimate),
}
