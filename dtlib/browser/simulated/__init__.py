"""Ranks that take turns in one process: SIMULATED, for a page without an installation.

A cell runs on every rank, as with %%px. The library's own code chooses algorithms, checks calls and reports which ranks
are missing. torch is a stand-in with five functions.

    tensors.py         the stand-in for torch: tensor, zeros, ones, full, arange
    communicator.py    the operations of a rank that takes turns
    distributed.py     torch.distributed, implemented with these operations
    cells.py           a learner's cell, run on all ranks in turns
    awaiting.py        the rewriting of a cell, so that ranks can take turns
"""
