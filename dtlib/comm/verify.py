"""Check that all ranks call the same collective, and that both ends of a message agree.

Before a collective starts, every rank sends its call to all others. A note with shape, dtype and line accompanies each
message. Without this check, an operation with arguments that differ between ranks hangs, or silently returns wrong
values. The notes fit into one packet and need log2 N rounds, so in a notebook the check is always on.

    rank 0   all_reduce(sum) of (4,) float32   line 3 \\
    rank 1   all_reduce(sum) of (4,) float32   line 3  > equal on all ranks? yes: start   no: raise, with all calls
    rank 2   broadcast(from rank 0) of (1,) .. line 5 /
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod

import numpy as np

from dtlib.comm.algorithms import dissemination_all_gather
from dtlib.comm.call import Call, shape_and_type
from dtlib.comm.waiting import IncomingLink, Link
from dtlib.comm.watch.missing_ranks import disagreement, mismatch
from dtlib.errors import RESET, CommunicationError

NOTE = 320  # bytes


# A training loop makes the same calls again and again.
@lru_cache(maxsize=1024)
def note_of(what: str, where: str) -> np.ndarray:
    """Encode a call and its line for the other ranks, cut to ``NOTE`` bytes."""
    text = f"{what[:200]}\n{where}".encode()[:NOTE]
    return np.frombuffer(text.ljust(NOTE, b"\0"), dtype=np.uint8)


def read_note(note: np.ndarray) -> tuple[str, str]:
    """Decode a note into call and line."""
    call, _, where = note.tobytes().rstrip(b"\0").decode(errors="ignore").partition("\n")
    return call, where


def verified(link: Link, call: Call, steps: Iterator[list]) -> Iterator[list]:
    """Run ``steps`` after checking that all ranks of ``link`` made the same call.

    Raises:
        CommunicationError: on every rank, with the calls of all ranks, if they differ.
    """
    notes = np.empty((link.size, NOTE), dtype=np.uint8)
    notes[0] = note = note_of(str(call), call.where)
    yield from dissemination_all_gather(link, notes)
    if notes.tobytes() != note.tobytes() * link.size:
        said = [read_note(note) for note in notes]
        if len({what for what, _ in said}) > 1:
            # `said` begins with this rank's note. Sort it by rank, so that all ranks raise the same message.
            by_rank = {(link.rank + i) % link.size: one for i, one in enumerate(said)}
            raise CommunicationError(disagreement(by_rank))
    if call.counts is not None:
        # Split sizes may differ between ranks, but each rank's sent rows must equal its peer's received rows.
        counts = np.empty((link.size, *call.counts.shape), dtype=np.int64)
        counts[0] = call.counts
        yield from dissemination_all_gather(link, counts)
        check_counts(call, np.roll(counts, link.rank, axis=0))
    yield from steps


def check_counts(call: Call, counts: np.ndarray) -> None:
    """Raise if a rank's split sizes do not match those of its peers.

    ``counts[r]`` are the elements that rank r sends to each rank, and the elements it expects from each. Every rank
    passes the same ``counts``, so all ranks raise together.
    """
    sent, need = counts[:, 0], counts[:, 1].T
    if (sent != need).any():
        row = max(1, prod(call.shape[1:]))
        source, dest = np.argwhere(sent != need)[0]
        raise CommunicationError(
            f"{call.operation}: rank {source} sends {sent[source, dest] // row} rows to rank {dest}, which expects "
            f"{need[source, dest] // row}: input_split_sizes of one must equal output_split_sizes of the other. {RESET}"
        )


def send_message(link: Link, array: np.ndarray, dest: int, call: Call, notes: Link | None) -> Iterator[list]:
    """Send an array and, with ``notes``, a note about it; a generator like those in algorithms.py."""
    requests = [link.send(array, dest)]
    if notes is not None:
        requests.append(notes.send(note_of(shape_and_type(call), call.where), dest))
    yield requests


def receive_message(
    link: IncomingLink, array: np.ndarray, source: int, call: Call, notes: Link | None
) -> Iterator[list]:
    """Receive an array; raise CommunicationError if the message is not what ``call`` expects."""
    arriving = link.recv(array, source)
    if notes is not None:
        note = np.empty(NOTE, dtype=np.uint8)
        yield [notes.recv(note, source)]
        # Complete the message before raising an error, so that nothing stays pending.
        yield [arriving]
        sent, where = read_note(note)
        if sent != shape_and_type(call):
            raise CommunicationError(mismatch(source, sent, where, call.rank, shape_and_type(call), call.where))
    else:
        yield [arriving]
    # Without notes, only a message of another length can be recognised.
    if link.length() != array.nbytes:
        got = "more" if link.length() is None else f"{link.length()} bytes"
        raise CommunicationError(
            f"{call}: this tensor has {array.nbytes} bytes, but {got} arrived; send and recv need the same shape and "
            f"dtype. {RESET}"
        )
