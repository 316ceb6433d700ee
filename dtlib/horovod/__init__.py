"""Horovod's API for PyTorch on dtlib's operations: a Horovod script runs after one changed line.

    import dtlib.horovod as hvd            # instead of: import horovod.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ...
    loss.backward()                        # send buckets of gradients, the last layer's first
    optimizer.step()                       # wait for the averages, and step

All ranks must call the operations in the same order. Horovod itself allows any order: a thread on rank 0 collects the
names of tensors, and announces each tensor that is ready on all ranks (A. Sergeev and M. Del Balso, "Horovod: fast and
easy distributed deep learning in TensorFlow", arXiv:1802.05799). Here ranks compare the names of their operations in
notebooks, but not in scripts.

Names, arguments and defaults follow ``horovod.torch`` 0.28, as far as its examples and tutorials use them. For other
names, ``docs/reference/conformance/horovod.md`` has alternatives.
"""

# ruff: noqa: F401, I001
from typing import NoReturn

from dtlib.errors import DtlibError
from dtlib.horovod.basics import (
    HorovodInternalError, init, is_initialized, local_rank, local_size, rank, shutdown, size,
)  # fmt: skip
from dtlib.horovod.compression import Compression
from dtlib.horovod.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from dtlib.horovod.operations import (
    Average, Sum, allgather, allgather_async, allreduce, allreduce_async, barrier, broadcast, broadcast_,
    broadcast_async, synchronize,
)  # fmt: skip
from dtlib.horovod.optimizer import DistributedOptimizer

# Fragment of a name that is not offered -> the alternative, which becomes the error message.
_LEFT_OUT = {
    "elastic": "the ranks of an MPI world cannot change; save checkpoints and start again",
    "adasum": "use op=hvd.Average or op=hvd.Sum",
    "syncbatchnorm": "use SyncBatchNorm(features, comm) of dtlib.parallel.data.batch_norm, with dtlib.init().comm",
    "process": "all operations include all ranks; for a subset, call dtlib.init().comm.split(color)",
    "grouped": "call the asynchronous form for each tensor, then hvd.synchronize",
    "sparse": "gather indices and values with hvd.allgather, or pass tensor.to_dense()",
    "join": "give each rank as many batches as the others, or use join() of dtlib.parallel.data.DataParallel",
    "alltoall": "use dtlib.init().comm.all_to_all(out, tensor, output_split_sizes, input_split_sizes)",
    "reducescatter": "use dtlib.init().comm.reduce_scatter(out, tensor), or a slice of hvd.allreduce(tensor)",
}


class MissingPart(DtlibError, AttributeError):
    """Error for a name that is not offered here, with an alternative."""


def __getattr__(name: str) -> NoReturn:
    for fragment, instead in _LEFT_OUT.items():
        if fragment in name.lower():
            raise MissingPart(f"hvd.{name} is not offered here: {instead}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
