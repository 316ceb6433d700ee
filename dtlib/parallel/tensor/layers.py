"""Linear and embedding layers whose weights are sharded over ranks.

    ColumnParallelLinear      weight, stored by torch as (out_features, in_features), is sharded along out_features
    RowParallelLinear         ... is sharded along in_features
    VocabParallelEmbedding    weight, (num_embeddings, embedding_dim), is sharded along num_embeddings

In Y = X A, the matrix A has shape (in_features, out_features), so the columns of A are the rows of torch's weight.
"""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.same_model import check_same_arguments
from dtlib.gradients.shard_info import note
from dtlib.parallel.tensor import functions


class ParallelLayer(nn.Module):
    """Base class: this rank's shards of the parameters of a whole layer, with rank 0's values.

    ``partition_dim`` maps each sharded parameter to the dimension along which it is sharded. Other parameters are whole
    and equal on every rank. ``whole_shapes`` maps every parameter to its shape before sharding.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    sizes: tuple[str, ...] = "in_features", "out_features"
    in_features: int
    out_features: int
    shared = ""  # name of the size that is divided among ranks
    partition_dim: ClassVar[dict[str, int]] = {}
    sequence_parallel = False  # True if ranks have slices of the tokens outside of the blocks (functions.py)

    def __init__(self, whole: nn.Module, comm: AnyCommunicator):
        super().__init__()
        self.comm = as_communicator(comm)
        parameters = dict(whole.named_parameters(recurse=False))
        self.whole_shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        dtypes = {name: str(parameter.dtype) for name, parameter in parameters.items()}
        check_same_arguments(self.comm, type(self).__name__, shapes=self.whole_shapes, dtypes=dtypes)
        count = getattr(whole, self.shared)
        if count < self.comm.size:
            raise DtlibError(
                f"{type(self).__name__}: {self.comm.size} ranks cannot divide {self.shared}={count}, because each "
                f"needs at least one: use at most {count} ranks, or a larger {self.shared}."
            )
        self.slice = functions.slice_of(count, self.comm.rank, self.comm.size)
        for name, parameter in parameters.items():
            # Broadcast the whole layer, so that a sharded layer has the same values as one on a single rank.
            values = self.comm.broadcast(parameter.detach().clone(memory_format=torch.contiguous_format))
            if name in self.partition_dim:
                shard = values.narrow(self.partition_dim[name], self.slice.start, self.slice.stop - self.slice.start)
                # Copy the shard, so that the whole tensor can be freed.
                values = shard.clone(memory_format=torch.contiguous_format)
            self.register_parameter(name, nn.Parameter(values, parameter.requires_grad))
        for name in self.sizes:
            setattr(self, name, getattr(whole, name))
        if isinstance(whole, nn.Linear) and whole.bias is None:
            self.register_parameter("bias", None)

    @classmethod
    def _of(cls, whole: nn.Module, kind: type[nn.Module], comm: AnyCommunicator, **options: bool) -> Self:
        """Shard an existing layer, and set ``options``, attributes of the result."""
        check_plain(whole, kind, cls.__name__)
        made = cls.__new__(cls)
        ParallelLayer.__init__(made, whole, comm)
        vars(made).update(options)
        return made

    def register_parameter(self, name: str, parameter: nn.Parameter | None) -> None:
        """Note that a parameter is a shard; ``layer.weight = ...`` and ``load_state_dict(assign=True)`` call this."""
        if parameter is not None and self.comm.size > 1 and name in self.partition_dim:
            note(parameter, tensor=self.comm.members)
        super().register_parameter(name, parameter)

    def extra_repr(self) -> str:
        return f"{self.whole_shapes}, {self.shared} {self.slice.start} to {self.slice.stop} here"


class ColumnParallelLinear(ParallelLayer):
    """``nn.Linear`` with sharded output features: each rank computes some columns of ``x A + b``.

    Args:
        in_features, out_features, bias: as for ``nn.Linear``. If ``out_features`` is not divisible by the ranks, shards
            differ by one.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.
        gather_output: return the whole output on all ranks, of shape ``(..., out_features)``. If False, each rank
            returns its slice of the last dimension, as input for ``RowParallelLinear(..., input_is_parallel=True)``.

    The input, of shape ``(..., in_features)``, is equal on all ranks. Initially, the layer equals an ``nn.Linear`` on
    rank 0. Every rank draws all numbers and keeps its shard, so that random generators stay synchronised. Counterpart:
    Megatron-LM's ``ColumnParallelLinear``.

    Raises:
        DtlibError: on every rank, if there are fewer output features than ranks, or sizes differ between ranks.
    """

    shared = "out_features"
    partition_dim: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(self, in_features: int, out_features: int, comm: AnyCommunicator, bias: bool = True,
                 gather_output: bool = True):  # fmt: skip
        super().__init__(nn.Linear(in_features, out_features, bias), comm)
        self.gather_output = gather_output

    @classmethod
    def from_linear(cls, linear: nn.Linear, comm: AnyCommunicator, gather_output: bool = True) -> Self:
        """Shard an existing layer. Rank 0's values are used, and ``linear`` is not changed."""
        return cls._of(linear, nn.Linear, comm, gather_output=gather_output)

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.in_features, f"in_features={self.in_features} of ColumnParallelLinear")
        whole = (functions.gather_tokens if self.sequence_parallel else functions.copy_to_ranks)(x, self.comm)
        mine = functional.linear(whole, self.weight, self.bias)
        return functions.gather_from_ranks(mine, self.comm, self.out_features) if self.gather_output else mine


