"""Gradients made small: what is sent and what is kept add up, and DDP takes the same hooks to the same values."""

import math

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel

import dtlib
import dtlib.backend
from benchmarks.peers import torch_group
from dtlib.parallel.compression import (
    EightBitState,
    PowerSGDState,
    TopKState,
    eight_bit_hook,
    powerSGD_hook,
    top_k_hook,
)
from dtlib.parallel.data import DataParallel
from dtlib.theory import collectives
from dtlib.theory.compression import eight_bit_bytes, powersgd_elements, top_k_bytes
from tests.cases import refuses
from tests.models import EXACT, apart
from tests.ranks import on_ranks

STEPS = 12
OURS = {
    "top-k": (top_k_hook, lambda comm: TopKState(comm, 0.1)),
    "8 bits": (eight_bit_hook, lambda comm: EightBitState(comm, 16)),
    "PowerSGD": (powerSGD_hook, lambda comm: PowerSGDState(comm, 2, min_compression_rate=1)),
}
ONE_EACH = 1e-6  # MiB: a bucket for each parameter, so that blocks of 8 bits are the same in both classes


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.Flatten(), nn.Linear(24, 13), nn.Tanh(), nn.Linear(13, 20)).double()


def inputs(rank: int, steps: int = STEPS):
    """Batches of this rank, each with a random cotangent of the output."""
    chance = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        draw = [torch.randn(*shape, generator=chance, dtype=torch.float64) for shape in ((3, 2, 4, 4), (3, 20))]
        yield draw[0], draw[1]


def gradients(model, rank: int, steps: int = STEPS):
    """Of each step: those averaged, as ``model`` leaves them, and this rank's own."""
    for x, cotangent in inputs(rank, steps):
        own = torch.autograd.grad(model.module(x), list(model.module.parameters()), cotangent)
        model.zero_grad()
        model(x).backward(cotangent)
        yield [parameter.grad.clone() for parameter in model.parameters()], own


def mean_of(comm, tensors):
    return [comm.all_reduce(tensor.clone(), op="mean") for tensor in tensors]


def equal(ones, others, within: float = EXACT) -> None:
    assert max(map(apart, ones, others)) <= within


def trained(model, rank: int, steps: int = STEPS):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for x, cotangent in inputs(rank, steps):
        model(x).backward(cotangent)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@on_ranks(2, 3, 4, slow=(4,))
def test_what_was_sent_and_what_is_kept_is_the_sum_of_all_gradients(world):
    comm = world.comm
    for name in ("top-k", "PowerSGD"):
        hook, state_on = OURS[name]
        for cap in (25, ONE_EACH):
            model, state = DataParallel(net(), comm, bucket_cap_mb=cap), state_on(comm)
            model.register_comm_hook(state, hook)
            sent, own = [
                [sum(each) for each in zip(*both, strict=True)]
                for both in zip(*gradients(model, world.rank), strict=True)
            ]
            kept = [state.residual.get(parameter, torch.zeros_like(parameter)) for parameter in model.parameters()]
            assert max(rest.abs().max() for rest in kept) > 0.1, "else this test shows nothing"
            equal([s + k for s, k in zip(sent, mean_of(comm, kept), strict=True)], mean_of(comm, own))


@on_ranks(2, 3, 4, slow=(4,))
def test_8_bits_are_as_near_as_two_roundings_allow(world):
    """Not a sum that telescopes: the second rounding belongs to no rank. Half a step of each rank's scale, on average,
    and half a step of the mean's."""
    comm, block = world.comm, 16
    model = DataParallel(net(), comm)
    model.register_comm_hook(EightBitState(comm, block), eight_bit_hook)
    for averaged, own in gradients(model, world.rank):
        order = [averaged[::-1], own[::-1], mean_of(comm, own)[::-1]]  # as they lie in the bucket
        flat, mine, right = [torch.cat([gradient.flatten() for gradient in each]) for each in order]
        rest = -len(flat) % block
        steps = [nn.functional.pad(each, (0, rest)).view(-1, block).abs().amax(1) / 127 for each in (mine, right)]
        first = comm.all_reduce(steps[0], op="mean") / 2
        second = (steps[1] + first / 127) / 2
        bound = (first + second).repeat_interleave(block)[: len(flat)] * (1 + 1e-5)
        error = (flat - right).abs()
        assert (error <= bound).all()
        assert error.max() > 0.2 * bound.max(), "it was rounded"


@on_ranks(2, 3, 4, slow=(4,))
def test_powersgd_is_exact_at_the_rank_of_the_averaged_gradient(world):
    """P has all directions of the mean's columns, tall or wide. (A first step with one product alone, which takes P for
    given, has them only if P is square: a wide matrix's.)"""
    comm = world.comm

    def exact(model, rank):
        model = DataParallel(model.double(), comm)
        model.register_comm_hook(PowerSGDState(comm, rank, min_compression_rate=0.01), powerSGD_hook)
        for x, _ in inputs(world.rank, 3):
            x = x.flatten(1)[:1]  # one sample a rank: the mean of N matrices of rank 1
            own = torch.autograd.grad(model.module(x).square().sum(), list(model.module.parameters()))
            model.zero_grad()
            model(x).square().sum().backward()
            equal([parameter.grad for parameter in model.parameters()], mean_of(comm, own))

    for shape in ((32, 5), (32, 40)):
        torch.manual_seed(0)
        exact(nn.Linear(*shape), min(shape))
        exact(nn.Linear(*shape), comm.size)
        if comm.size == 2:
            with pytest.raises(AssertionError):
                exact(nn.Linear(*shape), comm.size - 1)


