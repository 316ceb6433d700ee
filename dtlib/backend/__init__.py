"""A backend for ``torch.distributed``: torch's own classes (DDP, FSDP2, DTensor, pipelining) on dtlib's collectives.

    import dtlib.backend
    torch.distributed.init_process_group("dtlib", init_method="dtlib://")

The import registers the backend ``dtlib`` and the URL scheme ``dtlib://`` with torch, and changes nothing else. With
the scheme ranks find each other through MPI: under ``mpiexec``, under ``srun`` where Slurm has PMIx, and in a cell on
engines, before or after ``dtlib.init()``. No environment variable, no port and no store has to be chosen. A program
that must stay as it is, as it calls ``init_process_group("dtlib")`` or ``init_process_group("gloo")``, runs as

    mpiexec -n 4 python -m dtlib.backend train.py

which sets torch's usual variables in each process (__main__.py).

Torch's classes then have what dtlib's communicator has: Stop and Ctrl-C, the error message that says which rank is
missing, ``dtlib.trace()``, an emulated slow network (``dtlib.backend.emulate_network``) and ``dtlib.reset()``. In
notebooks ranks compare their arguments before each collective. In scripts they do so with
``TORCH_DISTRIBUTED_DEBUG=DETAIL``; without it ranks that pass tensors of different shapes may get wrong values without
an error.

This file stays small: what the backend needs is imported when a group is made.
"""

from collections.abc import Iterator

from torch import distributed as dist

NAME = "dtlib"


def _make_group(options, _backend_options):
    from dtlib.backend.starting import make_group

    return make_group(options)


def _rendezvous(url: str, **_) -> Iterator[tuple]:
    from dtlib.backend.starting import rendezvous

    yield rendezvous(url)


def __getattr__(name: str) -> object:
    if name == "emulate_network":
        from dtlib.backend.starting import emulate_network

        return emulate_network
    raise AttributeError(f"module 'dtlib.backend' has no attribute {name!r}")


if NAME not in dist.Backend.backend_list:  # else this module is loaded again
    dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])
    dist.register_rendezvous_handler(NAME, _rendezvous)
