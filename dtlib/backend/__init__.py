"""A backend for ``torch.distributed``: torch's own classes (DDP, FSDP2, DTensor, pipelining) on dtlib's collectives.

    import dtlib.backend
    torch.distributed.init_process_group("dtlib")

It works under ``mpiexec``, under ``srun`` where Slurm has PMIx, and in a cell on engines, before or after
``dtlib.init()``: no environment variable, no port and no store has to be chosen. What dtlib's communicator has, torch's
classes have with it: Stop and Ctrl-C, the sentence that says whom everybody waits for, ``dtlib.trace()``, an emulated
slow network (``dtlib.backend.emulate_network``) and ``dtlib.reset()``. In notebooks ranks compare their arguments
before each collective. In scripts they do so with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``; without it ranks that pass
tensors of different shapes may get wrong values without an error.

Where dtlib is installed, an entry point calls ``register`` while torch is imported, so that even the first line can be
left out. This file stays small for that: what the backend needs is imported when a group is made.
"""

import os
import sys
from contextlib import suppress

NAME = "dtlib"


def register() -> None:
    """Make the backend known to torch. It is called while torch is imported, and so it never raises."""
    with suppress(Exception):
        from torch import distributed as dist

        if NAME in dist.Backend.backend_list or not dist.is_available():
            return
        # Not torch.distributed.rendezvous: there is a function of that name in front of the module.
        handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
        handlers["env"] = _meeting_by_mpi(handlers["env"])
        dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])


def _make_group(options, _backend_options):
    from dtlib.backend.starting import make_group

    return make_group(options)


def _meeting_by_mpi(by_environment):
    """torch's way to meet, ``env://``, which reads RANK and MASTER_ADDR: where they are unset, MPI knows as much."""

    def meet(url: str, **options):
        if "RANK" in os.environ or "rank=" in url or not _this_backend_is_asked_for():
            yield from by_environment(url, **options)
        else:
            from dtlib.backend.starting import meet

            yield meet()

    return meet


def _this_backend_is_asked_for() -> bool:
    """torch does not tell it to those who arrange a meeting. Other backends must go on to miss their RANK."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "init_process_group":
            return NAME in str(frame.f_locals.get("backend")).lower()
        frame = frame.f_back
    return False


def __getattr__(name: str) -> object:
    if name == "emulate_network":
        from dtlib.backend.starting import emulate_network

        return emulate_network
    raise AttributeError(f"module 'dtlib.backend' has no attribute {name!r}")


register()
