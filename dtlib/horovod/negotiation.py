"""Tensors are matched by name: ranks may submit them in different orders, and agree in rounds what travels next.

In a round every rank tells all others which tensors it has submitted since the last round. So all ranks keep the same
table, and each can see for itself what all have submitted; that is executed, in the order of the table:

    round 1   rank 0 submits a, b      table   a  0 .      nothing is complete
              rank 1 submits c                 b  0 .
                                               c  . 1
    round 2   rank 0 submits c         table   a  0 1      a and c travel, in this order on both ranks
              rank 1 submits a                 b  0 .
                                               c  0 1
    round 3   rank 0 has no news       table   b  0 1      b travels
              rank 1 submits b

A round is a collective, so all ranks must take part in the same number of them. One rule is enough for that: *a rank
opens a round only while something that it has submitted has not been executed*. Say that rank r opens round k for the
sake of t. t is executed in some round j >= k, and only when all ranks have submitted it; a rank that has submitted t
and waits for it opens rounds until t is executed, so all of them take part in k, ..., j. Once everything is executed
nobody opens a further round, and all ranks have taken part in those up to the last execution: nobody is needed by
others once its own is done.

What cannot end is seen from the table, too: if in one round all ranks wait, nobody has news and nothing is complete,
then nothing will ever change, and every rank raises the same sentence. A rank that does not come to a round at all is
what the communicator's ``time_limit`` is for.

A rank does not wait for a round unless it waits for a tensor. During a backward pass rounds and tensors move on
whenever a gradient comes.

Counterpart: the controller and the response cache of Horovod, where a thread on rank 0 decides for all
(A. Sergeev and M. Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", arXiv:1802.05799).
"""

import json
import os
from collections import Counter, deque
from dataclasses import astuple

import torch

from dtlib.comm import Communicator
from dtlib.comm.waiting import advance_all
from dtlib.comm.watch import blame, board
from dtlib.errors import WaitTimeout
from dtlib.horovod.execution import Batch, launch
from dtlib.horovod.request import DuplicateName, HorovodInternalError, Request, disagreement, ranks_of

COMPUTES, WAITS, JOINED = range(3)  # what a rank does while a round is open


class Operation:
    """A tensor that this rank has submitted: what the asynchronous forms return.

    ``output`` is where the result goes, or the result; ``argument`` is what an in-place form was given and returns.
    """

    def __init__(self, request: Request, negotiator: "Negotiator", tensor: torch.Tensor | None = None,
                 output: torch.Tensor | None = None, argument: torch.Tensor | None = None):  # fmt: skip
        self.request, self.negotiator = request, negotiator
        self.tensor, self.output, self.argument = tensor, output, argument
        self.agreed = False  # all ranks have submitted it and it is under way, or it has failed
        self.done = False
        self.error: HorovodInternalError | None = None
        self.watch(tensor)

    def watch(self, tensor: torch.Tensor | None) -> None:
        """``tensor`` must not be changed by others from here on."""
        self.watched, self._version = tensor, _version(tensor)

    def check_unchanged(self) -> None:
        if _version(self.watched) != self._version:
            self.error = HorovodInternalError(
                f"{self.request.kind} {self.request.name!r}: its tensor was changed between being submitted and "
                "synchronize(), so what was sent is not what is there. Call synchronize() first (for gradients "
                "optimizer.synchronize(), then `with optimizer.skip_synchronize(): optimizer.step()`)."
            )


def _version(tensor):
    """How often torch has written into this memory; not counted for tensors of inference mode."""
    return None if tensor is None or tensor.is_inference() else tensor._version


