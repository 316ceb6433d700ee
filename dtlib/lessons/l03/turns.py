"""Ranks that take turns in one process: SIMULATED. The algorithms are the library's, messages and bytes are counted,
and times mean nothing.

A network delivers in rounds. In one round each rank sends one message at most and receives one, as in the cost model
of theory/collectives.py; so an algorithm takes here as many rounds as it does there.
"""

from collections import deque
from dataclasses import dataclass

from dtlib.comm.numbers import Numbers

EAGER = 4096  # bytes: a send of so many ends at once, received or not, as with Open MPI on one machine


@dataclass(frozen=True)
class Message:
    """One that has arrived, in the round ``number``; ``numbers`` is the sender's memory, ``what`` what it was for."""

    number: int
    source: int
    dest: int
    numbers: Numbers
    what: object = None


@dataclass
class Request:
    """A send or a receive under way. ``other`` is that of a receive's sender, once it is done."""

    numbers: Numbers
    done: bool = False
    what: object = None
    other: "Request | None" = None


class Network:
    """Messages between ``size`` ranks; ``arrived`` are those that were delivered, in order."""

    def __init__(self, size: int):
        self.size, self.number = size, 0
        self.arrived: list[Message] = []
        self.forget()

    def forget(self) -> None:
        """Drop what is under way: ranks begin anew."""
        self._sent: list[deque[tuple]] = [
            deque() for _ in range(self.size)
        ]  # of each rank, in the order in which it sent them
        self._awaited: dict[tuple, deque[Request]] = {}  # (tag, source, dest) -> requests

    def send(self, tag: object, source: int, dest: int, numbers: Numbers, what: object) -> Request:
        eager = numbers.nbytes <= EAGER
        request = Request(numbers.copy() if eager else numbers, eager, what)
        self._sent[source].append((tag, dest, request, numbers))
        return request

    def recv(self, tag: object, source: int, dest: int, numbers: Numbers) -> Request:
        request = Request(numbers)
        self._awaited.setdefault((tag, source, dest), deque()).append(request)
        return request

    def deliver(self) -> list[Message]:
        """A round: what arrives in it, of what a rank has asked for."""
        got, busy = [], set()
        for source, sent in enumerate(self._sent):
            for at, (tag, dest, request, place) in enumerate(sent):
                if dest in busy or not (waiting := self._awaited.get((tag, source, dest))):
                    continue
                busy.add(dest)
                del sent[at]
                received = waiting.popleft()
                count = min(len(received.numbers), len(request.numbers))
                received.numbers[:count] = request.numbers[:count]
                received.done = request.done = True
                received.other = request
                got.append(Message(self.number, source, dest, place, request.what))
                break
        self.number += 1
        self.arrived += got
        return got


class TurnLink:
    """What an algorithm of one rank sends and receives with (waiting.py); ``tag`` keeps the messages of calls apart."""

    def __init__(self, network: Network, rank: int, tag: object = 0, what: object = None):
        self.network, self.rank, self.size = network, rank, network.size
        self.messages = self.bytes = 0
        self._tag, self._what = tag, what

    def send(self, numbers: Numbers, dest: int) -> Request:
        self.messages += 1
        self.bytes += numbers.nbytes
        return self.network.send(self._tag, self.rank, dest, numbers, self._what)

    def recv(self, numbers: Numbers, source: int) -> Request:
        return self.network.recv(self._tag, source, self.rank, numbers)

    def all_done(self, requests: list[Request]) -> bool:
        return all(request.done for request in requests)

    def give_up(self, requests: list[Request]) -> None:
        pass

    def nothing(self) -> Numbers:
        return Numbers([])

    def scratch(self, like: Numbers, number: int = 0) -> Numbers:
        return Numbers([0] * len(like), like.dtype)
