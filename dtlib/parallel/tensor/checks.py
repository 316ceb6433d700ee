"""Checks for plain.py, which imports only torch. Importing this module adds the checks to the layers of plain.py.

With these checks, ``group`` may also be a dtlib communicator.
"""

import zlib

import torch
from torch import Tensor

from dtlib.comm import AnyCommunicator, Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.preconditions import around, check_first, check_input, group_and_communicator
from dtlib.gradients.shard_info import note
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
    if len(sizes := set(comm.all_gather_object((cut, whole)))) > 1:
        raise DtlibError(f"Ranks create layers of sizes {sizes}: create the same on all ranks.")
    if cut % comm.size:
        raise DtlibError(f"{cut} features do not divide into {comm.size} equal slices: use the classes of layers.py.")


def check_same_input(comm: Communicator, x: Tensor) -> None:
    """Refuse, on every rank, batches that differ between ranks, because sums over ranks would then mean nothing."""
    mine = torch.tensor([x.numel(), zlib.crc32(x.detach().cpu().contiguous().view(torch.uint8).numpy().data)])
    if (comm.all_gather(mine.new_empty(comm.size, 2), mine) != mine).any():
        raise DtlibError("Ranks have different inputs: give all ranks of this communicator the same batch.")


def _check_column_input(self, x: Tensor) -> None:
    check_same_input(self.comm, x)
    check_input(x, self.weight, "ColumnParallelLinear")


around(ColumnParallelLinear, "__init__", _construct)
around(RowParallelLinear, "__init__", _construct)
check_first(ColumnParallelLinear, "forward", _check_column_input)
check_first(RowParallelLinear, "forward", lambda self, x: check_input(x, self.weight, "RowParallelLinear"))
