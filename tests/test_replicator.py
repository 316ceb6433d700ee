"""TF-Replicator's model: the same user code, a process per replica or all replicas in one graph, and plain torch."""

import pytest
import torch
from torch import nn

import dtlib
from dtlib.errors import DtlibError
from dtlib.parallel.replicator import Replicator
from tests.cases import all_cases, refuses
from tests.models import EXACT, apart, build, difference
from tests.models import batches as batches_of
from tests.ranks import on_ranks

STEPS = 4
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4),
}


# What a user writes: it knows neither processes nor graphs. Each gives a loss of one replica's inputs.


def plain(replicator, model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def centred(replicator, model, x, y):
    """Each replica's outputs, less the mean output of all of them."""
    outputs = model(x)
    mean = replicator.map_reduce(outputs.mean(0), "mean")
    return ((outputs - mean) * (y[:, None] + 1)).square().mean()


def contrastive(replicator, model, x, y):
    """Each sample against the samples of all replicas (the whole batch gives it all negatives)."""
    outputs = nn.functional.normalize(model(x), dim=1)
    everyones = replicator.map_gather(outputs)
    mine = torch.arange(len(x)) + replicator.replica_id * len(x)
    return nn.functional.cross_entropy(outputs @ everyones.T / 0.5, mine)


def gathered(replicator, model, x, y):
    """The sum of all replicas' outputs, and a number that is gathered."""
    outputs = model(x)
    losses = replicator.map_gather(outputs.square().mean())
    mean = replicator.map_reduce(outputs.mean(), "sum") / replicator.replicas
    return (mean - 1).square() + losses.std()


def gathered_alone(replicas, model, x, y):
    outputs = model(x)
    losses = torch.stack([some.square().mean() for some in outputs.chunk(replicas)])
    return (outputs.mean() - 1).square() + losses.std()


LOSSES = {"plain": plain, "centred": centred, "contrastive": contrastive, "gathered": gathered}


class Alone:
    """One replica that has the whole batch: what it exchanges is what it has."""

    replicas, replica_id = 1, 0

    def map_reduce(self, value, op):
        return value

    def map_gather(self, value):
        return value


def train(replicator, model, optimizer, loss_fn, data):
    """User code: losses per step and replica."""
    optimizer = replicator.wrap_optimizer(optimizer(list(model.parameters())))

    def input_fn(replica_id):
        return [tuple(tensor.chunk(replicator.replicas)[replica_id] for tensor in batch) for batch in data]

    def step_fn(inputs):
        loss = loss_fn(replicator, model, *inputs)
        optimizer.minimize(loss)
        return loss

    return replicator.run(step_fn, input_fn, steps=len(data))


def train_alone(model, optimizer, loss_fn, data, replicas):
    optimizer = optimizer(list(model.parameters()))
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = gathered_alone(replicas, model, *batch) if loss_fn is gathered else loss_fn(Alone(), model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def in_one_graph(replicas, name, optimizer):
    """Losses and model of replicas in this process."""
    model = build("plain")
    data = batches_of("plain", STEPS, 4 * replicas)
    losses = train(Replicator(replicas=replicas), model, OPTIMIZERS[optimizer], LOSSES[name], data)
    assert losses.shape == (STEPS, replicas) and model.unused.weight.grad is None
    return losses, model


@on_ranks(2, 3, 4, slow=(4,))
def test_both_ways_and_one_process_with_the_whole_batch_agree(world):
    size = world.size
    with all_cases() as case:
        for name, optimizer in (("plain", "sgd"), ("centred", "sgd"), ("contrastive", "adamw"), ("gathered", "adamw")):
            data, alone = batches_of("plain", STEPS, 4 * size), build("plain")
            expected = train_alone(alone, OPTIMIZERS[optimizer], LOSSES[name], data, size)
            model = build("plain", seed=world.rank)  # rank 0's values will be everyone's
            losses = train(Replicator(world.comm), model, OPTIMIZERS[optimizer], LOSSES[name], data)
            with case(name, optimizer):
                assert losses.shape == (STEPS, size) and model.unused.weight.grad is None
                assert max(apart(losses.mean(1), expected), difference(model, alone)) <= EXACT
                if world.rank == 0 and size > 2:  # with two replicas in test_parity.py
                    in_graph = in_one_graph(size, name, optimizer)
                    assert max(apart(in_graph[0], losses), difference(in_graph[1], alone)) <= EXACT


@on_ranks(2, 3, 4)
def test_payload_of_a_process_is_one_message_of_gradients_a_step(world):
    model = build("plain")
    replicator = Replicator(world.comm)
    data = batches_of("plain", STEPS, 4 * world.size)
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = torch.zeros(sum(p.numel() for p in trained) + len(trained), dtype=torch.float64)
    with dtlib.trace() as once:
        world.comm.all_reduce(flat, op="mean")
    with dtlib.trace() as trace:
        train(replicator, model, OPTIMIZERS["sgd"], plain, data)
    assert trace.sent("all_reduce") == tuple(STEPS * count for count in once.sent())
    # Beside it: a byte a step, whether each replica has inputs; and once the losses of all steps, 8 bytes each, after
    # a few words on their kind.
    words = trace.sent("all_gather")[1] - (world.size - 1) * (STEPS + 8 * STEPS)
    assert 0 < words <= (world.size - 1) * 64


# The graph


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_mark_becomes_one_exchange_and_none_is_left(replicas):
    replicator, model = Replicator(replicas=replicas), build("plain")
    train(replicator, model, OPTIMIZERS["sgd"], contrastive, batches_of("plain", 2, 4 * replicas))
    graph = replicator.graph()
    # A gather, its gradient, the average of all gradients, and the step.
    expected = ["all_reduce", "all_reduce", "all_reduce", "apply_gradients"]
    assert [node.meta["exchange"].split()[0] for node in graph.exchanges] == expected
    assert "torch.ops.dtlib" not in graph.module.code
    for node in graph.exchanges[:3]:
        assert len(node.args[0]) == replicas
        assert [tensor.meta["replica"] for tensor in node.args[0]] == list(range(replicas))
    # One set of variables for all replicas.
    variables = {node.target for node in graph.module.graph.nodes if node.op == "get_attr"}
    assert len({id(getattr(graph.module, name)) for name in variables}) == len(variables)
    trained = {id(p) for name, p in model.named_parameters() if not name.startswith("unused")}
    assert trained <= {id(getattr(graph.module, name)) for name in variables}


def test_a_graph_is_captured_in_each_step_so_python_is_never_out_of_date():
    """Also in the middle of a run, and a step that counts or draws by Python does so once for each replica."""
    replicator, model = Replicator(replicas=2), build("plain").eval()
    settings, calls = {"scale": 1.0}, []

    def step_fn(x):
        calls.append(replicator.replica_id)
        return model(x).mean() * settings["scale"] * len(calls)

    def inputs(replica):
        for settings["scale"] in (1.0, 2.0, 3.0):
            yield torch.ones(2 + replica, 6, dtype=torch.float64)[:2]

    found = replicator.run(step_fn, inputs)
    assert calls == 3 * [0, 1]
    one = model(torch.ones(2, 6, dtype=torch.float64)).mean()
    factors = torch.tensor([[1.0, 2.0], [6.0, 8.0], [15.0, 18.0]], dtype=torch.float64)
    assert apart(found, factors * one) <= EXACT
    layer = nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert replicator.run(lambda x: layer(x), lambda replica: [torch.ones(2)]).dtype == torch.bfloat16
    assert replicator.run(lambda x: layer(x), lambda replica: [torch.ones(2)]).dtype == torch.float32


def two_steps(replicator):
    """Two losses and two optimizers a step, as for a GAN; the second loss sees what the first step has changed."""
    one, two = build("plain", seed=3), build("plain", seed=4)
    first = replicator.wrap_optimizer(torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9))
    second = replicator.wrap_optimizer(torch.optim.AdamW(two.parameters(), lr=0.1, eps=1e-4))
    schedule = torch.optim.lr_scheduler.StepLR(first.optimizer, 1, 0.5)
    data = batches_of("plain", 6, 4 * replicator.replicas)

    def input_fn(replica_id):
        for x, _ in data:
            yield {"x": x.chunk(replicator.replicas)[replica_id]}

    def step_fn(inputs):
        before = (one(inputs["x"]) - two(inputs["x"])).square().mean()
        first.minimize(before)
        after = (one(inputs["x"]) - two(inputs["x"]).tanh()).square().mean()
        second.minimize(after)
        return {"before": before, "after": [after], "nothing": None}

    losses = []
    for _ in range(2):
        losses.append(replicator.run(step_fn, input_fn))
        schedule.step()  # is no part of the graph
    return torch.stack([torch.stack([loss["before"], *loss["after"]]) for loss in losses]), losses[0]["nothing"]


@on_ranks(2, 3)
def test_two_optimizers_in_a_step_and_a_schedule(world):
    losses, nothing = two_steps(Replicator(world.comm))
    assert nothing is None
    assert losses.shape == (2, 2, 6, world.size)
    if world.rank == 0 and world.size == 2:
        assert apart(losses, two_steps(Replicator(replicas=world.size))[0]) <= EXACT


def test_a_loss_from_before_a_step_has_no_gradients_after_it():
    def step_fn(x):
        one, two = model(x).mean(), model(x).square().mean()
        optimizer.minimize(one)
        optimizer.minimize(two)

    x = torch.ones(2, 6).double()
    for replicator in (Replicator(dtlib.comm.solo(0, 1)), Replicator(replicas=2)):
        model = build("plain")
        optimizer = replicator.wrap_optimizer(OPTIMIZERS["sgd"](list(model.parameters())))
        refuses("modified by an inplace operation", replicator.run, step_fn, lambda r: [x], error=RuntimeError)


def use_one_parameter_each(replicator):
    weights = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3)]
    optimizer = replicator.wrap_optimizer(torch.optim.SGD(weights, lr=1.0))

    def step_fn(x):
        optimizer.minimize((weights[replicator.replica_id] * x).sum())

    assert replicator.run(step_fn, lambda r: [torch.full((2,), 1.0 + r, dtype=torch.float64)]) is None
    assert weights[2].grad is None
    assert [weight.tolist() for weight in weights] == [[0.5, 0.5], [0.0, 0.0], [1.0, 1.0]]


