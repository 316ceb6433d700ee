"""Lesson 11's batch scripts: right ones in other words pass, and the lecture's own is one of them."""

import subprocess

import pytest

from dtlib.lessons.l11 import figures
from dtlib.lessons.l11.judge_job import judge_job, minutes
from tests.cases import for_each
from tests.lessons.l11 import wrong_job


@for_each(job=[*wrong_job.OTHERS.values(), wrong_job.RIGHT, figures.gpu_job()])
def test_right_scripts_pass(job):
    judge_job([job])
    subprocess.run(["bash", "-n"], input=job, text=True, check=True)


@pytest.mark.parametrize("time,expected", [
    ("30", 30), ("30:30", 30.5), ("00:30:00", 30), ("30:00:00", 1800), ("1-0", 1440), ("0-00:30", 30), ("soon", None),
])  # fmt: skip
def test_times_are_read_as_slurm_reads_them(time, expected):
    assert minutes(time) == expected
