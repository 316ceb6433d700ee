"""Horovod's API for PyTorch on dtlib's verbs: a script written for Horovod runs with one line changed.

    import dtlib.horovod as hvd            # instead of: import horovod.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ...
    loss.backward()                        # gradients are submitted by name, from the last layer on
    optimizer.step()                       # ranks agree on an order, average, and step

How ranks agree is in negotiation.py; what then travels in execution.py. Names, arguments, defaults and errors are those
of ``horovod.torch`` 0.28. Left out, with a sentence each: Adasum, elastic training, process sets, synchronised batch
normalisation and the timeline.
"""

from dtlib.errors import DtlibError
from dtlib.horovod.basics import (
    Adasum,
    Average,
    Max,
    Min,
    NotOffered,
    Product,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from dtlib.horovod.compression import Compression
from dtlib.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from dtlib.horovod.operations import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from dtlib.horovod.optimizer import DistributedOptimizer
from dtlib.horovod.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from dtlib.horovod.request import HorovodInternalError
from dtlib.horovod.submission import barrier, join, poll, synchronize

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "NotOffered",
    "Product", "Sum", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "ccl_built",
    "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "init",
    "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async", "rocm_built",
    "shutdown", "size", "sparse_allreduce_async", "synchronize",
]  # fmt: skip

_LEFT_OUT = {
    "elastic": "ranks cannot come and go in one MPI world; save checkpoints and start anew",
    "SyncBatchNorm": "use torch.nn.GroupNorm, or batch normalisation by each rank alone",
    "ProcessSet": "use the verbs of dtlib.init().comm.split(color) for a part of the ranks",
    "add_process_set": "use the verbs of dtlib.init().comm.split(color) for a part of the ranks",
    "remove_process_set": "there are none but the global one",
    "start_timeline": "use `with dtlib.trace() as trace:`",
    "stop_timeline": "use `with dtlib.trace() as trace:`",
    "grouped_allgather": "call allgather_async for each tensor",
    "grouped_allgather_async": "call allgather_async for each tensor",
    "grouped_reducescatter": "call reducescatter_async for each tensor",
    "grouped_reducescatter_async": "call reducescatter_async for each tensor",
}


class MissingPart(DtlibError, AttributeError):
    """A name of ``horovod.torch`` that this module does not have."""


def __getattr__(name):
    if name in _LEFT_OUT:
        raise MissingPart(f"hvd.{name} is not offered here: {_LEFT_OUT[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
