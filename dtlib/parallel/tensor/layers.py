"""Layers of which each rank has a shard of the weights.

    ColumnParallelLinear      weight, (out_features, in_features) as torch keeps it, cut along out_features
    RowParallelLinear         ... cut along in_features
    VocabParallelEmbedding    weight, (num_embeddings, embedding_dim), cut along num_embeddings

Y = X A is written with A of shape (in_features, out_features), so A's columns are the rows of torch's weight.
"""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from dtlib.comm import AnyCommunicator, Communicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.shard_info import note
from dtlib.parallel.tensor import functions


class ParallelLayer(nn.Module):
    """What the layers share: this rank's shards of the parameters of a whole layer, which has rank 0's values.

    ``partition_dim`` says along which dimension each parameter is cut; one that it does not name is whole, and equal,
    on every rank. ``whole_shapes`` are those before the cut.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    sizes: tuple[str, ...] = "in_features", "out_features"
    in_features: int
    out_features: int
    shared = ""  # the size that ranks share among them
    partition_dim: ClassVar[dict[str, int]] = {}
    sequence_parallel = False  # whether ranks have slices of the tokens outside of the blocks (functions.py)

    def __init__(self, whole: nn.Module, comm: AnyCommunicator):
        super().__init__()
        self.comm = as_communicator(comm)
        parameters = dict(whole.named_parameters(recurse=False))
        self.whole_shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        dtypes = {name: str(parameter.dtype) for name, parameter in parameters.items()}
        check_same(self.comm, type(self).__name__, shapes=self.whole_shapes, dtypes=dtypes)
        count = getattr(whole, self.shared)
        if count < self.comm.size:
            raise DtlibError(
                f"{type(self).__name__}: {self.comm.size} ranks cannot share {self.shared}={count}, as each needs one "
                f"at least: use at most {count} ranks, or a larger {self.shared}."
            )
        self.slice = functions.slice_of(count, self.comm.rank, self.comm.size)
        for name, parameter in parameters.items():
            values = self.comm.broadcast(parameter.detach().clone(memory_format=torch.contiguous_format))
            if name in self.partition_dim:
                shard = values.narrow(self.partition_dim[name], self.slice.start, self.slice.stop - self.slice.start)
                values = shard.clone(memory_format=torch.contiguous_format)  # so that the whole can be freed
            self.register_parameter(name, nn.Parameter(values, parameter.requires_grad))
        for name in self.sizes:
            setattr(self, name, getattr(whole, name))
        if isinstance(whole, nn.Linear) and whole.bias is None:
            self.register_parameter("bias", None)

    @classmethod
    def _of(cls, whole: nn.Module, kind: type[nn.Module], comm: AnyCommunicator) -> Self:
        """The shards of a layer that is there already."""
        check_plain(whole, kind, cls.__name__)
        made = cls.__new__(cls)
        ParallelLayer.__init__(made, whole, comm)
        return made

    def register_parameter(self, name: str, parameter: nn.Parameter | None) -> None:
        """Also what ``layer.weight = ...`` and ``load_state_dict(assign=True)`` call."""
        if parameter is not None and self.comm.size > 1 and name in self.partition_dim:
            note(parameter, tensor=self.comm.members)
        super().register_parameter(name, parameter)

    def extra_repr(self) -> str:
        return f"{self.whole_shapes}, {self.shared} {self.slice.start} to {self.slice.stop} here"


class ColumnParallelLinear(ParallelLayer):
    """``nn.Linear`` whose output features are shared among ranks: each computes some columns of ``x A + b``.

    Args:
        in_features, out_features, bias: as for ``nn.Linear``. Where ``out_features`` does not divide by the ranks,
            shards differ by one.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.
        gather_output: give all ranks the whole output, of shape ``(..., out_features)``; else each has its slice of
            the last dimension, ready for ``RowParallelLinear(..., input_is_parallel=True)``.

    The input, of shape ``(..., in_features)``, is equal on all ranks. Initial values are those of one ``nn.Linear`` on
    rank 0: every rank draws all numbers and keeps its shard, so that generators stay in step.
    Counterpart: Megatron-LM's ``ColumnParallelLinear``.

    Raises:
        DtlibError: for fewer output features than ranks, and for sizes that differ between ranks; on every rank.
    """

    shared = "out_features"
    partition_dim: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(self, in_features: int, out_features: int, comm: AnyCommunicator, bias: bool = True,
                 gather_output: bool = True):  # fmt: skip
        super().__init__(nn.Linear(in_features, out_features, bias), comm)
        self.gather_output = gather_output

    @classmethod
    def from_linear(cls, linear: nn.Linear, comm: AnyCommunicator, gather_output: bool = True) -> Self:
        """The shards of a layer that is there already; rank 0's values count, and ``linear`` stays as it is."""
        made = cls._of(linear, nn.Linear, comm)
        made.gather_output = gather_output
        return made

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.in_features, f"in_features={self.in_features} of ColumnParallelLinear")
        whole = (functions.gather_tokens if self.sequence_parallel else functions.copy_to_ranks)(x, self.comm)
        mine = functional.linear(whole, self.weight, self.bias)
        return functions.gather_from_ranks(mine, self.comm, self.out_features) if self.gather_output else mine


