"""Lesson 14's runs: `dtlib train` with a plan, and a run with a death and a restart from the checkpoint."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.lab import course
from dtlib.lab.tables import fold
from dtlib.lessons.l14 import brief
from dtlib.planner import Plan
from dtlib.recovery import supervise


def dtlib_train(plan: Plan, steps: int = 8) -> dict | None:
    """Run `dtlib train` with a plan, and print its output; return the result, or None if it fails."""
    with tempfile.TemporaryDirectory(prefix="dtlib-capstone-") as folder:
        path, made = Path(folder, "plan.json"), Path(folder, "result.json")
        path.write_text(json.dumps(brief.config(plan, steps)), encoding="utf-8")
        print(f"$ dtlib train decoder --config plan.json --ranks {brief.RANKS}")
        command = ["train", "decoder", f"--config={path}", f"--ranks={brief.RANKS}", f"--json={made}"]
        ran = subprocess.run([sys.executable, "-m", "dtlib", *command], capture_output=True, text=True)
        if ran.returncode:
            said = [line for line in ran.stderr.splitlines() if line.startswith("dtlib train:")]
            print(fold(said[-1] if said else ran.stderr[-500:]))
            return None
        print(ran.stdout.rstrip())
        return json.loads(made.read_text(encoding="utf-8"))


def compared(plan: Plan, sample: float, result: dict | None) -> list[tuple]:
    """Return rows of predicted and measured values of the plan; they are stored for the certificate."""
    if result is None:
        raise DtlibError("dtlib train refused this plan, as it says above: change it, and run it again.")
    took, said = brief.BATCH / result["samples_per_second"], brief.predicted(plan, sample)
    rows = [
        ("bytes of model states", f"{brief.held(plan):,}", f"{max(result['bytes_per_rank']):,}"),
        ("ms per step", f"{1000 * said:.0f}", f"{1000 * took:.0f}"),
    ]
    course.keep("capstone", {"plan": str(plan), "steps": result["steps"], "rows": rows})
    return rows


def with_a_death(plan: Plan, save_every: int, after: int | None, rank: int = 2, steps: int = 20) -> list[dict]:
    """Return the events of a run in which a rank is killed once, after step ``after``.

    Checkpoints are saved every ``save_every`` steps.
    """
    options = {"config": brief.config(plan, steps, save_every=save_every), "rank": rank, "after": after}
    with tempfile.TemporaryDirectory(prefix="dtlib-capstone-") as folder:
        program = ["-m", "dtlib.lessons.l14.program", json.dumps(options)]
        runs = supervise(program, brief.RANKS, folder, say=lambda sentence: print(fold(sentence)))
        return [event for run in runs for event in run.events]


def steps_of(events: list[dict]) -> list[tuple[int, float]]:
    """Return (step, loss) of each completed step, including repeated steps."""
    return [(event["step"], event["loss"]) for event in events if event["what"] == "step"]
