"""A verdict: its data, and its sentences."""

import builtins
from dataclasses import dataclass


@dataclass
class Verdict:
    """The verdict that all ranks agree on.

    ``rank`` is the lowest rank with a mistake; None if the answer passed, or if the mistake belongs to no rank.
    ``ranks`` is the number of ranks on which it was judged: 0 for an exercise without ranks.
    """

    exercise: str
    judged: str
    ranks: int
    rank: int | None = None
    mistake: str = ""
    expected: str = ""
    got: str = ""
    hints: tuple = ()
    score: str = ""  # text of the score, if the exercise has one
    scored: tuple[float, float, str] | tuple[()] = ()  # value, par, unit of a score that is recorded
    picture: object = ""
    code: str = ""  # fingerprint of the answer
    note: str = ""  # what a learner should know about this judgement

    @property
    def passed(self) -> bool:
        """Whether the answer is right."""
        return not self.mistake

    def text(self, attempt: int = 0) -> str:
        """Return the text for the learner; later attempts get plainer hints."""
        lines = [self.judged_code() + (f"\n\n{self.picture}\n" if self.picture else ""), self.outcome()]
        return "\n".join(lines + [f"  {name + ':':9} {value}" for name, value in self.details(attempt)])

    def judged_code(self) -> str:
        """Return the line that names the judged answer and the number of ranks."""
        return f"Judged on {self.ranks} ranks: {self.judged}" if self.ranks else f"Judged: {self.judged}"

    def outcome(self) -> str:
        """Return the line that says whether the answer passed."""
        if self.passed:
            few = " Few ranks may hide mistakes: check it with lab.engines(3) too." if 0 < self.ranks < 3 else ""
            return f"Passed: {self.exercise}.{few}{self.score and f' {self.score}'}"
        return f"Not yet: {self.exercise}{'' if self.rank is None else f', on rank {self.rank}'}."

    def details(self, attempt: int = 0) -> list[tuple[str, str]]:
        """Return (name, text) for what was expected, what was found, and the hint of this attempt."""
        note = [("note", self.note)] * bool(self.note)
        if self.passed:
            return note
        hints = [("hint", self.hints[min(attempt, len(self.hints) - 1)])] if self.hints else []
        return [*note, ("expected", self.expected), ("got", self.got), *hints]

    def without_code(self) -> str:
        """Return one sentence about the mistake for all but the learner, without a line or value of the answer."""
        if self.passed:
            return ""
        says = self.hints[0] if self.hints else self.expected
        # The error message and the hint contain lines of the learner's code.
        if self.mistake == "raised":
            kind = self.got.partition(":")[0]
            says = f"{kind if hasattr(builtins, kind) else 'An error'} was raised."
        return says if self.rank is None else f"Rank {self.rank}: {says}"
