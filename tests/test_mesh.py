import pytest
import torch

from dtlib.comm import solo
from dtlib.errors import DtlibError
from dtlib.world.mesh import coordinates_of, rank_of, shape_of
from tests.cases import refuses
from tests.ranks import on_ranks


@on_ranks(1, 2, 3, 4)
def test_a_mesh_has_a_communicator_along_each_axis(world):
    mesh = world.mesh(data=-1, tensor=2 if world.size % 2 == 0 else 1)
    tensor = mesh.shape["tensor"]
    assert mesh.shape == {"data": world.size // tensor, "tensor": tensor}
    # The last axis varies fastest: its neighbours are adjacent ranks.
    assert mesh.coordinates == {"data": world.rank // tensor, "tensor": world.rank % tensor}
    for axis, comm in ((axis, mesh[axis]) for axis in mesh.shape):
        assert (comm.rank, comm.size) == (mesh.coordinates[axis], mesh.shape[axis])
    row = [world.rank - world.rank % tensor + place for place in range(tensor)]
    assert mesh["tensor"].all_gather_object(world.rank) == row
    assert mesh["data"].all_gather_object(world.rank) == list(range(world.rank % tensor, world.size, tensor))
    assert mesh["tensor"].all_reduce(torch.tensor(world.rank)).item() == sum(row)


@on_ranks(4)
def test_three_axes(world):
    mesh = world.mesh(data=2, pipe=2, tensor=1)
    assert list(mesh.shape) == ["data", "pipe", "tensor"] and mesh["tensor"].size == 1
    assert mesh["pipe"].all_gather_object(world.rank) == [[0, 1], [2, 3]][world.rank // 2]
    assert mesh["data"].all_gather_object(world.rank) == [[0, 2], [1, 3]][world.rank % 2]
    assert repr(mesh) == (
        f"Mesh(data=2, pipe=2, tensor=1; this rank is data={world.rank // 2}, pipe={world.rank % 2}, tensor=0)"
    )
    refuses("no axis 'model': choose one of data, pipe, tensor", lambda: mesh["model"])


@on_ranks(1, 2, 3, 4)
def test_axes_that_do_not_fit_are_refused_on_every_rank(world):
    refuses(rf"data=5.* does not fit {world.size} ranks, because its numbers give 5", world.mesh, data=5)
    refuses(rf"does not fit {world.size} ranks, because its numbers give 7", world.mesh, data=-1, tensor=7)
    refuses(r"mesh\(\) has no axes", world.mesh)
    for wrong in (0, -2, 1.0, "2", True, None):
        refuses("data must be a whole number", world.mesh, data=wrong)
    refuses("only one axis can be -1", world.mesh, data=-1, tensor=-1)
    if world.size > 1:
        for axes in ({"data": world.size, "tensor": 1}, {"tensor": 1, "data": world.size}):
            with pytest.raises(DtlibError, match=r"Rank 0 creates a mesh of .* and rank 1 one of .*: pass the same"):
                world.mesh(**({"data": 1, "tensor": world.size} if world.rank else axes))
    world.comm.barrier()  # nobody is left behind


def test_the_grid_is_that_of_torch():
    shape = shape_of({"data": 2, "pipe": -1, "tensor": 4}, 24)
    assert shape == {"data": 2, "pipe": 3, "tensor": 4}
    grid = torch.arange(24).reshape(2, 3, 4)  # as init_device_mesh lays them out
    for rank in range(24):
        place = coordinates_of(rank, shape)
        assert grid[place["data"], place["pipe"], place["tensor"]] == rank == rank_of(place, shape)


def test_solo_cannot_make_a_mesh():
    from dtlib.world.mesh import Mesh

    refuses("solo has none", lambda: Mesh(solo(0, 4), {"data": 4}))
