"""``python -m tests.wrong_answers.record [WORD]``: observe wrong answers on ranks, and keep what was observed.

With a word, only answers with that word in their name or that of their exercise. Prints what is judged otherwise than
expected; that is recorded all the same, and the tests fail.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from dtlib.lab.checks.judging import judge_here, judge_on_this_rank
from tests.ranks import end_worlds, on_ranks
from tests.wrong_answers import recordings
from tests.wrong_answers.cases import CASES


@on_ranks(2, 3, 4)
def observed(world, key, path):
    """Rank 0 writes what all ranks observed of one answer to ``path``."""
    rounds = []
    verdict = judge_on_this_rank(CASES[key].exercise, CASES[key].names(world), rounds)
    if world.rank == 0:
        _write(rounds, verdict, path)


def _write(rounds, verdict, path) -> None:
    text = json.dumps({"rounds": recordings.encoded(rounds), "verdict": asdict(verdict)})
    Path(path).write_text(text)


def main(word: str = "") -> None:
    for exercise, cases in groupby(sorted(CASES.values(), key=lambda case: case.key), lambda case: case.exercise):
        cases = {case.name: case for case in cases}
        before = recordings.read(exercise)
        kept = {name: it for name, it in before.items() if name in cases}
        for name, case in cases.items():
            if word in case.key:
                kept[name] = _recording(case)
        if kept != before:
            recordings.write(exercise, kept)
    end_worlds()


def _recording(case) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recorded.json"
        if case.ranks:
            observed(ranks=case.ranks, key=case.key, path=str(path))
        else:
            rounds = []
            _write(rounds, judge_here(case.exercise, case.names(None), rounds), path)
        found = json.loads(path.read_text())
    mistake = found["verdict"]["mistake"]
    wrong = "" if mistake == case.mistake else f": judged as {mistake or 'right'}, not as {case.mistake}"
    print(f"{case.key}{wrong}", flush=True)
    return found


if __name__ == "__main__":
    from tests.wrong_answers.record import main  # under its own name, so that ranks find the same module

    main(*sys.argv[1:])
