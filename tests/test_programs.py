"""Programs in other people's style, each night on our backend and on gloo: the calls are theirs, the code is ours.

muon        nanochat's optimizer: futures of reduce-scatter, then updates, then futures of all-gather
axes        picotron's data, tensor, context and pipeline steps, on groups from ``new_subgroups_by_enumeration``

All are in float64. On two ranks values are equal bit for bit, because a sum of two numbers has one order. On four ranks
the two backends add in different orders. That costs some units in the last place of a sum (2e-16 of it), which a few
steps make larger: 3e-15 was seen. The limit of 1e-12 is some hundred times as much, and float32 would not pass.
"""

from collections import deque
from functools import partial

import torch
from torch import distributed as dist
from torch import nn

from tests.ranks import on_ranks
from tests.test_backend import equal, trained

MICRO_BATCHES, WIDTH, HEADS, TOKENS = 8, 16, 4, 8


def same(world, run, **options) -> None:
    """``run(name, group)`` returns tensors, which are the same on both backends."""

    def checked(group):
        found = run(dist.get_backend(group), group, **options)
        assert all(one.dtype == torch.float64 and 0 < one.abs().max() < 10 for one in found)
        return found

    equal(world, checked, atol=0 if world.size == 2 else 1e-12)


# nanochat


class Muon(torch.optim.Optimizer):
    """Matrices of one shape: the mean gradient of each reaches its owner, which makes it orthogonal; other parameters:
    each rank updates a slice. All reductions start first, and no gather waits for a later update."""

    def __init__(self, matrices, others, group, future_of):
        super().__init__([{"params": matrices}, {"params": others}], {"lr": 0.05, "momentum": 0.9})
        self.group, self.future_of = group, future_of
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def start(self, operation, *tensors, **options):
        return self.future_of(operation(*tensors, group=self.group, async_op=True, **options))

    @torch.no_grad()
    def step(self):
        matrices, others = (each["params"] for each in self.param_groups)
        mine = -(-len(matrices) // self.size)
        stack = torch.stack(
            [p.grad for p in matrices] + [torch.zeros_like(matrices[0])] * (mine * self.size - len(matrices))
        )
        chunk, mean = torch.empty_like(stack[:mine]), dist.ReduceOp.AVG
        reduced = [self.start(dist.reduce_scatter_tensor, chunk, stack, op=mean)]
        slices = [torch.empty_like(p.grad[: len(p) // self.size]) for p in others]
        for p, part in zip(others, slices, strict=True):
            small = len(p) % self.size  # such a one is updated on every rank
            reduced.append(
                self.start(dist.all_reduce, p.grad, op=mean) if small
                else self.start(dist.reduce_scatter_tensor, part, p.grad, op=mean)
            )  # fmt: skip
        reduced[0].wait()
        padded = [*matrices, *[torch.zeros_like(matrices[0])] * (len(stack) - len(matrices))]
        updated = torch.stack(padded[self.rank * mine :][:mine])
        updated -= 0.05 * orthogonal(self.momentum(matrices[0], chunk))
        gathered = [self.start(dist.all_gather_into_tensor, stack, updated)]
        for p, part, future in zip(others, slices, reduced[1:], strict=True):
            future.wait()
            if len(p) % self.size:
                p -= 0.05 * self.momentum(p, p.grad)
            else:
                own = p[self.rank * len(part) :][: len(part)]
                own -= 0.05 * self.momentum(p, part)
                gathered.append(self.start(dist.all_gather_into_tensor, p, own.clone()))
        for future in gathered:
            future.wait()
        for p, new in zip(matrices, stack, strict=False):
            p.copy_(new)

    def momentum(self, p, gradient):
        kept = self.state[p].setdefault("momentum", torch.zeros_like(gradient))
        return kept.mul_(0.9).add_(gradient)


def orthogonal(x):
    """Five steps of Newton and Schulz towards the nearest orthogonal matrices (K. Jordan, 2024)."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


@on_ranks(2, 4, nightly=(2, 4))
def test_muon(world):
    def train(name, group):
        def future_of(work):
            if name == "gloo":
                return work  # has no futures of these, but waits as they do
            future = work.get_future()
            assert isinstance(future, torch.futures.Future)
            return future

        model = nn.Sequential(nn.Linear(6, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        matrices = [p for p in model.parameters() if p.shape == (8, 8)]
        others = [p for p in model.parameters() if p.shape != (8, 8)] + [extra := nn.Parameter(torch.ones(3))]
        optimizer = Muon(matrices, others, group, future_of)

        def step(number, x):
            (model(x).square().mean() * extra.square().sum()).backward()

        return [*trained(model, optimizer=optimizer, step=step), extra.detach()]

    same(world, train)


# picotron


class Grid:
    """The groups of this rank, by axis; the last axis changes fastest."""

    def __init__(self, name, sizes):
        self.grid = torch.arange(dist.get_world_size()).view(*sizes.values())
        self.place = dict(zip(sizes, (self.grid == dist.get_rank()).nonzero()[0].tolist(), strict=True))
        self.sizes, self.groups, self.lines = sizes, {}, {}
        for index, axis in enumerate(sizes):
            self.make(name, axis, self.grid.movedim(index, -1).reshape(-1, sizes[axis]))
        self.make(name, "copies", self.grid.permute(1, 3, 0, 2).reshape(-1, sizes["data"] * sizes["context"]))

    def make(self, name, axis, lines):
        self.groups[axis] = dist.new_subgroups_by_enumeration(lines.tolist(), backend=name)[0]
        self.lines[axis] = next(line for line in lines.tolist() if dist.get_rank() in line)


class Column(torch.autograd.Function):
    """A slice of the outputs; the inputs' gradients are added up while the weight's is computed."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        down = gradient @ weight
        work = dist.all_reduce(down, group=ctx.group, async_op=True)
        own = gradient.flatten(0, 1).t() @ x.flatten(0, 1)
        work.wait()
        return down, own, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Ring(torch.autograd.Function):
    """Causal attention over a ring: keys and values travel in both passes, their gradients in the second."""

    @staticmethod
    def forward(ctx, q, k, v, grid):
        kept, own, ranks = (q, k, v), grid.place["context"], grid.sizes["context"]
        out, total = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf)
        for step in range(ranks):
            if step <= own:
                scores = scores_of(q, k, step == 0)
                more = torch.logaddexp(total, scores.logsumexp(-1))
                out = (total - more).exp()[..., None] * out + (scores - more[..., None]).exp() @ v
                total = more
            if step + 1 < ranks:
                k, v = passed_on(grid, k, v)
        ctx.grid = grid
        ctx.save_for_backward(*kept, out, total)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, total = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step in range(ctx.grid.sizes["context"]):
            if step <= ctx.grid.place["context"]:
                shares = (scores_of(q, k, step == 0) - total[..., None]).exp()
                inner = gradient @ v.mT - (gradient * out).sum(-1, keepdim=True)
                down = q.shape[-1] ** -0.5 * shares * inner
                dq, dk, dv = dq + down @ k, dk + down.mT @ q, dv + shares.mT @ gradient
            k, v, dk, dv = passed_on(ctx.grid, k, v, dk, dv)  # gradients are home after the last step
        return dq, dk, dv, None


def scores_of(q, k, diagonal):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf) if diagonal else scores


def passed_on(grid, *tensors):
    """What the rank before has had."""
    ranks, own, group = grid.lines["context"], grid.place["context"], grid.groups["context"]
    if len(ranks) == 1:
        return tensors
    tensors = [each.contiguous() for each in tensors]
    received, pairs = [torch.empty_like(each) for each in tensors], []
    for sent, new in zip(tensors, received, strict=True):
        pairs += [
            dist.P2POp(dist.isend, sent, ranks[(own + 1) % len(ranks)], group=group),
            dist.P2POp(dist.irecv, new, ranks[own - 1], group=group),
        ]
    for request in dist.batch_isend_irecv(pairs):
        request.wait()
    return received


class Block(nn.Module):
    """Attention and an MLP, of which this rank has its slice of heads and of the MLP's width."""

    def __init__(self, grid):
        super().__init__()
        self.grid, self.group = grid, grid.groups["tensor"]

        def cut(rows, columns, dim):
            whole = torch.randn(rows, columns) / columns**0.5
            return nn.Parameter(whole.chunk(grid.sizes["tensor"], dim)[grid.place["tensor"]].contiguous())

        self.inside = nn.ParameterList(cut(WIDTH, WIDTH, 0) for _ in "qkv")
        self.outside, self.up, self.down = cut(WIDTH, WIDTH, 1), cut(2 * WIDTH, WIDTH, 0), cut(WIDTH, 2 * WIDTH, 1)

    def forward(self, x):
        heads = (Column.apply(x, weight, self.group) for weight in self.inside)
        heads = (each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in heads)
        attended = Ring.apply(*heads, self.grid).transpose(1, 2).flatten(2)
        x = x + Sum.apply(attended @ self.outside.t(), self.group)
        return x + Sum.apply(Column.apply(x, self.up, self.group).tanh() @ self.down.t(), self.group)


def talk(grid, shape, off, send=None, receive=False):
    """Send to and receive from the neighbour stage at once, if there is one."""
    place = grid.place["pipe"] + off
    if not 0 <= place < grid.sizes["pipe"]:
        return None
    peer, group, new = grid.lines["pipe"][place], grid.groups["pipe"], torch.empty(shape)
    operations = [dist.P2POp(dist.isend, send, peer, group=group)] if send is not None else []
    operations += [dist.P2POp(dist.irecv, new, peer, group=group)] * receive
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
    return new if receive else None


def one_f_one_b(stage, grid, batches):
    is_first, is_last = grid.place["pipe"] == 0, grid.place["pipe"] == grid.sizes["pipe"] - 1
    warm, waiting = min(grid.sizes["pipe"] - grid.place["pipe"] - 1, len(batches)), deque()
    neighbour = partial(talk, grid, batches[0][0].shape)

    def forward(x, batch):
        x = batch[0] if is_first else x.requires_grad_()
        y = nn.functional.mse_loss(stage(x), batch[1]) if is_last else stage(x)
        waiting.append((x, y))
        return y.detach()

    def backward(gradient):
        x, y = waiting.popleft()
        y.backward(gradient)
        return x.grad

    for batch in batches[:warm]:
        neighbour(+1, send=forward(neighbour(-1, receive=True), batch))
    x = neighbour(-1, receive=True) if warm < len(batches) else None
    for number, batch in enumerate(batches[warm:], warm + 1):
        gradient = backward(neighbour(+1, send=forward(x, batch), receive=True))
        x = neighbour(-1, send=gradient, receive=number < len(batches))
    for _ in range(warm):
        neighbour(-1, send=backward(neighbour(+1, receive=True)))


def trained_on_axes(name, group, **sizes):
    grid = Grid(name, {axis: sizes.get(axis, 1) for axis in ("data", "pipe", "context", "tensor")})
    layers = [Block(grid) for _ in range(4)]
    stage = nn.Sequential(*layers[grid.place["pipe"] :: grid.sizes["pipe"]])
    copies = grid.sizes["data"] * grid.sizes["context"]

    def mean(gradient):
        dist.all_reduce(gradient := gradient.clone(), group=grid.groups["copies"])
        return gradient / copies

    for parameter in stage.parameters():
        parameter.register_hook(mean)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1 / MICRO_BATCHES, momentum=0.9)
    generator = torch.Generator().manual_seed(grid.place["data"])
    for _ in range(2):
        whole = torch.randn(MICRO_BATCHES, 2, 2, TOKENS, WIDTH, generator=generator)
        own = whole.chunk(grid.sizes["context"], 3)[grid.place["context"]]
        one_f_one_b(stage, grid, [(x.contiguous(), y) for x, y in own])
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in stage.parameters()]


@on_ranks(2, 4, nightly=(2, 4))
def test_axes(world):
    for axis in ("data", "pipe", "context", "tensor"):
        same(world, trained_on_axes, **{axis: world.size})
    if world.size == 4:
        for mixed in ({"data": 2, "tensor": 2}, {"pipe": 2, "context": 2}, {"pipe": 2, "tensor": 2}):
            same(world, trained_on_axes, **mixed)