@on_ranks(2)
def test_a_parameter_that_one_replica_uses_counts_as_zero_on_the_other(world):
    use_one_parameter_each(Replicator(world.comm))
    use_one_parameter_each(Replicator(replicas=2))


def take_inputs_of_all_kinds(replicator):
    n, items = replicator.replicas, torch.arange(12.0)

    def step_fn(x):
        total = replicator.map_reduce(items[replicator.replica_id :: n].sum())
        return total + replicator.map_gather(x + replicator.replica_id).sum()

    got = replicator.run(step_fn, lambda r: iter([torch.ones(2)] * 4), steps=3)
    assert (got == 66 + 2 * n + n * (n - 1)).all() and got.shape == (3, n)
    # The run ends with the first replica that has no more inputs.
    assert len(replicator.run(step_fn, lambda r: [torch.ones(2)] * (5 - r))) == 5 - (n - 1)
    with pytest.raises(DtlibError, match=rf"input_fn\({n - 1}\) returned inputs for {6 - n} of 5 steps"):
        replicator.run(step_fn, lambda r: [torch.ones(2)] * (5 - r), steps=5)


@on_ranks(2, 3)
def test_inputs_of_an_iterator_and_of_different_length(world):
    take_inputs_of_all_kinds(Replicator(world.comm))
    if world.rank == 0:
        take_inputs_of_all_kinds(Replicator(replicas=3))


