"""The production libraries beside which dtlib is measured and tested."""


def torch_group(world):
    """torch's default process group, on gloo, of the same ranks."""
    from torch import distributed

    if not distributed.is_initialized():
        is_first = world.rank == 0
        # The system chooses a port that is free.
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if is_first else None
        port = world.comm.broadcast_object(store.port if store else None)
        store = store or distributed.TCPStore("127.0.0.1", port)
        distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    return distributed.group.WORLD


def deepspeed_is_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("deepspeed") is not None


def deepspeed_engine(world, model, optimizer, stage: int, batch_size: int):
    """``model`` in DeepSpeed's engine at a stage of ZeRO, on the CPU; its first call compiles for about a minute."""
    import logging
    import os
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's about names that DeepSpeed uses
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    torch_group(world)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
