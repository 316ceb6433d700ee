"""The full mixture of experts: padding, other numbers of tokens, a data axis, clipping, checkpoints from N to M."""

import torch
from torch import nn

from dtlib.checkpoint import load, save
from dtlib.checkpoint.local_shards import local_shards_of
from dtlib.gradients.preconditions import Preconditions
from dtlib.gradients.tokens import mean_over_tokens
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.plain import DataParallelNaive
from dtlib.parallel.expert import MixtureOfExperts, clip_grad_norm_, whole_state_dict
from dtlib.parallel.expert.plain import MixtureOfExperts as PlainMixture
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.sharded import fully_shard
from tests.cases import refuses
from tests.models import EXACT, apart
from tests.ranks import on_ranks
from tests.test_expert import WIDTH, expert_of

COUNT, LENGTH = 4, 7


class Block(nn.Module):
    """A layer that all ranks have, and a mixture."""

    def __init__(self, comm, data=None):
        super().__init__()
        here = COUNT // comm.size
        mine = [expert_of(number) for number in range(comm.rank * here, (comm.rank + 1) * here)]
        torch.manual_seed(5)
        self.norm, self.first = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = MixtureOfExperts(WIDTH, mine, comm, 2, data=data)
        self.double()
        torch.manual_seed(6)
        self.moe.gate.weight.data = torch.randn(COUNT, WIDTH, dtype=torch.float64)

    def forward(self, x, mask=None):
        return x + self.moe(self.first(self.norm(x)), mask)


def texts(rows=4):
    """Sequences with padding: of every one another number of tokens counts; and a cotangent of each token."""
    torch.manual_seed(9)
    x, cotangent = torch.randn(2, rows, LENGTH, WIDTH, dtype=torch.float64)
    return x, cotangent, torch.arange(LENGTH) < torch.tensor([[7], [3], [5], [1]])[:rows]


def loss_of(model, block, x, cotangent, mask, comm):
    losses = (model(x, mask) * cotangent).sum(-1)
    return mean_over_tokens(losses, comm, mask) + 0.1 * block.moe.balance + 0.01 * block.moe.z_loss


