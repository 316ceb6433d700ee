"""A process group of torch's whose collectives are those of a communicator.

torch calls a method here for each function of ``torch.distributed``, and its C++ (DDP, functional collectives) calls
some of them itself. Each translates its arguments, starts operations of the communicator, and answers with a ``Work``.
Ranks are those of the group. Lists of tensors travel as one.

torch uses such a subclass *as* the group, for tensors on all devices: the communicator decides how each one travels, on
a GPU by NCCL or by way of pinned memory (comm/torch/).
"""

from functools import partial

import torch
from torch.distributed import distributed_c10d as c10d

from dtlib.backend.dispatched import seen_by_torch
from dtlib.backend.operations import Operations, warn_of_activations
from dtlib.backend.reductions import moved
from dtlib.backend.work import ReceivedFromAny, joined
from dtlib.comm import Communicator


@seen_by_torch
class Group(Operations):
    """``comm`` is the communicator; ``members`` are its ranks as the world counts them, none for all of them;
    ``forget(group)`` is called at the end."""

    def __init__(self, store, comm, members, forget):
        super().__init__(comm.rank, comm.size)
        self.comm: Communicator | None = comm
        self.members = members
        self._store = store
        self._forget = forget
        self._name = self._description = ""

    def __repr__(self):
        return f"Group({self._name!r}, rank={self.rank()}, size={self.size()})"

    # What torch asks about a group

    def getBackendName(self):
        return "dtlib"

    name = getBackendName

    @property
    def group_name(self):
        return self._name

    def _set_group_name(self, name):
        self._name = name

    @property
    def group_desc(self):
        return self._description

    def _set_group_desc(self, description):
        self._description = description

    @property
    def _device_types(self):
        return [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, device):
        return self

    def get_group_store(self):
        return self._store

    def set_timeout(self, timeout):
        self._alive().time_limit = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self):
        """Let go of the communicator: MPI frees it once all members have done so, and meet again."""
        if self.comm is not None:
            self.comm = self._store = None
            self._forget(self)

    abort = shutdown

    # Collectives

    def allreduce(self, tensors, opts=None):
        opts = opts or c10d.AllreduceOptions()
        return self._each(opts, [partial(self._all_reduce, tensor, opts) for tensor in tensors])

    allreduce_coalesced = allreduce

    def broadcast(self, tensors, opts=None):
        opts = opts or c10d.BroadcastOptions()
        if tensors[0].requires_grad and self.rank() != opts.rootRank:
            warn_of_activations(tensors[0])
        starts = [partial(self._alive().broadcast, moved(tensor), opts.rootRank) for tensor in tensors]
        return self._begin(opts, starts, tensors)

    def reduce(self, tensors, opts):
        return self._each(opts, [partial(self._reduce, tensor, opts.rootRank, opts) for tensor in tensors])

    def all_gather_single(self, output, input, opts=None):
        opts = opts or c10d.AllgatherOptions()
        return self._begin(opts, [partial(self._alive().all_gather, moved(output), moved(input))], [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        pairs = zip(outputs, inputs, strict=True)
        starts = [partial(self._alive().all_gather, moved(output), moved(input)) for output, input in pairs]
        return self._begin(opts or c10d.AllgatherOptions(), starts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, output_lists, inputs, opts=None):
        opts = opts or c10d.AllgatherOptions()
        pairs = zip(output_lists, inputs, strict=True)
        return self._each(opts, [partial(self._all_gather, outputs, input, opts) for outputs, input in pairs])

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        # Here there is a list for each rank, of tensors like all of ``inputs``.
        opts = opts or c10d.AllgatherOptions()
        pairs = zip(zip(*output_lists, strict=True), inputs, strict=True)
        return self._each(opts, [partial(self._all_gather, list(outputs), input, opts) for outputs, input in pairs])

    def reduce_scatter_single(self, output, input, opts=None):
        opts = opts or c10d.ReduceScatterOptions()
        return self._each(opts, [partial(self._reduce_scatter, output, input, opts)])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        opts = opts or c10d.ReduceScatterOptions()
        pairs = zip(outputs, inputs, strict=True)
        return self._each(opts, [partial(self._reduce_scatter, output, input, opts) for output, input in pairs])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs, input_lists, opts=None):
        opts = opts or c10d.ReduceScatterOptions()
        pairs = zip(outputs, input_lists, strict=True)
        return self._each(opts, [partial(self._reduce_scatter_list, output, inputs, opts) for output, inputs in pairs])

    def gather(self, output_lists, inputs, opts):
        [mine] = inputs
        whole = finish = None
        if self.rank() == opts.rootRank:
            [outputs] = output_lists
            whole, finish = self._room(outputs, mine)
        start = partial(self._alive().gather, whole, moved(mine), opts.rootRank)
        return self._begin(opts, [start], output_lists, finish)

    def scatter(self, outputs, input_lists, opts):
        [out] = outputs
        whole = None
        if self.rank() == opts.rootRank:
            [inputs] = input_lists
            self._check_list(inputs, out)
            whole = torch.cat([moved(tensor).reshape(-1) for tensor in inputs])
        start = partial(self._alive().scatter, moved(out), whole, opts.rootRank)
        return self._begin(opts, [start], outputs)

    def all_to_all_single(self, output, input, output_sizes=(), input_sizes=(), opts=None):
        # Numbers even where all are alike: another rank may give them, and all have to give them or none.
        equal = [[len(tensor) // self.size()] * self.size() for tensor in (output, input)]
        sizes = output_sizes or equal[0], input_sizes or equal[1]
        start = partial(self._alive().all_to_all, moved(output), moved(input), *sizes)
        return self._begin(opts or c10d.AllToAllOptions(), [start], [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs, inputs, opts=None):
        self._check_own(outputs, inputs[self.rank()] if len(inputs) == self.size() else None)
        sent, room = torch.cat([moved(one).reshape(-1) for one in inputs]), [moved(one) for one in outputs]
        come = sent.new_empty(sum(one.numel() for one in room))
        sizes = [[one.numel() for one in room], [moved(one).numel() for one in inputs]]

        def finish():
            for one, piece in zip(room, come.split(sizes[0]), strict=True):
                one.copy_(piece.view_as(one))

        start = partial(self._alive().all_to_all, come, sent, *sizes)
        return self._begin(opts or c10d.AllToAllOptions(), [start], outputs, finish)

    def barrier(self, opts=None):
        return self._begin(opts or c10d.BarrierOptions(), [self._alive().barrier], [])

    # Point to point

    def send(self, tensors, dest, tag=0):
        [tensor] = tensors
        return self._begin(None, [partial(self._alive().send, moved(tensor), dest, self._own(tag))], tensors)

    def recv(self, tensors, source, tag=0):
        [tensor] = tensors
        work = self._begin(None, [partial(self._alive().recv, moved(tensor), source, self._own(tag))], tensors)
        work._source_rank = work.source_rank = lambda: source
        return work

    def recv_anysource(self, tensors, tag=0):
        from mpi4py import MPI

        [tensor], comm, tag, status = tensors, self._alive(), self._own(tag), MPI.Status()

        class AnyMessage:
            """In place of a request: waiting.py asks it as it asks requests."""

            @staticmethod
            def Testall(_):
                return comm.mpi.Iprobe(MPI.ANY_SOURCE, tag, status)

        def find():
            return status.Get_source() if AnyMessage.Testall(None) else None

        def wait_until_found(timeout):
            comm.wait_for(AnyMessage(), tensor, "recv from any rank", (timeout and timeout.total_seconds()) or None)
            return status.Get_source()

        receive = partial(comm.recv, moved(tensor), tag=tag, async_op=True)
        return self._collected(ReceivedFromAny(find, wait_until_found, receive, tensors))

    # Several as one

    def _start_coalescing(self, device):
        self._together = []

    def _end_coalescing(self, device):
        works, self._together = self._together, None
        return joined(works)