class RowParallelLinear(ParallelLayer):
    """``nn.Linear`` with sharded input features: each rank computes a summand of ``x A``; ``b`` is added to the sum.

    Args:
        in_features, out_features, bias: as for ``nn.Linear``. If ``in_features`` is not divisible by the ranks, shards
            differ by one.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.
        input_is_parallel: each rank passes its slice of the input, the output of
            ``ColumnParallelLinear(gather_output=False)``. If False, all ranks pass the whole input, of shape ``(...,
            in_features)``.

    The output, of shape ``(..., out_features)``, is equal on all ranks, and so are the bias and its gradient. Initial
    values are those of an ``nn.Linear`` on rank 0. Counterpart: Megatron-LM's ``RowParallelLinear``.

    Raises:
        DtlibError: on every rank, if there are fewer input features than ranks, or sizes differ between ranks.
    """

    shared = "in_features"
    partition_dim: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(self, in_features: int, out_features: int, comm: AnyCommunicator, bias: bool = True,
                 input_is_parallel: bool = False):  # fmt: skip
        super().__init__(nn.Linear(in_features, out_features, bias), comm)
        self.input_is_parallel = input_is_parallel

    @classmethod
    def from_linear(cls, linear: nn.Linear, comm: AnyCommunicator, input_is_parallel: bool = False) -> Self:
        """Shard an existing layer. Rank 0's values are used, and ``linear`` is not changed."""
        return cls._of(linear, nn.Linear, comm, input_is_parallel=input_is_parallel)

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
        # Add the bias after the sum, otherwise every rank would add it. With sequence parallelism, its gradient covers
        # only this rank's tokens, so copy_to_ranks sums the gradients.
        return out + (functions.copy_to_ranks(self.bias, self.comm) if self.sequence_parallel else self.bias)


class VocabParallelEmbedding(ParallelLayer):
    """``nn.Embedding`` with sharded words: each rank looks up its own words and uses zeros for the others.

        words           7  2  5
        rank 0 (0-3)    .  w  .
        rank 1 (4-7)    w  .  w       the sum over ranks has every row once

    Args:
        num_embeddings, embedding_dim: as for ``nn.Embedding``.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.

    Takes word indices of any shape and returns ``(..., embedding_dim)``, both equal on all ranks. Initial values are
    those of an ``nn.Embedding`` on rank 0. To tie the output layer, which has the same slice of the words:

        output = ColumnParallelLinear(embedding_dim, num_embeddings, comm, bias=False, gather_output=False)
        output.weight = embedding.weight
        loss = vocab_parallel_cross_entropy(output(hidden), targets, comm)

    Counterpart: Megatron-LM's ``VocabParallelEmbedding``.

    Raises:
        DtlibError: for fewer words than ranks, for sizes that differ between ranks, and for an invalid word index.
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
        """Shard an existing layer. Rank 0's values are used, and ``embedding`` is not changed."""
        for option in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(embedding, option)
            if value is not None and value is not False:  # padding_idx=0 is also an option
                raise DtlibError(f"VocabParallelEmbedding has no {option}: build the nn.Embedding without it.")
        return cls._of(embedding, nn.Embedding, comm)

    def forward(self, words: Tensor) -> Tensor:
        # Without this check, an invalid index would silently give zeros on all ranks.
        if words.numel() and not 0 <= words.min() <= words.max() < self.num_embeddings:
            raise DtlibError(
                f"VocabParallelEmbedding has words 0 to {self.num_embeddings - 1}, but got {int(words.min())} to "
                f"{int(words.max())}."
            )
        elsewhere = (words < self.slice.start) | (words >= self.slice.stop)
        rows = functional.embedding((words - self.slice.start).masked_fill(elsewhere, 0), self.weight)
        return functions.reduce_from_ranks(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.comm)


def check_plain(whole: nn.Module, kind: type[nn.Module], caller: str) -> None:
    """Refuse a layer that does more than ``kind``, because its shards would not do it."""
    hooks = whole._forward_hooks or whole._forward_pre_hooks or whole._backward_hooks or whole._backward_pre_hooks
    names = {name for name, _ in whole.named_parameters()}
    why = (
        f"it is a {type(whole).__name__}, which computes something else" if type(whole).forward is not kind.forward
        else f"its parameters are {', '.join(sorted(names))}" if not {"weight"} <= names <= {"weight", "bias"}
        else "it has hooks" if hooks else None
    )  # fmt: skip
    if why:
        raise DtlibError(f"{caller} shards only a plain nn.{kind.__name__}, but {why}: pass a plain one.")


def check_width(x: Tensor, width: int, what: str) -> None:
    """Refuse an input whose last dimension is not ``width``."""
    if x.shape[-1:] != (width,):
        raise DtlibError(f"An input has shape {tuple(x.shape)}, but its last dimension must be {width}: {what}.")