# Refusals: what a graph would freeze.

model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


REFUSED = {
    "if": (lambda x: x.sum() if x.sum() > 1 else -x.sum(), r"capture __bool__ in 'test_replicator.py:\d+.*torch.where"),
    "item": (lambda x: x.sum() * x.max().item(), "capture item .*a process per replica"),
    "float": (lambda x: x.sum() * float(x.max()), "capture __float__"),
    "list": (lambda x: x.sum() * x.tolist()[0][0], "capture tolist|capture item"),
    "numpy": (lambda x: torch.from_numpy(x.numpy()).sum(), "capture numpy"),
    "text": (lambda x: (f"{x.sum():.3f}", x.sum())[1], "capture __format__"),
    "shape by values": (lambda x: x[x > 0].sum(), "capture aten.nonzero.default, whose result depends on values"),
    "equality": (lambda x: x.sum() if torch.equal(x, x) else x.mean(), "aten.equal.default, whose result depends"),
    "dropout": (lambda x: nn.functional.dropout(x).sum(), r"bernoulli.*random numbers.*draw them in input_fn"),
    "noise": (lambda x: (x + torch.randn_like(x)).sum(), "aten.randn_like.default, which draws random numbers"),
    "running statistics": (lambda x: model(x).sum(), "aten.add_.Tensor, which changes .*track_running_stats=False"),
    "statistics, functional": (
        lambda x: nn.functional.batch_norm(x, model[1].running_mean, model[1].running_var, training=True).sum(),
        "batch_norm.*, which changes a tensor",
    ),
    "a parameter": (lambda x: (model[0].weight.data.mul_(2), x.sum())[1], "aten.mul_.Tensor, which changes a tensor"),
    "an input": (lambda x: x.view(-1).add_(1).sum(), "aten.add_.Tensor, which changes a tensor"),
    "an output": (lambda x: torch.add(x[0], 1, out=model[0].bias.data).sum(), "aten.add.out, which changes a tensor"),
    "backward": (lambda x: model[0](x).sum().backward(), "capture backward .*minimize"),
    "a python result": (lambda x: 1.0, "step_fn must return tensors, but returned float 1.0"),
}


