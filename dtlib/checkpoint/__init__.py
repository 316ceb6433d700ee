"""Checkpoints: every rank saves what it has, and any number of ranks, with any strategy, loads what it needs.

    save on 4 ranks, ZeRO stage 3                     load on 3 ranks, ZeRO stage 1

    rank 0 -> rank0-5c1f09b2.safetensors  --.         rank 0  all values, states 0..1/3
    rank 1 -> rank1-5c1f09b2.safetensors  --+-------> rank 1  all values, states 1/3..2/3
    rank 2 -> rank2-5c1f09b2.safetensors  --+         rank 2  all values, states 2/3..1
    rank 3 -> rank3-5c1f09b2.safetensors  --'
           -> index.json    full names and shapes, and which file has which elements

A rank has, of a tensor with a full name and a full shape, elements ``start`` to ``stop`` of it, flattened. A strategy
only says which (holdings.py), and nothing else here knows one strategy from another.

The new index takes the place of the old one at a single moment, once all files are on disk (folder.py); until then the
checkpoint before is whole. There is nothing but numbers, text and JSON in a checkpoint: loading executes no code.
There are no checksums: a file that is missing, cut short or of another save is refused, and a bit that has flipped in
its numbers is not noticed.
Counterparts: ``torch.distributed.checkpoint``, whose format ``export`` writes; DeepSpeed's universal checkpoints.
"""

from dtlib.checkpoint.exporting import export
from dtlib.checkpoint.folder import CheckpointError, point_to, pointed_to
from dtlib.checkpoint.loading import load
from dtlib.checkpoint.saving import save

__all__ = ["CheckpointError", "export", "load", "point_to", "pointed_to", "save"]
