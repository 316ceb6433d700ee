"""Ranks that take turns in one process: SIMULATED, for a page without an installation.

A cell runs on every rank, as %%px runs it. The algorithms, the checks of what ranks call, and the sentences on whom
everybody waits for are the library's own; torch is a stand-in of five functions.

    tensors.py         the stand-in: tensor, zeros, ones, full, arange
    communicator.py    the operations of a rank that takes turns
    distributed.py     torch.distributed, by these operations
    cells.py           a learner's cell made to take turns, and run on all ranks
"""