class Negotiator:
    """One rank's copy of the table, what it has submitted, and the round that is open."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        # Rank 0's holds for all: buffers must be the same everywhere.
        self.cap = comm.broadcast_object(int(os.environ.get("HOROVOD_FUSION_THRESHOLD", 64 * 2**20)))
        self.rounds = 0  # that this rank has taken part in
        self._unnamed: Counter[str] = Counter()  # how many tensors without a name there were, by kind
        self._mine: dict[str, Operation] = {}  # operations of this rank that are not done
        self._news: list[Operation] = []  # those of them that the others have not been told
        self._table: dict[str, dict[int, Request]] = {}  # by key, in the order of the first submission, and by rank
        self._joined: list[int] = []  # ranks in join()
        self._join: Operation | None = None  # the operation of this rank's join()
        self._round: Round | None = None
        self._batches: deque[Batch] = deque()

    # What the operations call

    def number(self, kind: str) -> int:
        """For the name of a tensor that has none: they are counted, from the beginning and from each join on."""
        self._unnamed[kind] += 1
        return self._unnamed[kind]

    def submit(self, operation: Operation) -> Operation:
        """Announce an operation in the next round. Does not wait; a full buffer opens a round."""
        key = operation.request.key
        earlier = self._mine.get(key)
        while earlier is not None and earlier.agreed and not earlier.done:  # under way, so nobody is waited for
            self._finish_batch()
        if key in self._mine:
            raise DuplicateName(
                f"Requested to {operation.request.kind} a tensor with the same name as another tensor that is "
                f"currently being processed: {operation.request.name!r}. Use a different tensor name, or synchronize "
                "the first one."
            )
        self._mine[key] = operation
        self._news.append(operation)
        full = sum(one.tensor.nbytes for one in self._news if one.tensor is not None) >= self.cap
        if full or self._round or self._batches:
            self.advance(open_round=full)
        return operation

    def advance(self, open_round: bool = True) -> None:
        """Do what can be done without waiting."""
        advance_all()
        if self._round is not None and self._round.move():
            self._close(self._round)
        if open_round and self._round is None and any(not operation.agreed for operation in self._mine.values()):
            self._open(COMPUTES)
        while self._batches and self._batches[0].handle.done():
            self._finish_batch()

    def wait(self, operation: Operation) -> torch.Tensor:
        """Take part in rounds until the operation is executed, and wait for its result."""
        while not operation.agreed:
            opened = self._round or self._open(JOINED if operation is self._join else WAITS)
            try:
                opened.wait()
            except WaitTimeout as error:
                raise WaitTimeout(self._stalled(operation, error)) from None
            self._close(opened)
        while not operation.done:
            self._finish_batch()
        if operation.error:
            raise operation.error
        assert operation.output is not None
        return operation.output

    def join(self) -> int:
        """Take part in the reductions of the others with zeros until all have joined; returns who did so last."""
        self._join = Operation(Request("join", f"rank {self.comm.rank}"), self)
        return int(self.wait(self._join))

    def finish_all(self) -> None:
        """Wait for all that this rank has submitted."""
        for operation in list(self._mine.values()):
            self.wait(operation)

    # A round

    def _open(self, state: int) -> "Round":
        said, self._news = [astuple(operation.request) for operation in self._news], []
        self._round = Round(self.comm, json.dumps([state, said]).encode())
        self.rounds += 1
        return self._round

    def _close(self, over: "Round") -> None:
        """Enter what the ranks have said into the table, and execute what is complete."""
        said, self._round = over.said or [], None
        for rank, (state, requests) in enumerate(said):
            if state == JOINED and rank not in self._joined:
                self._joined.append(rank)
            for request in map(Request.read, requests):
                self._table.setdefault(request.key, {})[rank] = request
        everybody = set(range(self.comm.size))
        complete = [key for key, asked in self._table.items() if everybody <= {*asked, *self._joined}]
        self._execute({key: self._table.pop(key) for key in complete})
        if self._join is not None and len(self._joined) == self.comm.size and not self._table:
            self._join.output = torch.tensor(self._joined[-1])
            self._end(self._join)
            self._start_anew()
        elif not complete and all(state for state, _ in said) and not any(requests for _, requests in said):
            self._give_up()

    def _execute(self, complete: dict) -> None:
        # Of an earlier tensor of the same name this rank may not have taken the result yet.
        waiting = {key: operation for key, operation in self._mine.items() if not operation.agreed}
        agreed = {}
        for key, asked in complete.items():
            if error := disagreement(asked) or self._beyond_join(asked):
                if key in waiting:  # else this rank has joined
                    self._end(waiting[key], error)
            else:
                agreed[key] = asked
        self._batches += launch(self.comm, agreed, waiting, self.cap)
        for operation in (waiting[key] for key in agreed if key in waiting):
            operation.agreed = True

    def _finish_batch(self) -> None:
        self._batches[0].finish()
        for operation in self._batches.popleft().operations:
            self._end(operation)

    def _end(self, operation: Operation, sentence: str | None = None) -> None:
        operation.agreed = operation.done = True
        operation.error = HorovodInternalError(sentence) if sentence else operation.error
        if self._mine.get(operation.request.key) is operation:
            del self._mine[operation.request.key]

    def _start_anew(self) -> None:
        """All ranks come here at once: after a join, or after an error that all have got."""
        self._joined, self._join = [], None
        self._unnamed.clear()  # as some ranks may have submitted more tensors than others

    # What goes wrong

    def _beyond_join(self, asked) -> str | None:
        request = next(iter(asked.values()))
        if len(asked) == self.comm.size or (request.kind == "allreduce" and request.op in ("sum", "average")):
            return None
        return (
            f"{request.kind} {request.name!r} needs all ranks, and {self._absent(asked)} called join(): after that "
            "only allreduce with op=Average or Sum goes on, with zeros from those who joined."
        )

    def _absent(self, asked) -> str:
        return ranks_of([rank for rank in range(self.comm.size) if rank not in asked])

    def _give_up(self) -> None:
        """All ranks wait and nothing will change: fail everything, on all ranks alike."""
        absent = [
            f"{key} was submitted by {ranks_of(sorted(asked))} and not by {self._absent(asked)}"
            for key, asked in list(self._table.items())[:5]
        ]
        if len(self._table) > 5:
            absent.append(f"and {len(self._table) - 5} more")
        if self._joined:
            absent.append(f"{ranks_of(sorted(self._joined))} called join()")
        sentence = f"The ranks wait for each other: {'; '.join(absent)}. Submit the same names on all ranks."
        for operation in [*self._mine.values(), *([self._join] if self._join else [])]:
            if not operation.agreed:
                self._end(operation, sentence)
        self._table.clear()
        self._start_anew()

    def _stalled(self, operation, error) -> str:
        """Who has not submitted what this rank waits for, as far as this rank can know."""
        request = operation.request
        absent = set(range(self.comm.size)) - set(self._table.get(request.key, {})) - {self.comm.rank}
        if board.current is not None:
            # Who has reached the round may have submitted it just now.
            not_here = blame.missing(board.current.rank, board.current.seen())
            absent = absent & set(not_here) or absent
        return (
            f"{request.kind} {request.name!r} was not submitted by {ranks_of(sorted(absent))} within "
            f"{self.comm.time_limit:g} s: submit the same names on all ranks. {error} Then call hvd.init() again."
        )


class Round:
    """All ranks' news under way: first their lengths, then themselves, padded to the longest."""

    def __init__(self, comm: Communicator, said: bytes):
        self.said: list | None = None
        self._steps = self._exchange(comm, torch.frombuffer(bytearray(said), dtype=torch.uint8))
        self._handle = next(self._steps)

    def move(self) -> bool:
        """Go on without waiting; True once everything is there."""
        while self.said is None and self._handle.done():
            self._next()
        return self.said is not None

    def wait(self) -> None:
        while self.said is None:
            self._next()

    def _next(self) -> None:
        self._handle.wait()
        self._handle = next(self._steps, None)

    def _exchange(self, comm, mine):
        lengths = torch.zeros(comm.size, dtype=torch.int64)
        yield comm.all_gather(lengths, torch.tensor([len(mine)]), async_op=True)
        everyones = torch.zeros(comm.size, int(lengths.max()), dtype=torch.uint8)
        padded = torch.zeros_like(everyones[0])
        padded[: len(mine)] = mine
        yield comm.all_gather(everyones, padded, async_op=True)
        rows = zip(everyones, lengths.tolist(), strict=True)
        self.said = [json.loads(row[:length].numpy().tobytes()) for row, length in rows]
