"""Checks for plain.py, which imports only torch. Importing this module adds the checks to the layers of plain.py.

With these checks, ``group`` may also be a dtlib communicator.
"""

import zlib

import torch
from torch import Tensor

from dtlib.comm import AnyCommunicator, Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.preconditions import around, check_first, group_and_communicator
from dtlib.gradients.same_model import check_same_arguments
from dtlib.gradients.shard_info import note
from dtlib.parallel.tensor.layers import check_width
from dtlib.parallel.tensor.plain import ColumnParallelLinear, RowParallelLinear


def _construct(original, self, in_features, out_features, group: AnyCommunicator | None = None):
    by_columns = isinstance(self, ColumnParallelLinear)
    (group, comm), features = group_and_communicator(group), (in_features, out_features)
    check_features(comm, features[by_columns], features[not by_columns])
    original(self, in_features, out_features, group)
    for parameter in [self.weight, self.bias] if by_columns else [self.weight]:
        # Mark shards: the norm of their gradients needs the other ranks, so functions for whole gradients refuse them.
        note(parameter, tensor=comm.members)
    self.comm = comm


def check_features(comm: Communicator, cut: int, whole: int) -> None:
    """Refuse, on every rank, a layer whose features cannot be divided into equal slices."""
    check_same_arguments(comm, "The layer", features=(cut, whole))
    if cut % comm.size:
        raise DtlibError(f"{cut} features do not divide into {comm.size} equal slices: use the classes of layers.py.")


def check_same_input(comm: Communicator, x: Tensor) -> None:
    """Refuse, on every rank, batches that differ between ranks, because sums over ranks would then mean nothing."""
    mine = torch.tensor([x.numel(), zlib.crc32(x.detach().cpu().contiguous().view(torch.uint8).numpy().data)])
    if (comm.all_gather(mine.new_empty(comm.size, 2), mine) != mine).any():
        raise DtlibError("Ranks have different inputs: give all ranks of this communicator the same batch.")


around(ColumnParallelLinear, "__init__", _construct)
around(RowParallelLinear, "__init__", _construct)
for kind in (ColumnParallelLinear, RowParallelLinear):
    takes = f"as {kind.__name__} takes"
    check_first(kind, "forward", lambda self, x, takes=takes: check_width(x, self.weight.shape[1], takes))
# This check communicates, so all ranks must reach it: it is added last, and called first.
check_first(ColumnParallelLinear, "forward", lambda self, x: check_same_input(self.comm, x))
