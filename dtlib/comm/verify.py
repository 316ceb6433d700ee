"""Do all ranks call the same thing, and do both ends of a message mean the same?

Before a collective begins, every rank tells the others what it calls; a note with shape, type and line travels beside
each message. Without this an operation whose arguments disagree hangs, or adds nonsense without a word. The notes are
as short as one packet and travel in log2 N rounds, so in a notebook it is always on.

    rank 0   all_reduce(sum) of (4,) float32   line 3 \\
    rank 1   all_reduce(sum) of (4,) float32   line 3  > the same everywhere? go on : say who calls what, and where
    rank 2   broadcast(from rank 0) of (1,) .. line 5 /
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod

import numpy as np

from dtlib.comm.algorithms import dissemination_all_gather
from dtlib.comm.call import Call, shape_and_type
from dtlib.comm.waiting import IncomingLink, Link
from dtlib.comm.watch.blame import disagreement, mismatch
from dtlib.errors import RESET, CommunicationError

NOTE = 320  # bytes


@lru_cache(maxsize=1024)  # the same calls again and again
def note_of(what: str, where: str) -> np.ndarray:
    """What a rank tells the others: a call and its line, cut to fit."""
    text = f"{what[:200]}\n{where}".encode()[:NOTE]
    return np.frombuffer(text.ljust(NOTE, b"\0"), dtype=np.uint8)


def read_note(note: np.ndarray) -> tuple[str, str]:
    call, _, where = note.tobytes().rstrip(b"\0").decode(errors="ignore").partition("\n")
    return call, where


def verified(link: Link, call: Call, steps: Iterator[list]) -> Iterator[list]:
    """``steps``, once it is certain that all ranks of ``link`` have called the same."""
    notes = np.empty((link.size, NOTE), dtype=np.uint8)
    notes[0] = note = note_of(str(call), call.where)
    yield from dissemination_all_gather(link, notes)
    if not (notes == note).all():
        said = [read_note(note) for note in notes]
        if len({what for what, _ in said}) > 1:
            # The table begins with this rank; the sentence is the same on all.
            by_rank = {(link.rank + i) % link.size: one for i, one in enumerate(said)}
            raise CommunicationError(disagreement(by_rank))
    if call.counts is not None:
        counts = np.empty((link.size, *call.counts.shape), dtype=np.int64)
        counts[0] = call.counts
        yield from dissemination_all_gather(link, counts)
        check_counts(call, np.roll(counts, link.rank, axis=0))
    yield from steps


def check_counts(call: Call, counts: np.ndarray) -> None:
    """``counts[r]`` are what rank r sends to each rank, and what it expects from each: the same on all ranks."""
    sent, come = counts[:, 0], counts[:, 1].T
    if (sent != come).any():
        row = max(1, prod(call.tensor.shape[1:]))
        source, dest = np.argwhere(sent != come)[0]
        raise CommunicationError(
            f"{call.operation}: rank {source} sends rank {dest} {sent[source, dest] // row} rows, and rank {dest} "
            f"expects {come[source, dest] // row}: input_split_sizes here are output_split_sizes there. {RESET}"
        )


def send_message(link: Link, array: np.ndarray, dest: int, call: Call, notes: Link | None) -> Iterator[list]:
    """A generator like those of the collectives."""
    requests = [link.send(array, dest)]
    if notes is not None:
        requests.append(notes.send(note_of(shape_and_type(call.tensor), call.where), dest))
    yield requests


def receive_message(
    link: IncomingLink, array: np.ndarray, source: int, call: Call, notes: Link | None
) -> Iterator[list]:
    """The other end: raises CommunicationError where the message is not what ``call`` expects."""
    arriving = link.recv(array, source)
    if notes is not None:
        note = np.empty(NOTE, dtype=np.uint8)
        yield [notes.recv(note, source)]
        yield [arriving]  # first, so that nothing is under way any more when an error is raised
        sent, where = read_note(note)
        if sent != shape_and_type(call.tensor):
            raise CommunicationError(mismatch(source, sent, where, call.rank, shape_and_type(call.tensor), call.where))
    else:
        yield [arriving]
    if link.length() != array.nbytes:
        got = "more" if link.length() is None else f"{link.length()} bytes"
        raise CommunicationError(
            f"{call}: {got} arrived, and this tensor has {array.nbytes} bytes; send and recv need the same shape and "
            f"dtype. {RESET}"
        )