def test_what_a_graph_would_freeze_is_refused_by_name():
    with all_cases() as case:
        for what, (step_fn, sentence) in REFUSED.items():
            with case(what):
                refused_in_a_graph(step_fn, sentence)


def refused_in_a_graph(step_fn, sentence):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.rand(4, 3)
    kept = x.clone()
    replicator = Replicator(replicas=2)
    refuses(sentence, replicator.run, step_fn, lambda r: [x])
    # A refusal leaves the model and the inputs as they were, and the replicator fit for use.
    assert all((value == state[name]).all() for name, value in model.state_dict().items())
    assert (x == kept).all() and all(p.grad is None for p in model.parameters())
    assert (replicator.run(torch.sum, lambda r: [x]) == kept.sum()).all()


def test_what_changes_memory_of_the_step_itself_is_captured():
    def step_fn(x):
        total = replicator.map_reduce(x)
        total.add_(1 + replicator.replica_id)  # every replica has its own
        own = torch.zeros(3)
        own += total
        own[0] = 7
        return own

    replicator = Replicator(replicas=2)
    got = replicator.run(step_fn, lambda r: [torch.ones(3)] * 2)
    assert got.tolist() == [[[7, 3, 3], [7, 4, 4]]] * 2


def test_inputs_and_replicas_that_do_not_fit_the_graph_are_refused():
    replicator = Replicator(replicas=2)

    def refused(words, step_fn, *inputs):
        refuses(words, replicator.run, step_fn, lambda replica: inputs[replica])

    ragged = replicator.run(torch.sum, lambda r: [torch.ones(4, 3), torch.ones(4 - 2 * r, 3)])
    assert ragged.tolist() == [[12, 12], [12, 6]]  # a last batch that is smaller on one replica
    refused(r"input_fn\(0\) returned 3: .*torch.tensor\(3\)", torch.sum, [3], [3])
    words = r"exchange 0 is all_reduce sum of \(1,\) float32 on replica 0 and .*\(2,\)"
    refused(words, lambda x: replicator.map_reduce(x).sum(), [torch.ones(1)], [torch.ones(2)])
    words, ones = r"exchange 0 is all_reduce sum .* and the end on replica 1", [torch.ones(2)]
    refused(words, lambda x: x if replicator.replica_id else replicator.map_gather(x), ones, ones)
    refused("has made no step", torch.sum, [], [])


