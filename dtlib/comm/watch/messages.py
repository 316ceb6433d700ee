"""One message from one rank to another, and whether both ends mean the same.

Where ranks verify what they call, a note with shape, type and line travels beside each message.
"""

from collections.abc import Iterator

import numpy as np

from dtlib.comm.waiting import IncomingLink, Link
from dtlib.comm.watch.blame import mismatch
from dtlib.comm.watch.call import Call, shape_and_type
from dtlib.comm.watch.verify import NOTE, note_of, read_note
from dtlib.errors import RESET, CommunicationError


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
