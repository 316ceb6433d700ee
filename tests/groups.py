"""A pytest plugin, `-p tests.groups`: what the nightly tests need, and the time that each group of tests took."""

import os
import shutil
from collections import Counter, defaultdict
from importlib.util import find_spec

import psutil

GROUPS = {  # the first one with a word that is part of the test's id
    "Slurm": ("test_clusters", "job_of_two_nodes"),
    "two hosts": ("test_hosts",),
    "hub": ("test_hub",),
    "users without privileges": ("test_users",),
    "DeepSpeed": ("deepspeed",),
    "browser": ("test_browser", "test_page"),
    "wrong answers": ("test_wrong_answers",),
    "kills": ("test_recovery",),
    "starts of ranks": ("test_zygote",),
    "repeats": ("test_lifetime", "test_random_operations"),
    "torch's own tests": ("test_torchs_own_tests",),
    "programs of others": ("test_other_programs", "test_programs.py"),
    "notebooks": ("test_notebooks",),
}
DEEPSPEED = "~/.cache/dtlib"
FREE = 12 * 2**30  # bytes of memory, for messages of more than 2 GiB


def group_of(test: str) -> str:
    return next((name for name, words in GROUPS.items() if any(word in test for word in words)), "other")


def needs() -> dict[str, str]:
    """What the tests need -> why it is missing here, or ''."""
    from tests import hosts, hub, slurm
    from tests.test_browser import missing as no_browser
    from tests.test_deepspeed import PIN, folder_of
    from tests.test_other_programs import NEEDS
    from tests.test_page import FIREFOX

    deepspeed = os.environ.get("DTLIB_DEEPSPEED") or (folder_of(PIN) / "ready").exists()
    absent = [name for names in NEEDS.values() for name in names if find_spec(name) is None]
    compiler = "" if shutil.which("c++") else "no C++ compiler: apt-get install g++"
    is_large = psutil.virtual_memory().available >= FREE
    return {
        "root, and network namespaces: two hosts, users, Slurm, a hub": hosts.missing(),
        "Slurm: apt-get install munge slurmctld slurmd slurm-client": slurm.missing(),
        "a hub: the Python extra 'hub', and npm": hub.missing(),
        "a browser: the Python extra 'browser', and chromium": no_browser(),
        "Firefox: apt-get install firefox-esr": "" if FIREFOX else "there is no Firefox on PATH",
        "DeepSpeed: a C++ compiler": compiler,
        f"the same: {PIN}": "" if deepspeed else f"its first test takes it from the package index, into {DEEPSPEED}",
        "programs of others: transformers, accelerate, lightning": ", ".join(absent) and f"no {', '.join(absent)}",
        f"{FREE / 2**30:.0f} GiB of free memory": "" if is_large else "less is free",
    }


def pytest_report_header(config):
    lines = [f"  {'-' if why else '+'} {need}{': ' * bool(why)}{why}" for need, why in needs().items()]
    return ["The nightly tests need this (+ is there, - is missing):", *lines]


def pytest_terminal_summary(terminalreporter):
    """Seconds of set-up, test and tear-down, by group; set-up that tests share counts for the first of them."""
    seconds, outcomes = Counter(), defaultdict(Counter)
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if hasattr(report, "duration"):
                group = group_of(report.nodeid)
                seconds[group] += report.duration
                if outcome:
                    outcomes[group][outcome] += 1
    terminalreporter.section("time of each group")
    for group, taken in seconds.most_common():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes[group].items()))
        terminalreporter.line(f"{taken / 60:6.1f} min  {group}: {counts}")
    terminalreporter.line(f"{seconds.total() / 60:6.1f} min  in all")