def test_wrong_arguments_are_refused():
    model = nn.Linear(2, 2)
    for arguments in ({}, {"comm": dtlib.comm.solo(0, 2), "replicas": 2}, {"replicas": 0}, {"replicas": 1.5}):
        refuses("Replicator", Replicator, **arguments)
    replicator = Replicator(replicas=2)
    words, lbfgs = "LBFGS computes the loss several times", torch.optim.LBFGS(model.parameters())
    refuses(words, replicator.wrap_optimizer, lbfgs)
    frozen = torch.optim.SGD(nn.Linear(1, 1).requires_grad_(False).parameters())
    refuses("no parameter of this optimizer", replicator.wrap_optimizer, frozen)
    optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters()))
    embedding = nn.Embedding(3, 2, sparse=True)
    sparse = replicator.wrap_optimizer(torch.optim.SGD(embedding.parameters()))
    words = torch.tensor([0, 1])
    for step_fn, sentence in {
        lambda x: optimizer.minimize(model(x)): r"needs one number .* shape \(1, 2\)",
        lambda x: optimizer.minimize(x.sum()): "and no gradient",
        lambda x: sparse.minimize(embedding(words).sum()): "A gradient is sparse",
        lambda x: replicator.map_reduce(x, "prod"): "no op 'prod': choose one of sum, mean",
        lambda x: replicator.map_reduce(x.long(), "mean"): "does not take int64",
        lambda x: replicator.map_gather(x.cfloat()): "does not take complex64",
        lambda x: replicator.map_reduce(3): "map_reduce takes a tensor, and got int",
    }.items():
        refuses(sentence, replicator.run, step_fn, lambda r: [torch.ones(1, 2)])
    for made in (replicator, Replicator(dtlib.comm.solo(0, 2))):
        refuses(r"nothing has run yet|a process per replica has none", made.graph)
    refuses(r"inside step_fn: pass step_fn to replicator.run", replicator.map_reduce, torch.ones(1))


def trained(replicator, model, freeze=None):
    """Losses of two runs, between which the first layer is frozen, or unfrozen, and its weight before and after."""
    optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
    x = torch.arange(12.0).view(4, 3).double() / 12

    def step_fn(x):
        loss = model(x).square().sum()
        optimizer.minimize(loss)
        return {"loss": loss, "weight": model[0].weight}

    def input_fn(replica):
        return [(replica + 1) * x, x]

    first = replicator.run(step_fn, input_fn)
    model[0].weight.requires_grad_(not model[0].weight.requires_grad)
    second = replicator.run(step_fn, input_fn)
    return first, second


@on_ranks(2)
def test_a_layer_is_frozen_and_unfrozen_between_runs(world):
    """And a parameter that a step gives is given as it was then."""
    found = {}
    for begins in (True, False):
        for way in (Replicator(world.comm), Replicator(replicas=2))[: 2 - world.rank]:  # rank 0 has the graph
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
            model[0].weight.requires_grad_(begins)
            first, second = found[begins, way.comm is None] = trained(way, model)
            moves = [not torch.equal(history["weight"][0], history["weight"][1]) for history in (first, second)]
            assert moves == [begins, not begins]
        for between, in_graph in zip(found[begins, False], found[begins, world.rank == 0], strict=True):
            assert all((between[name] - in_graph[name]).abs().max() <= 1e-12 for name in between)


@on_ranks(2)
def test_outputs_and_parameters_that_are_not_alike_are_refused(world):
    replicator, counts = Replicator(world.comm), []

    def run(give):
        counts.clear()
        return replicator.run(lambda x: give(counts.append(0) or len(counts)), lambda replica: [torch.ones(2)] * 2)

    a, b = torch.tensor(1.0), torch.tensor(2.0)
    for give in (
        lambda step: {"a": a, "b": b} if world.rank else {"b": b, "a": a},
        lambda step: {"a": a} if step == 1 else {"b": a},
        lambda step: None if step == 1 else a,
        lambda step: a if world.rank or step == 1 else torch.ones(1),
    ):
        refuses(r"in another step or on another replica, .*: return the same each time", run, give)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = replicator.wrap_optimizer(inner)
    inner.add_param_group({"params": list(model[1].parameters())})
    refuses(r"has 2 new parameters since wrap_optimizer: call", optimizer.minimize, model(torch.ones(1, 2)).sum())
    empty = nn.ParameterList([nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(2))])
    replicator.wrap_optimizer(torch.optim.SGD(empty, lr=1.0)).minimize(empty[1].sum() * (world.rank + 1))
    assert torch.equal(empty[1], torch.full((2,), -0.5))
