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
