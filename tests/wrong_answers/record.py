"""``python -m tests.wrong_answers.record [WORD]``: observe wrong answers on ranks, and keep what was observed.

With a word, only answers with that word in their name or that of their exercise. Prints what is judged otherwise than
expected; that is recorded all the same, and the tests fail.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from dtlib.lab.checks.checks import judge_on_this_rank
from tests.ranks import end_worlds, on_ranks
from tests.wrong_answers import recordings
from tests.wrong_answers.cases import CASES


@on_ranks(3, 4)
def observed(world, key, path):
    """Rank 0 writes what all ranks observed of one answer to ``path``."""
    rounds = []
    verdict = judge_on_this_rank(CASES[key].exercise, CASES[key].names(world), rounds)
    if world.rank == 0:
        text = json.dumps({"rounds": recordings.encoded(rounds), "verdict": asdict(verdict)})
        Path(path).write_text(text)


def main(word: str = "") -> None:
    wanted = [case for case in CASES.values() if word in case.key]
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(wanted, start=1):
            path = Path(folder) / "recorded.json"
            observed(ranks=case.ranks, key=case.key, path=str(path))
            found = json.loads(path.read_text())
            mistake = found["verdict"]["mistake"]
            told = "" if mistake == case.mistake else f": judged as {mistake or 'right'}, not as {case.mistake}"
            print(f"{number} of {len(wanted)}  {case.key}{told}", flush=True)
            recordings.write(case.exercise, {**recordings.read(case.exercise), case.name: found})
    for exercise in {case.exercise for case in CASES.values()}:  # forget what is no case any more
        names = {case.name for case in CASES.values() if case.exercise == exercise}
        recordings.write(exercise, {name: it for name, it in recordings.read(exercise).items() if name in names})
    end_worlds()


if __name__ == "__main__":
    main(*sys.argv[1:])
