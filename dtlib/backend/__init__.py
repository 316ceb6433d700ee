"""A backend for ``torch.distributed``: torch's own classes (DDP, FSDP2, DTensor, pipelining) on dtlib's collectives.

    import dtlib.backend
    torch.distributed.init_process_group("dtlib", init_method="dtlib://")

The import registers the backend ``dtlib`` and the URL scheme ``dtlib://`` with torch, and changes nothing else. With
this scheme ranks rendezvous through MPI: under ``mpiexec``, under ``srun`` if Slurm has PMIx, and on engines of a
notebook, before or after ``dtlib.init()``. No environment variable, port or store needs to be set. An unchanged program
that calls ``init_process_group("dtlib")`` or ``init_process_group("gloo")`` is started with

    mpiexec -n 4 python -m dtlib.backend train.py

which sets torch's usual variables in each process (__main__.py).

With this backend torch's classes get features of dtlib's communicator. Stop and Ctrl-C work, and an error message names
the missing rank. ``dtlib.trace()``, ``dtlib.reset()`` and an emulated slow network
(``dtlib.backend.emulate_network``) work, too. In notebooks ranks compare their arguments before each collective. In
scripts ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` enables this check. Without it, ranks that pass tensors of different shapes
may get wrong values without an error.

This file stays small: other modules of the backend are imported when the first group is made.
"""

from collections.abc import Iterator

from torch import distributed as dist

NAME = "dtlib"


def _make_group(options, _backend_options):
    from dtlib.backend.process_groups import make_group

    return make_group(options)


def _rendezvous(url: str, **_) -> Iterator[tuple]:
    from dtlib.backend.process_groups import rendezvous

    yield rendezvous(url)


def __getattr__(name: str) -> object:
    if name == "emulate_network":
        from dtlib.backend.process_groups import emulate_network

        return emulate_network
    raise AttributeError(f"module 'dtlib.backend' has no attribute {name!r}")


# If this module is reloaded, the backend is registered already.
if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])
    dist.register_rendezvous_handler(NAME, _rendezvous)
