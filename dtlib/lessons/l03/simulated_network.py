"""A SIMULATED network for ranks that take turns in one process. It counts messages and bytes; times have no meaning.

The network delivers in rounds. In a round each rank sends at most one message and receives at most one, as in the cost
model of theory/collectives.py. So an algorithm takes the number of rounds that the model gives.
"""

from collections import deque
from dataclasses import dataclass

from dtlib.comm.numbers import Numbers

# Bytes: a send of at most this size completes at once, received or not, as with Open MPI on one machine.
EAGER = 4096


@dataclass(frozen=True)
class Message:
    """A message that arrived in round ``number``. ``numbers`` is the sender's memory, ``what`` a label."""

    number: int
    source: int
    dest: int
    numbers: Numbers
    what: object = None


@dataclass
class Request:
    """A pending or completed send or receive. ``other`` of a completed receive is the matching send."""

    numbers: Numbers
    done: bool = False
    what: object = None
    other: "Request | None" = None


class Network:
    """A network of ``size`` ranks; ``arrived`` has all delivered messages, in order."""

    def __init__(self, size: int):
        self.size, self.number = size, 0
        self.arrived: list[Message] = []
        self.forget()

    def forget(self) -> None:
        """Drop all pending messages, so that ranks can start again."""
        self._sent: list[deque[tuple]] = [deque() for _ in range(self.size)]  # for each rank, in the order of its sends
        self._awaited: dict[tuple, deque[Request]] = {}  # (tag, source, dest) -> requests

    def send(self, tag: object, source: int, dest: int, numbers: Numbers, what: object) -> Request:
        """Start a send, and return its request. A send of at most ``EAGER`` bytes is complete at once."""
        eager = numbers.nbytes <= EAGER
        request = Request(numbers.copy() if eager else numbers, eager, what)
        self._sent[source].append((tag, dest, request, numbers))
        return request

    def recv(self, tag: object, source: int, dest: int, numbers: Numbers) -> Request:
        """Post a receive, and return its request."""
        request = Request(numbers)
        self._awaited.setdefault((tag, source, dest), deque()).append(request)
        return request

    def deliver(self) -> list[Message]:
        """Deliver one round: match sends with posted receives, at most one per sender and per receiver."""
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


class SimulatedLink:
    """A rank's link to the network, for the algorithms (waiting.py); ``tag`` separates the messages of calls."""

    def __init__(self, network: Network, rank: int, tag: object = 0, what: object = None):
        self.network, self.rank, self.size = network, rank, network.size
        self.messages = self.bytes = 0
        self._tag, self._what = tag, what

    def send(self, numbers: Numbers, dest: int) -> Request:
        """Count and start a send."""
        self.messages += 1
        self.bytes += numbers.nbytes
        return self.network.send(self._tag, self.rank, dest, numbers, self._what)

    def recv(self, numbers: Numbers, source: int) -> Request:
        """Post a receive."""
        return self.network.recv(self._tag, source, self.rank, numbers)

    def all_done(self, requests: list[Request]) -> bool:
        """Return whether all requests are complete."""
        return all(request.done for request in requests)

    def give_up(self, requests: list[Request]) -> None:
        """Do nothing: simulated requests need no cancelling."""

    def nothing(self) -> Numbers:
        """Return an empty array, as a message without content."""
        return Numbers([])

    def scratch(self, like: Numbers, number: int = 0) -> Numbers:
        """Return a new array like ``like`` for received values."""
        return Numbers([0] * len(like), like.dtype)