@on_ranks(1, 2, 3, 4, slow=(1, 4))
def test_payload_bytes_are_those_of_the_formulas(world):
    comm, ranks = world.comm, world.size
    shapes = [tuple(parameter.shape) for parameter in net().parameters()]
    count = sum(math.prod(shape) for shape in shapes)

    def all_reduced(elements):
        """Of 8 bytes, few enough for this algorithm to be chosen."""
        return 8 * collectives.elements_sent("all_reduce", "recursive_doubling", ranks, world.rank, elements)

    for name, (hook, state_on) in OURS.items():
        model = DataParallel(net(), comm)
        model.register_comm_hook(state_on(comm), hook)
        x, cotangent = next(inputs(world.rank))
        output = model(x)
        with dtlib.trace() as trace:
            output.backward(cotangent)
        flags = all_reduced(len(shapes) + 1 + 8)  # eight compare values in the first passes
        expected = {
            "top-k": lambda: top_k_bytes(count, ranks, 0.1, 8),
            "8 bits": lambda: eight_bit_bytes(count, ranks, 16),
            "PowerSGD": lambda: sum(all_reduced(elements) for elements in powersgd_elements(shapes, 2, 1)),
        }[name]()
        assert trace.sent()[1] == expected + flags, name
    assert expected > 0 or ranks == 1


@on_ranks(2, 3, 4, slow=(2, 4))
def test_ddp_on_our_backend_takes_the_same_hooks_to_the_same_values(world):
    gloo, group = torch_group(world), dist.new_group(backend="dtlib")

    def steps_of(hook):  # 16 bits are rounded at each hop, in another order on gloo
        return 1 if hook is default_hooks.fp16_compress_hook else STEPS

    def ddp(its_group, state, hook, one_each=True):
        # Without the last argument, torch has one bucket in the first step, and others in the next. With it, it calls
        # all_reduce besides, which PowerSGD's waits in gloo's threads may overtake on one rank: that would hang.
        cap = {"bucket_cap_mb": ONE_EACH, "find_unused_parameters": True} if one_each else {}
        model = DistributedDataParallel(net(), process_group=its_group, **cap)
        model.register_comm_hook(state, hook)
        return trained(model, world.rank, steps_of(hook))

    def ours(state, hook):
        model = DataParallel(net(), world.comm, bucket_cap_mb=ONE_EACH)
        model.register_comm_hook(state, hook)
        return trained(model, world.rank, steps_of(hook))

    for hook, state_on in OURS.values():
        equal(ours(state_on(world.comm), hook), ddp(group, state_on(group), hook))

    def power(group):
        return torchs.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)

    orthogonalize = torchs._orthogonalize

    def of_any_dimension(matrix, epsilon=0):
        """torch 2.13's wants three, and batched_powerSGD_hook gives it two: on any group it would raise an error."""
        orthogonalize(matrix if matrix.dim() == 3 else matrix[None], epsilon)

    hooks = {
        default_hooks.allreduce_hook: lambda group: group,
        default_hooks.fp16_compress_hook: lambda group: group,
        torchs.powerSGD_hook: power,
        torchs.batched_powerSGD_hook: power,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchs, "_orthogonalize", of_any_dimension)
        for hook, state_on in hooks.items():
            within = 2e-3 if hook is default_hooks.fp16_compress_hook else 1e-10
            states = state_on(group), state_on(gloo)
            equal(ddp(group, states[0], hook, False), ddp(gloo, states[1], hook, False), within)
            if state_on is power:
                assert states[0].total_numel_after_compression > 0, "it was compressed"
            equal(ours(state_on(group), hook), ddp(group, state_on(group), hook), within)


@on_ranks(2, 3)
def test_unused_parameters_numbers_that_are_none_and_refusals(world):
    comm = world.comm

    def refused(why, function, *arguments):
        refuses(why, function, *arguments)
        comm.barrier()

    x, cotangent = next(inputs(world.rank))
    for hook, state_on in OURS.values():
        model = DataParallel(net(), comm)
        model.register_comm_hook(state_on(comm), hook)
        refused("has the hook", model.register_comm_hook, state_on(comm), hook)
        model(x).backward(cotangent)
        model.zero_grad()
        refused("join", model.join().__enter__)
        # Not a number on one rank is seen on all.
        model(x * (math.nan if world.rank == 1 else 1)).backward(cotangent)
        assert not all(parameter.grad.isfinite().all() for parameter in model.parameters())

    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.every, self.first, self.never = (nn.Linear(6, 7).double() for _ in range(3))

        def forward(self, x):
            return self.every(x) + (self.first(x) if world.rank == 0 else 0)

    torch.manual_seed(0)
    model = DataParallel(Some(), comm)
    model.register_comm_hook(TopKState(comm, 1.0), top_k_hook)
    model(torch.ones(2, 6).double()).sum().backward()
    assert model.module.never.weight.grad is None
    equal([model.module.first.weight.grad], [torch.full((7, 6), 2 / world.size, dtype=torch.float64)])

    def another(state, bucket):
        return bucket.buffer()

    model = DataParallel(net(), comm)
    words = "hook is top_k_hook on rank 0 and .*another on rank 1"
    refused(words, model.register_comm_hook, None, another if world.rank else top_k_hook)
    model.register_comm_hook(None, another)
    refused("returned Tensor", model(x).backward, cotangent)
    for state, value in ((TopKState, 0), (EightBitState, 0), (PowerSGDState, 0)):
        refused("pass", state, comm, value)
