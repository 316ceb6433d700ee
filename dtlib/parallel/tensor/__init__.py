"""Tensor parallelism: each layer's weights are sharded over ranks, and all ranks work on the same batch.

A multi-layer perceptron Z = act(X A) B is sharded along its hidden features: A by columns and B by rows. Between A and
B no communication is needed, because the activation works element by element:

                  A = [A0 | A1]                B = [B0]
                                                   [B1]
              .--> rank 0: act(X A0) = Y0 ---> Y0 B0 --.
    X --> f --|                                        |--> g --> Z = Y0 B0 + Y1 B1, + bias
              '--> rank 1: act(X A1) = Y1 ---> Y1 B1 --'

    f    forward: X as it is            backward: all_reduce of the gradient of X
    g    forward: all_reduce            backward: the gradient of Z as it is

All ranks of the tensor axis need the same batch, and the same random numbers outside of these layers (dropout). Use the
same seed and the same part of the data on all of them. Inputs are not compared: with different batches, outputs would
be mixtures, and the other layers would diverge. Initialise a whole layer, and shard it with ``from_linear``. An
initialisation that is applied to the shards, as by ``model.apply(init)``, would give all ranks the same numbers. Norms
of shards are of this rank's part only.

Attention is sharded by heads, and the embedding and the loss by words. functions.py has f and g. layers.py has layers
that are sharded by columns, rows and words. cross_entropy.py has the loss, blocks.py the perceptron and attention, and
unsharded.py functions for the whole model.

Communication for activations X of B bytes on N ranks. A ring all_reduce of B bytes sends 2 B (N-1) / N from each rank,
and an all_gather B (N-1) / N (on average, if B is not divisible by N):

                                  forward                                backward
    ColumnParallelLinear          with gather_output: all_gather of      all_reduce of X's gradient
                                  the output
    RowParallelLinear             all_reduce of the output               without input_is_parallel: all_gather of
                                                                         the input's gradient
    ParallelMLP                   all_reduce of B                        all_reduce of B
    ParallelAttention             all_reduce of B                        all_reduce of B
    ... with sequence_parallel    all_gather and reduce_scatter of B     reduce_scatter and all_gather of B
    VocabParallelEmbedding        all_reduce of B                        nothing
    vocab_parallel_cross_entropy  two all_reduces: 3 numbers per token,  nothing
                                  and N more

If an input requires no gradient, nothing is sent for it in the backward pass. All ranks call the same layers in the
same order.

M. Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism",
arXiv:1909.08053, section 3; D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM", SC 2021, section 2.3. Names are Megatron-LM's.
"""

# ruff: noqa: I001
from dtlib.gradients.precision import clip_grad_norm_
from dtlib.parallel.tensor import checks  # noqa: F401  # installs the checks of plain.py on import
from dtlib.parallel.tensor.blocks import ParallelAttention, ParallelMLP
from dtlib.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from dtlib.parallel.tensor.functions import (
    copy_to_ranks, gather_from_ranks, gather_tokens, reduce_from_ranks, scatter_to_ranks, scatter_tokens,
    sum_over_ranks,
)  # fmt: skip
from dtlib.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from dtlib.parallel.tensor.unsharded import whole_state_dict

__all__ = [
    "ColumnParallelLinear", "ParallelAttention", "ParallelMLP", "RowParallelLinear", "VocabParallelEmbedding",
    "clip_grad_norm_", "copy_to_ranks", "gather_from_ranks", "gather_tokens", "reduce_from_ranks", "scatter_to_ranks",
    "scatter_tokens", "sum_over_ranks", "vocab_parallel_cross_entropy", "whole_state_dict",
]  # fmt: skip
