"""Lesson 08: its exercises, and its figures."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

from dtlib.lessons.l08 import figures as hybrid
from dtlib.parallel.replicator import Replicator
from dtlib.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from tests.lessons.l08 import wrong_mlp, wrong_replicator, wrong_tensor
from tests.ranks import on_ranks

# Right answers in other styles


class RowByHand(nn.Module):
    """A plain collective, in place, on what autograd follows: the sum has no gradient of its own, as in g."""

    def __init__(self, whole, comm):
        super().__init__()
        width = whole.in_features // comm.size
        self.comm, mine = comm, slice(comm.rank * width, (comm.rank + 1) * width)
        self.own = nn.Parameter(whole.weight.detach().T[mine].clone())  # as (inputs, outputs)
        self.offset = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x_slice):
        y = x_slice @ self.own
        total = self.comm.all_reduce(y.detach().clone())
        return y + (total - y).detach() + self.offset


class RowOfTheLibrary(nn.Module):
    def __init__(self, whole, comm):
        super().__init__()
        self.layer = RowParallelLinear.from_linear(whole, comm, input_is_parallel=True)

    def forward(self, x_slice):
        return self.layer(x_slice)


class RowInTwoSteps(wrong_tensor.RightRow):
    """reduce_scatter and all_gather, by padding: as many bytes as one all_reduce by ring."""

    def forward(self, x_slice):
        y = linear(x_slice, self.weight)
        flat = y.detach().flatten()
        flat = nn.functional.pad(flat, (0, -len(flat) % self.comm.size))
        own = self.comm.reduce_scatter(flat.new_empty(len(flat) // self.comm.size), flat)
        total = self.comm.all_gather(torch.empty_like(flat), own)[: y.numel()].view_as(y)
        return y + (total - y).detach() + self.bias


class MLPOfTheLibrary(nn.Module):
    def __init__(self, linear1, linear2, comm):
        super().__init__()
        self.first = ColumnParallelLinear.from_linear(linear1, comm, gather_output=False)
        self.second = RowParallelLinear.from_linear(linear2, comm, input_is_parallel=True)

    def forward(self, x):
        return self.second(gelu(self.first(x)))


class MLPOfSmallLayers(nn.Module):
    """Two small nn.Linear, and f as a hook on the input's gradient."""

    def __init__(self, linear1, linear2, comm):
        super().__init__()
        width = linear1.out_features // comm.size
        mine = slice(comm.rank * width, (comm.rank + 1) * width)
        self.comm = comm
        self.up = nn.Linear(linear1.in_features, width, dtype=torch.float64)
        self.down = nn.Linear(width, linear2.out_features, bias=False, dtype=torch.float64)
        self.bias = nn.Parameter(linear2.bias.detach().clone())
        with torch.no_grad():
            self.up.weight.copy_(linear1.weight[mine])
            self.up.bias.copy_(linear1.bias[mine])
            self.down.weight.copy_(linear2.weight[:, mine])

    def forward(self, x):
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda gradient: self.comm.all_reduce(gradient.clone()))
        y = self.down(gelu(self.up(x)))
        return y + (self.comm.all_reduce(y.detach().clone()) - y).detach() + self.bias


def step_in_one_function(replicator, model):
    """The mean of losses is minimized (its gradient here is that of this loss), and hits are added up."""
    optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    def step_fn(inputs):
        x, y = inputs
        scores = model(x)
        loss = -scores.log_softmax(1).gather(1, y[:, None]).mean()
        optimizer.minimize(replicator.map_reduce(loss, "mean"))
        hits = replicator.map_reduce((scores.argmax(1) == y).sum())
        return {"accuracy": hits / (len(x) * replicator.replicas), "loss": loss.detach(), "scores": scores}

    return step_fn


def step_in_single_precision(replicator, model):
    """Shares of hits as float32: a graph may add them in another order."""
    return wrong_replicator.built(
        replicator, model, metric=lambda right, x, y: replicator.map_reduce(right.float(), "mean")
    )


class StepOfAClass:
    """An object that is called, and gathers instead of reducing."""

    def __init__(self, replicator, model):
        self.replicator, self.model = replicator, model
        self.optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), 0.5))

    def __call__(self, inputs):
        scores = self.model(inputs[0])
        loss = cross_entropy(scores, inputs[1])
        right = self.replicator.map_gather((scores.argmax(1) == inputs[1]).double())
        self.optimizer.minimize(loss)
        return {"loss": loss, "accuracy": right.mean()}


RIGHT = {
    "row-fix": (wrong_tensor.RightRow, RowByHand, RowOfTheLibrary, RowInTwoSteps),
    "mlp-build": (wrong_mlp.RightMLP, MLPOfTheLibrary, MLPOfSmallLayers),
    "step-build": (wrong_replicator.step_right, step_in_one_function, StepOfAClass, step_in_single_precision),
}


# Figures


@on_ranks(4)
def test_the_groups_in_the_figure_are_those_of_the_mesh(world):
    for axes in ({"data": 2, "tensor": 2}, {"data": 2, "pipe": 2, "tensor": 1}, {"data": 4}):
        made = world.mesh(**axes)
        for axis in axes:
            mine = next(group for group in hybrid.groups_of(axis, axes) if world.rank in group)
            assert made[axis].all_gather_object(world.rank) == mine


def test_every_figure_has_its_text(capsys):
    hybrid.cuts(ranks=2)
    assert "a summand of Y" in capsys.readouterr().out
    hybrid.mesh(data=2, pipe=2, tensor=3)
    assert "6-7-8" in capsys.readouterr().out
    hybrid.mesh(data=3)
    assert "0-1-2" in capsys.readouterr().out
    hybrid.bytes_of_axes({"data": 3e9, "tensor": 12e9}, "a title")
    text = capsys.readouterr().out
    assert "a title" in text and "12 GB" in text


def test_a_rewired_graph_is_told_from_top_to_bottom(capsys):
    replicator = Replicator(replicas=3)
    model = nn.Linear(2, 1)
    optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def step_fn(x):
        error = model(x).square().mean()
        optimizer.minimize(error)
        return replicator.map_reduce(error * (x.cos() if replicator.replica_id else x).sum())

    replicator.run(step_fn, lambda replica: [torch.ones(4, 2)])
    steps = hybrid.steps_of(replicator.graph())
    assert steps[0] == ("variables", 2)
    exchanges = [step[1].split()[0] for step in steps if step[0] == "exchange"]
    assert exchanges == ["all_reduce", "apply_gradients", "all_reduce"]
    names = [[step[2] for step in steps if step[:2] == ("replica", replica)] for replica in range(3)]
    assert "addmm" in names[0] and "cos" not in names[0] and names[1] == names[2] and "cos" in names[1]
    hybrid.rewired(replicator.graph())
    lines = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert lines[0] == "[ 2 variables, shared by all replicas ]"
    assert lines[1].startswith("each replica: addmm, ")
    assert lines[2] == "==== all_reduce mean of (5,) float32 ===="
    assert [line.partition(":")[0] for line in lines[4:7]] == ["replica 0", "replica 1", "replica 2"]
