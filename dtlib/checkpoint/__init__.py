"""Checkpoints: save on some ranks with one strategy; load on any number of ranks with any strategy.

    save on 4 ranks, ZeRO stage 3                     load on 3 ranks, ZeRO stage 1

    rank 0 -> rank0-5c1f09b2.safetensors  --.         rank 0  all values, states 0..1/3
    rank 1 -> rank1-5c1f09b2.safetensors  --+-------> rank 1  all values, states 1/3..2/3
    rank 2 -> rank2-5c1f09b2.safetensors  --+         rank 2  all values, states 2/3..1
    rank 3 -> rank3-5c1f09b2.safetensors  --'
           -> index.json    full names and shapes, and which file has which elements

Each tensor has a full name and a full shape. A rank saves elements ``start`` to ``stop`` of the flattened tensor.
local_shards.py finds out which elements these are for each strategy. The other files do not depend on the strategy.

When all files are on disk, the new index replaces the old one atomically (folder.py). Until then the previous
checkpoint is complete. A checkpoint contains only numbers, text and JSON, so loading executes no code. Loading refuses
files that are missing, truncated or from another save. There are no checksums, so a flipped bit is not detected.

Counterparts: ``torch.distributed.checkpoint``, whose format ``export`` writes; DeepSpeed's universal checkpoints.
"""

from dtlib.checkpoint.exporting import export
from dtlib.checkpoint.folder import CheckpointError, read_latest, write_latest
from dtlib.checkpoint.loading import load
from dtlib.checkpoint.saving import save

__all__ = ["CheckpointError", "export", "load", "read_latest", "save", "write_latest"]
