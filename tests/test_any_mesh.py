"""``dtlib train decoder`` on every mesh of four ranks: one curve, held memory, a limit that is enforced."""

import pytest

from dtlib.errors import DtlibError
from dtlib.training.run import train
from tests.ranks import on_ranks

OWN = {"layers": 2, "hidden": 16, "heads": 4, "seq": 8, "test_samples": 6}
CONFIG = {
    "workload": OWN,
    "run": {"steps": 3, "float64": True},
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "eps": 1e-4}},
}
MESHES = (
    {"tensor": 4}, {"tensor": 2}, {"tensor": 2, "zero": 1}, {"tensor": 2, "zero": 2}, {"tensor": 2, "zero": 3},
    {"tensor": 2, "pipe": 2}, {"pipe": 2}, {"pipe": 2, "zero": 1}, {"pipe": 4}, {"zero": 3},
)  # fmt: skip


def config_of(tensor=1, pipe=1, zero=0, **more):
    axes = {"tensor_parallel": {"autotp_size": tensor}, "pipeline": {"stages": pipe}}
    return {**CONFIG, **axes, "zero_optimization": {"stage": zero}, **more}


@on_ranks(4, time_limit=240, slow=(4,))
def test_every_mesh_has_the_curve_of_one_rank(world, tmp_path_factory):
    alone = world.comm.split(world.rank)
    expected = train("decoder", config_of(), comm=alone)
    assert expected["losses"][0] > expected["losses"][-1] and len(expected["losses"]) == 3
    for mesh in MESHES:
        found = train("decoder", config_of(**mesh))
        for mine, theirs in zip(found["losses"], expected["losses"], strict=True):
            assert abs(mine - theirs) < 1e-11, (mesh, found["losses"], expected["losses"])
        assert abs(found["test_loss"] - expected["test_loss"]) < 1e-6, mesh
        assert (found["tensor"], found["stages"]) == (mesh.get("tensor", 1), mesh.get("pipe", 1))

    # Checkpoints of tensor ranks: from one mesh of data and pipe axes to another.
    folder = world.comm.broadcast_object(str(tmp_path_factory.mktemp("saved")) if world.rank == 0 else None)
    steps = config_of(tensor=2, zero=1)
    train("decoder", steps, save=folder, steps=2)
    resumed = train("decoder", steps, save=folder, resume=True)
    assert len(resumed["losses"]) == 1 and abs(resumed["loss"] - expected["loss"]) < 1e-11

    # What is refused, on all ranks.
    for wrong, says in (
        ({"tensor": 3}, "tensor_parallel.autotp_size is 3, and there are 4 ranks"),
        ({"tensor": 4, "pipe": 2}, "2 stages of 4 tensor ranks are 8, and there are 4 ranks"),
        ({"run": {"steps": 2, "memory_limit": 10_000}}, "Rank 0 holds .* bytes of model states, and run.memory_limit"),
    ):
        with pytest.raises(DtlibError, match=says):
            train("decoder", config_of(**wrong))
    with pytest.raises(DtlibError, match="are of `dtlib train decoder`"):
        train("vision", {**config_of(tensor=2), "workload": {}})
    with pytest.raises(DtlibError, match="runtime=dtlib"):
        train("decoder", config_of(tensor=2), runtime="torch")
    told = []
    slow = {"steps": 2, "link_latency": 0.001, "link_bandwidth": 1e6, "memory_limit": 10**9}
    train("decoder", config_of(run=slow), after_step=lambda step, loss: told.append(step))
    assert told == [1, 2]
