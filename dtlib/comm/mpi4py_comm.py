"""mpi4py's communicator over the same ranks: MPI carries out each call, but waits can be interrupted and time out.

A blocking MPI call notices neither Ctrl-C nor a time limit. So each call here becomes MPI's non-blocking call and a
wait of waiting.py. mpi4py's collectives on pickled objects have no non-blocking form, so they start once all ranks
have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from dtlib.comm.lifetime import ForeignRequests
from dtlib.comm.waiting import Operation

OPERATIONS = {
    "barrier": "barrier", "bcast": "broadcast", "reduce": "reduce", "allreduce": "all_reduce", "gather": "gather",
    "gatherv": "gather", "scatter": "scatter", "scatterv": "scatter", "allgather": "all_gather",
    "allgatherv": "all_gather", "alltoall": "all_to_all", "alltoallv": "all_to_all", "scan": "scan",
    "exscan": "exclusive scan", "reduce_scatter": "reduce_scatter", "reduce_scatter_block": "reduce_scatter",
}  # fmt: skip
WITH_ROOT = "bcast", "reduce", "gather", "gatherv", "scatter", "scatterv"
REDUCTIONS = ((MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MAX, "max"), (MPI.MIN, "min"))
# Recorded as the algorithm of these collectives: the messages that MPI sends for them cannot be counted.
UNCOUNTED = "mpi4py"


class Mpi4pyComm(MPI.Intracomm):
    """The type of ``comm.mpi``. Messages are counted; for collectives, only the calls are recorded.

    Not covered by these waits: ``Waitall`` and similar calls, persistent requests, and windows. An emulated network
    does not delay these calls. A ``comm.send`` cannot be received by ``comm.mpi.Recv``, nor the reverse.
    """

    # The `Communicator`. It is None for communicators that MPI makes from this one, for example with Dup().
    comm: Any = None

    def __new__(cls, comm: object = None) -> Mpi4pyComm:
        raw: Any = getattr(comm, "_mpi", comm)
        made = super().__new__(cls, raw)
        if hasattr(comm, "_mpi"):
            made.comm = comm
        return made

    def Send(self, buf: object, dest: int, tag: int = 0) -> None:
        self.Isend(buf, dest, tag).Wait()

    def Isend(self, buf: object, dest: int, tag: int = 0) -> Pending:
        return self._message("send", dest, tag, Pending(super().Isend(buf, dest, tag)), buf)

    def send(self, obj: object, dest: int, tag: int = 0) -> None:
        self.isend(obj, dest, tag).Wait()

    def isend(self, obj: object, dest: int, tag: int = 0) -> Pending:
        return self._message("send", dest, tag, Pending(super().isend(obj, dest, tag)), MPI.pickle.dumps(obj))

    def Recv(
        self, buf: object, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> None:
        self.Irecv(buf, source, tag).Wait(status)

    def Irecv(self, buf: object, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Pending:
        return self._message("recv", source, tag, Pending(super().Irecv(buf, source, tag)), buf)

    def recv(
        self, buf: object = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> object:
        if self._left_to_mpi(source):
            return super().recv(buf, source, tag, status)
        return self.irecv(buf, source, tag).wait(status)

    def irecv(
        self, buf: object = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> IncomingObject | MPI.Request:
        if self._left_to_mpi(source):
            return super().irecv(buf, source, tag)
        return self._message("recv", source, tag, IncomingObject(partial(super().improbe, source, tag)), None)

    def Sendrecv(
        self, sendbuf: object, dest: int, sendtag: int = 0, recvbuf: object = None, source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG, status: MPI.Status | None = None,
    ) -> None:  # fmt: skip
        sending = self.Isend(sendbuf, dest, sendtag)
        self.Recv(recvbuf, source, recvtag, status)
        sending.Wait()

    def sendrecv(
        self, sendobj: object, dest: int, sendtag: int = 0, recvbuf: object = None, source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG, status: MPI.Status | None = None,
    ) -> object:  # fmt: skip
        sending = self.isend(sendobj, dest, sendtag)
        got = self.recv(recvbuf, source, recvtag, status)
        sending.Wait()
        return got

    def _left_to_mpi(self, peer) -> bool:
        return self.comm is None or peer == MPI.PROC_NULL

    def _message(self, operation, peer, tag, request, content):
        if self._left_to_mpi(peer):
            return request
        comm, sends = self.comm, operation == "send"
        peers = comm.members if peer == MPI.ANY_SOURCE else (comm.members[peer],)
        facts = {"peer": None if peer == MPI.ANY_SOURCE else peer, "tag": tag}
        call = comm._call(operation, _array(content), peers, **facts)
        link = _Message(comm._mpi)
        link.messages, link.bytes = int(sends), _nbytes(content) if sends else 0
        # Sent minus received: the sum over all ranks is zero if every message was received (watch/call_counts.py).
        comm._messages += 1 if sends else -1
        finish = getattr(request, "content", lambda: None)
        request.link = link
        request.handle = Operation(call, link, iter([[request]]), finish, content)
        request.handle.start(comm, async_op=True, in_turn=False)
        return request


class _Message(ForeignRequests):
    status: MPI.Status | None = None

    def all_done(self, requests: list) -> bool:
        self.status = self.status or MPI.Status()
        return requests[0].Test(self.status)

    def give_up(self, requests: list) -> None:
        """Cancel the request. This ends a receive that no message has matched."""
        requests[0].Cancel()


class Pending(MPI.Request):
    """A request with waits that can be interrupted."""

    handle: Any = None
    link: Any = None

    def Wait(self, status: MPI.Status | None = None) -> bool:
        if self.handle is None:
            return super().Wait(status)
        self.handle.wait()
        if status is not None and self.link.status is not None:
            status.Set_source(self.link.status.source)
            status.Set_tag(self.link.status.tag)
            status.Set_elements(MPI.BYTE, self.link.status.Get_count(MPI.BYTE))
        return True

    def wait(self, status: MPI.Status | None = None) -> None:
        self.Wait(status)


class IncomingObject:
    """A pickled object in flight; its receiver does not know its length."""

    handle: Any = None
    link: Any = None
    message: Any = None

    def __init__(self, probe: Callable):
        self.probe = probe

    def Test(self, status: MPI.Status | None = None) -> bool:
        if self.message is None:
            self.message = self.probe(status)
        return self.message is not None

    def Cancel(self) -> None:
        # Do not probe any more: a message that comes later would be matched, and nobody would receive it.
        self.message = self.message or MPI.MESSAGE_NULL

    def content(self) -> object:
        """Receive the matched message and return the unpickled object."""
        return self.message.recv(self.link.status)

    def Wait(self, status: MPI.Status | None = None) -> object:
        value = self.handle.wait()
        if status is not None:
            status.Set_source(self.link.status.source)
            status.Set_tag(self.link.status.tag)
        return value

    wait = Wait

    def test(self) -> tuple[bool, object]:
        return (True, self.handle.wait()) if self.handle.done() else (False, None)


def _collective(name: str):
    theirs, lower = getattr(MPI.Intracomm, name), name.lower()
    started = None if name == lower else getattr(MPI.Intracomm, f"I{lower}")

    def call(self, *args, **named):
        if self.comm is None:
            return theirs(self, *args, **named)
        comm, tensor, root, op = self.comm, None, None, ""
        # The first buffer names the shape and dtype of this call. With IN_PLACE, the root of gather and scatter names
        # only the whole tensor, and other ranks only their chunk.
        if started and lower not in ("gather", "scatter") and not lower.endswith("v"):
            tensor = next((found for each in (*args, *named.values()) if (found := _array(each)) is not None), None)
        if lower in WITH_ROOT:
            root = named.get("root", next((each for each in args[1:] if isinstance(each, int)), 0))
        if "reduce" in lower:
            ops = [each for each in (*args, *named.values()) if isinstance(each, MPI.Op)] or [MPI.SUM]
            op = next((word for known, word in REDUCTIONS if known == ops[0]), "op")
        # Count this call as a collective, so that ranks that are out of step are noticed.
        comm._next_tag()
        facts = {"op": op, "peer": root, "algorithm": UNCOUNTED}
        what = comm._call(OPERATIONS[lower], tensor, comm.members, comm.collective_count, **facts)
        raw = MPI.Intracomm(comm._mpi)

        def steps():
            yield [started(raw, *args, **named) if started else raw.Ibarrier()]

        # For pickled objects wait in a barrier first. MPI's blocking call then starts on all ranks at once, and ends
        # soon.
        finish = (lambda: None) if started else partial(theirs, raw, *args, **named)
        moving = comm._compared(what, steps())
        return Operation(what, ForeignRequests(comm._mpi), moving, finish, (args, named)).start(comm)

    call.__name__, call.__doc__ = name, theirs.__doc__
    return call


# Wrap each collective that the installed MPI also has in a non-blocking form.
for _lower in OPERATIONS:
    for _name in (_lower, _lower.capitalize()):
        if hasattr(MPI.Intracomm, _name) and hasattr(MPI.Intracomm, f"I{_lower}"):
            setattr(Mpi4pyComm, _name, _collective(_name))


def _array(content):
    """Return the array or tensor of a buffer specification such as ``[array, MPI.DOUBLE]``, or None."""
    first = content[0] if isinstance(content, list | tuple) and content else content
    return first if hasattr(first, "shape") and hasattr(first, "dtype") else None


def _nbytes(content) -> int:
    if isinstance(content, list | tuple):  # not `match`: since numpy 2.5, arrays match patterns of sequences, too
        content, *rest = content
        if len(rest) == 2 and isinstance(rest[0], int) and isinstance(rest[1], MPI.Datatype):
            return rest[0] * rest[1].Get_size()
    return content.nbytes if hasattr(content, "nbytes") else memoryview(content).nbytes
