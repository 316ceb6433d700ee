"""Horovod's API for PyTorch on dtlib's operations: a script written for Horovod runs with one line changed.

    import dtlib.horovod as hvd            # instead of: import horovod.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ...
    loss.backward()                        # gradients are submitted by name, from the last layer on
    optimizer.step()                       # ranks agree on an order, average, and step

How ranks agree is in negotiation.py; what then travels in execution.py. Here is what Horovod's examples and tutorials
call, with the names, arguments, defaults and errors of ``horovod.torch`` 0.28; what is left out says what to use
instead.
"""

# ruff: noqa: F401, I001
from typing import NoReturn

from dtlib.errors import DtlibError
from dtlib.horovod.basics import (
    NotOffered, ccl_built, cross_rank, cross_size, cuda_built, ddl_built, gloo_built, gloo_enabled, init,
    is_initialized, local_rank, local_size, mpi_built, mpi_enabled, mpi_threads_supported, nccl_built, rank,
    rocm_built, shutdown, size,
)  # fmt: skip
from dtlib.horovod.compression import Compression
from dtlib.horovod.functions import (
    allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters,
)  # fmt: skip
from dtlib.horovod.operations import (
    Average, Max, Min, Product, Sum, allgather, allgather_async, allreduce, allreduce_, allreduce_async,
    allreduce_async_, barrier, broadcast, broadcast_, broadcast_async, broadcast_async_, join, poll, synchronize,
)  # fmt: skip
from dtlib.horovod.optimizer import DistributedOptimizer
from dtlib.horovod.request import HorovodInternalError

# What the names contain, and the way round.
_LEFT_OUT = {
    "elastic": "ranks cannot come and go in one MPI world; save checkpoints and start anew",
    "adasum": "use op=hvd.Average or op=hvd.Sum",
    "syncbatchnorm": "use SyncBatchNorm(features, comm) of dtlib.parallel.data.batch_norm, with dtlib.init().comm",
    "process": "all operations are for all ranks; use those of dtlib.init().comm.split(color) for some of them",
    "homogeneous": "compare hvd.local_size() over ranks with hvd.allgather_object",
    "timeline": "use `with dtlib.trace() as trace:`",
    "grouped": "call the asynchronous form for each tensor, then hvd.synchronize: they travel in one buffer",
    "sparse": "gather indices and values with hvd.allgather, or pass tensor.to_dense()",
    "alltoall": "use dtlib.init().comm.all_to_all(out, tensor, output_split_sizes, input_split_sizes)",
    "reducescatter": "use dtlib.init().comm.reduce_scatter(out, tensor), or a slice of hvd.allreduce(tensor)",
}


class MissingPart(DtlibError, AttributeError):
    """A name of ``horovod.torch`` that this module does not have."""


def __getattr__(name: str) -> NoReturn:
    for fragment, way_round in _LEFT_OUT.items():
        if fragment in name.lower():
            raise MissingPart(f"hvd.{name} is not offered here: {way_round}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