class RowParallelLinear(ParallelLayer):
    """``nn.Linear`` whose input features are shared among ranks: each computes a summand of ``x A``; ``b`` comes last.

    Args:
        in_features, out_features, bias: as for ``nn.Linear``. Where ``in_features`` does not divide by the ranks,
            shards differ by one.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.
        input_is_parallel: each rank passes its slice of the input, as ``ColumnParallelLinear(gather_output=False)``
            gives it; else all pass the whole one, of shape ``(..., in_features)``.

    The output, of shape ``(..., out_features)``, is equal on all ranks, and so are the bias and its gradient.
    Initial values are those of one ``nn.Linear`` on rank 0. Counterpart: Megatron-LM's ``RowParallelLinear``.

    Raises:
        DtlibError: for fewer input features than ranks, and for sizes that differ between ranks; on every rank.
    """

    shared = "in_features"
    partition_dim: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(self, in_features: int, out_features: int, comm: AnyCommunicator, bias: bool = True,
                 input_is_parallel: bool = False):  # fmt: skip
        super().__init__(nn.Linear(in_features, out_features, bias), comm)
        self.input_is_parallel = input_is_parallel

    @classmethod
    def from_linear(cls, linear: nn.Linear, comm: AnyCommunicator, input_is_parallel: bool = False) -> Self:
        """The shards of a layer that is there already; rank 0's values count, and ``linear`` stays as it is."""
        made = cls._of(linear, nn.Linear, comm)
        made.input_is_parallel = input_is_parallel
        return made

    def forward(self, x: Tensor) -> Tensor:
        if self.input_is_parallel:
            check_width(
                x, self.weight.shape[1], "this rank's slice, as RowParallelLinear(input_is_parallel=True) takes"
            )
        else:
            check_width(x, self.in_features, f"in_features={self.in_features} of RowParallelLinear")
            x = functions.scatter_to_ranks(x, self.comm)
        summand = functional.linear(x, self.weight)
        out = (functions.scatter_tokens if self.sequence_parallel else functions.reduce_from_ranks)(summand, self.comm)
        if self.bias is None:
            return out
        # After the sum, or it would be added once a rank; its gradient is of this rank's tokens, if it has some alone.
        return out + (functions.copy_to_ranks(self.bias, self.comm) if self.sequence_parallel else self.bias)


class VocabParallelEmbedding(ParallelLayer):
    """``nn.Embedding`` whose words are shared among ranks: each looks up those that it has, and the rest are zeros.

        words           7  2  5
        rank 0 (0-3)    .  w  .
        rank 1 (4-7)    w  .  w       the sum over ranks has every row once

    Args:
        num_embeddings, embedding_dim: as for ``nn.Embedding``.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.

    Takes words of any shape, equal on all ranks; gives ``(..., embedding_dim)``, equal on all ranks. Initial values are
    those of one ``nn.Embedding`` on rank 0. To tie the output layer, which has the same slice of the words:

        output = ColumnParallelLinear(embedding_dim, num_embeddings, comm, bias=False, gather_output=False)
        output.weight = embedding.weight
        loss = vocab_parallel_cross_entropy(output(hidden), targets, comm)

    Counterpart: Megatron-LM's ``VocabParallelEmbedding``.

    Raises:
        DtlibError: for fewer words than ranks, for sizes that differ between ranks, and for a word that is none.
    """

    sizes = "num_embeddings", "embedding_dim"
    num_embeddings: int
    embedding_dim: int
    shared = "num_embeddings"
    partition_dim: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, num_embeddings: int, embedding_dim: int, comm: AnyCommunicator):
        super().__init__(nn.Embedding(num_embeddings, embedding_dim), comm)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, comm: AnyCommunicator) -> Self:
        """The shards of a layer that is there already; rank 0's values count, and ``embedding`` stays as it is."""
        for option in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(embedding, option)
            if value is not None and value is not False:  # padding_idx=0 is an option too
                raise DtlibError(f"VocabParallelEmbedding has no {option}: build the nn.Embedding without it.")
        return cls._of(embedding, nn.Embedding, comm)

    def forward(self, words: Tensor) -> Tensor:
        # A word that is none would be zeros on all ranks, and nobody would notice.
        if words.numel() and not 0 <= words.min() <= words.max() < self.num_embeddings:
            raise DtlibError(
                f"VocabParallelEmbedding has words 0 to {self.num_embeddings - 1} and got {int(words.min())} to "
                f"{int(words.max())}."
            )
        elsewhere = (words < self.slice.start) | (words >= self.slice.stop)
        rows = functional.embedding((words - self.slice.start).masked_fill(elsewhere, 0), self.weight)
        return functions.reduce_from_ranks(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.comm)


def check_same(comm: Communicator, who: str, **arguments: object) -> None:
    """Refuse arguments that differ between ranks, on every rank."""
    for rank, theirs in enumerate(everyones := comm.all_gather_object(arguments)):
        for name, value in theirs.items():
            if value != everyones[0][name]:
                raise DtlibError(
                    f"{who} differs between ranks: {name} is {everyones[0][name]} on rank 0 and {value} on rank "
                    f"{rank}. Build the same layer on all ranks."
                )


def check_plain(whole: nn.Module, kind: type[nn.Module], who: str) -> None:
    """Refuse a layer that does more than ``kind``, of which the shards would know nothing."""
    hooks = whole._forward_hooks or whole._forward_pre_hooks or whole._backward_hooks or whole._backward_pre_hooks
    names = {name for name, _ in whole.named_parameters()}
    why = (
        f"it is a {type(whole).__name__}, which computes something else" if type(whole).forward is not kind.forward
        else f"its parameters are {', '.join(sorted(names))}" if not {"weight"} <= names <= {"weight", "bias"}
        else "it has hooks" if hooks else None
    )  # fmt: skip
    if why:
        raise DtlibError(f"{who} takes the values of a plain nn.{kind.__name__} alone, and {why}: build a plain one.")


def check_width(x: Tensor, width: int, what: str) -> None:
    if x.shape[-1:] != (width,):
        raise DtlibError(f"An input has shape {tuple(x.shape)}, but its last dimension must be {width}: {what}.")