def trained(model, block, data, comm, steps, clip=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        loss_of(model, block, *data, comm).backward()
        if clip:
            clip(block)
        optimizer.step()
        optimizer.zero_grad()
    return block


def differences(block, reference) -> dict[str, float]:
    theirs = dict(reference.named_parameters())
    return {name: apart(value.detach(), theirs[name].detach()) for name, value in block.named_parameters()}


@on_ranks(2, 4)
def test_expert_by_data_with_padding_and_clipping_is_one_process(world):
    mesh = world.mesh(data=2, expert=world.size // 2)
    alone, norms = world.comm.split(world.rank), []
    reference = Block(alone)
    trained(reference, reference, texts(), alone, 3, lambda block: norms.append(clip_grad_norm_(block, 0.2, alone)))
    data = [one[world.rank :: world.size] for one in texts()]  # with other numbers of tokens that count
    both = mesh["data", "expert"]
    block = Block(mesh["expert"], mesh["data"])
    clipped = lambda block: norms.append(clip_grad_norm_(block, 0.2, mesh["expert"]))  # noqa: E731
    trained(DataParallel(block, both), block, data, both, 3, clipped)
    assert max(abs(one - other) for one, other in zip(norms[:3], norms[3:], strict=True)) <= EXACT and norms[0] > 0.2
    assert all(error <= EXACT for error in differences(block, reference).values())
    block(data[0], data[2])
    assert block.moe.choices.sum() == 2 * texts()[2].sum()  # padding takes no place
    assert block(*(data[0], torch.zeros_like(data[2]))).equal(data[0])


@on_ranks(1, 2, 4)
def test_every_rank_gets_all_experts(world):
    block = Block(world.comm)
    state, alone = whole_state_dict(block, world.comm), Block(world.comm.split(world.rank))
    assert state.keys() == alone.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in alone.state_dict().items())


@on_ranks(1, 2, 4, slow=(1,))
def test_a_checkpoint_of_experts_goes_on_on_any_mesh(world, tmp_path):
    """Adam's states too: saved after a step on one mesh, two steps on another are those of one process."""
    comm = world.comm
    meshes = [{"data": 1, "expert": comm.size}, {"data": comm.size, "expert": 1}, {"data": -1, "expert": 2}]
    meshes = [world.mesh(**axes) for axes in meshes if comm.size % axes["expert"] == 0]

    def on(mesh):
        alone = mesh is None
        expert, data, both = (world.comm.split(world.rank),) * 3 if alone else (mesh["expert"], mesh["data"], comm)
        block = Block(expert, data)
        model = DataParallel(block, both)
        batch = texts() if alone else [one[world.rank :: world.size] for one in texts()]
        return block, model, torch.optim.AdamW(block.parameters(), lr=0.1, eps=1e-4), batch, both

    def steps(block, model, optimizer, batch, both, count):
        for _ in range(count):
            optimizer.zero_grad()
            loss_of(model, block, *batch, both).backward()
            optimizer.step()
        return block

    reference = steps(*on(None), 3)
    for number, first in enumerate(meshes):
        saved = on(first)
        steps(*saved, 1)
        save(tmp_path / f"{number}", saved[0], saved[2], comm)
        for mesh in meshes:
            block, _, optimizer, *_ = loaded = on(mesh)
            for parameter in block.parameters():
                parameter.data.zero_()
            load(tmp_path / f"{number}", block, optimizer, comm)
            steps(*loaded, 2)
            assert all(error <= EXACT for error in differences(block, reference).values()), (number, mesh.shape)
    smaller = Block(comm)
    del smaller.first, smaller.moe.experts[next(iter(smaller.moe.experts))]
    refuses(r"The model lacks first\.bias", load, tmp_path / "0", smaller, None, comm)
    smaller.first = nn.Linear(WIDTH, WIDTH).double()
    refuses(r"The model lacks moe\.experts\.0", load, tmp_path / "0", smaller, None, comm)


@on_ranks(2, 3)
def test_the_z_loss_is_that_of_all(world):
    comm = world.comm
    moe = MixtureOfExperts(WIDTH, [expert_of(comm.rank)], comm).double()
    x = torch.randn(3 + comm.rank, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
    moe(x)
    rows = torch.cat(comm.all_gather_object(x))
    logits = rows @ moe.gate.weight.T
    z, balance = (float(comm.all_reduce(one.detach().clone(), op="mean")) for one in (moe.z_loss, moe.balance))
    assert abs(z - logits.logsumexp(-1).square().mean()) <= EXACT
    share = logits.argmax(-1).bincount(minlength=comm.size) / len(rows)
    assert abs(balance - comm.size * (share.double() * logits.softmax(-1).mean(0)).sum()) <= 1e-7


@on_ranks(2)
def test_wrong_axes_and_norms_are_refused(world):
    comm = world.comm
    block = Block(comm)
    x, _, mask = texts()
    # Names differ between ranks, and this is said first.
    words = r"moe\.experts\..* belongs to an expert, and ranks \[0, 1\] have different ones"
    refuses(words, DataParallelNaive, block, comm)
    refuses("have different ones", ZeroOptimizer, block.parameters(), torch.optim.SGD, comm, stage=1, lr=0.1)
    refuses("have different ones", Preconditions, "x", block, comm)
    plain_block = PlainMixture(WIDTH, [expert_of(comm.rank)], comm)
    words = "other ranks have other experts under that name: use the full class"
    refuses(words, local_shards_of, plain_block, None, None, comm)
    refuses("has a gradient hook", fully_shard, block, comm)  # that divides it
    for kind in (DataParallel, DataParallelNaive):
        words = "which share experts, have others: average over both axes"
        refuses(words, kind, Block(comm), comm.split(comm.rank))
    DataParallel(Block(comm).moe.experts, comm.split(comm.rank))
    block(x, mask).sum().backward()
    words = "of this rank's shards, .*dtlib.parallel.expert"
    refuses(words, nn.utils.clip_grad_norm_, block.parameters(), 1.0)
    refuses("pass mesh", clip_grad_norm_, block, 1.0, comm.split(comm.rank))
    # Gradients of the gate differ between ranks because each has another cotangent, and nobody averages them.
    block.zero_grad()
    output = block(x, mask)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(comm.rank)).double())
    torch.optim.SGD(block.parameters(), lr=0.1).step()
    refuses("the gate differ between ranks", block, x, mask)
    one = [expert_of(0)]
    for why, call in {
        "use 1, or 2 if count > 1": lambda: MixtureOfExperts(WIDTH, one, comm, top=3),
        "capacity=0": lambda: MixtureOfExperts(WIDTH, one, comm, capacity=0),
        "is .* on rank 0 and": lambda: MixtureOfExperts(WIDTH, one * (1 + comm.rank), comm),
        "mask has shape": lambda: block.moe(x, mask[:2]),
    }.items():
        refuses(why, call)
    comm.barrier()
