"""Errors of a ``%%px`` cell: which ranks raised which, and how to cure it."""

import itertools
import re
import textwrap
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn

from IPython.core.interactiveshell import InteractiveShell

from dtlib.errors import DtlibError
from dtlib.lab.engines.live_view import ranks_in_words
from dtlib.lab.foreign import EngineSet

ANSWER_SECONDS = 2  # seconds for requests that idle ranks answer at once
# Errors that follow from an error on another rank.
FOLLOW_UP_ERRORS = ("PeerFailed", "WaitTimeout", "GroupPeerFailed", "GroupTimeout")
NAME = re.compile(r"name '(\w+)' is not defined")


def names() -> list[str]:
    """Return the names that cells have defined on this rank."""
    from IPython import get_ipython

    shell = get_ipython()
    return [name for name in shell.user_ns if name not in shell.user_ns_hidden and not name.startswith("_")]


class RanksFailed(DtlibError):
    """An error of a cell on at least one rank: ``errors`` maps ranks to ipyparallel's RemoteError."""

    def __init__(self, errors: dict, cures: list[str], waited: str = ""):
        self.errors, self.cures, self.waited = errors, cures, waited  # waited: the last wait
        super().__init__("; ".join(f"{who}: {error.ename}: {error.evalue}" for who, error in self._groups()))

    def _groups(self):
        """Yield the ranks with equal errors, and one such error; errors that follow from others are last."""
        groups: dict = {}
        for rank, error in self.errors.items():
            groups.setdefault((error.ename, error.evalue), []).append(rank)
        for ranks in sorted(groups.values(), key=lambda ranks: self.errors[ranks[0]].ename in FOLLOW_UP_ERRORS):
            yield ranks_in_words(ranks), self.errors[ranks[0]]

    def _render_traceback_(self):
        lines = []
        for who, error in self._groups():
            if error.ename == "KeyboardInterrupt":
                lines.append(f"Interrupted on {who}.")
                if self.waited:
                    lines.append(textwrap.fill(f"Until then they waited: {self.waited}", 95))
            else:
                lines += [f"On {who}:", error.traceback or f"{error.ename}: {error.evalue}"]
        return lines + self.cures


def raise_errors(errors: dict, waited: str, shell: InteractiveShell, engines: EngineSet) -> NoReturn:
    """Raise ``RanksFailed`` of these ranks, with cures."""
    first = [rank for rank, error in errors.items() if error.ename not in FOLLOW_UP_ERRORS] or list(errors)
    cures = _cures(errors.values(), shell, engines) + _refuse_where_out_of_step(engines, ranks_in_words(first))
    raise RanksFailed(errors, cures, waited) from None


def _refuse_where_out_of_step(engines, who: str) -> list[str]:
    """After an error, make all ranks refuse communicators on which their calls differ; return advice."""
    from dtlib.comm.watch import call_counts

    if engines.reset_wanted:
        engines.reset_now()
        return ["Reset was pressed: the ranks are back in step."]
    counts = engines.ask(call_counts.counts, seconds=ANSWER_SECONDS)
    if counts is None:
        return ["Some ranks do not say whether they are in step: run %px dtlib.reset() before they go on."]
    names = call_counts.differing(counts)
    if not names:
        return []
    why = f"was in use when a cell ended with an error on {who}"
    engines.ask(call_counts.refuse, names, why, seconds=ANSWER_SECONDS)
    return ["The ranks are out of step: run %px dtlib.reset() before they communicate again."]


def _cures(errors, shell, engines) -> list[str]:
    if any(error.ename == "StdinNotImplementedError" for error in errors):
        return ["input() does not work on ranks: use it in a cell without %%px, and send the answer with lab.push."]
    unknown = {found[1] for error in errors if error.ename == "NameError" and (found := NAME.search(error.evalue))}
    return [
        f"`{name}` is defined in the notebook but not on the ranks: remove %%px from this cell, or run the cell that "
        f"defines `{name}` with %%px (or with %%px --local for both)."
        if name in shell.user_ns
        else did_you_mean(name, itertools.chain(*(engines.ask(names, seconds=ANSWER_SECONDS) or [])))
        or f"`{name}` is not defined on the ranks: run the %%px cell that defines it first."
        for name in sorted(unknown)
    ]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Suggest the nearest of these names; empty if none is near."""
    near = get_close_matches(name, set(names), n=1, cutoff=0.75)
    return f"`{name}` is not defined: did you mean `{near[0]}`?" if near else ""
