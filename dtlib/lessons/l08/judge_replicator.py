"""Lesson 08: check of a step function for Replicator, with one process per replica and in one graph."""

import functools

from dtlib.errors import DtlibError
from dtlib.lab.checks.equality import as_tensor, same
from dtlib.lab.checks.exercise import Exercise, Wrong, rows

SAMPLES, PIXELS, DIGITS, STEPS = 7, 6, 3, 4  # SAMPLES is per replica and step
RATE = 0.5


def make_model():
    """Return the model, the same on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(PIXELS, 5), nn.Tanh(), nn.Linear(5, DIGITS)).double()


def make_batch(replica: int, step: int):
    """Return the samples of a replica; every caller gets the same ones. Labels depend on the pixels."""
    import torch

    generator = torch.Generator().manual_seed(100 * step + replica + 1)
    x = torch.randn(SAMPLES, PIXELS, dtype=torch.float64, generator=generator)
    return x, x[:, :DIGITS].argmax(1)


# build: build_step(replicator, model) gives step_fn(inputs)


def observe_step(build_step, comm) -> dict:
    """Return results of training with one process per replica, then in one graph of as many replicas."""
    from dtlib.parallel.replicator import Replicator

    seen = {"between": _train(build_step, Replicator(comm))}
    try:
        seen["in-graph"] = _train(build_step, Replicator(replicas=comm.size))
    except DtlibError as refusal:
        seen["refusal"] = f"{refusal}"
    return seen


def _train(build_step, replicator):
    import torch

    model = make_model()
    step_fn = build_step(replicator, model)
    if not callable(step_fn):
        return {"type": f"build_step returned {type(step_fn).__name__}"}
    given = replicator.run(step_fn, lambda replica: [make_batch(replica, step) for step in range(STEPS)])
    if not isinstance(given, dict) or {"loss", "accuracy"} - set(given):
        keys = f" with {', '.join(map(str, given))}" if isinstance(given, dict) else ""
        return {"type": f"step_fn returned {'no' if given is None else 'a'} {_kind(given)}{keys}"}
    for name in ("loss", "accuracy"):
        if not isinstance(given[name], torch.Tensor) or given[name].dim() != 2:
            shape = f", of shape {tuple(given[name].shape[2:])}" if isinstance(given[name], torch.Tensor) else ""
            return {"type": f"{name} is no single number on each replica{shape}"}
    after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"loss": given["loss"].tolist(), "accuracy": given["accuracy"].tolist(), "after": after.tolist()}


def _kind(given) -> str:
    return "tensor" if given is None else type(given).__name__


def judge_step(observations) -> None:
    """Check losses, parameters and accuracies against one process with all samples, for both ways."""
    ranks = len(observations)
    for rank, seen in enumerate(observations):
        for way in ("between", "in-graph"):
            if "type" in seen.get(way, {}):
                raise Wrong("type", rank,
                            'step_fn returns {"loss": ..., "accuracy": ...}, two tensors of one number each',
                            seen[way]["type"],
                            "build_step returns the function step_fn, and step_fn returns a dictionary.",
                            'return {"loss": loss, "accuracy": replicator.map_reduce(right, "mean")}')
    between = [seen["between"] for seen in observations]
    reference = in_one_process(ranks)
    _judge_first_losses(between, reference)
    _judge_parameters(between, reference)
    for rank, one in enumerate(between):
        _judge_accuracy(one, reference, rank, ranks)
        if not same(as_tensor(one["loss"]), reference["loss"]):
            raise Wrong("other-loss", rank, "the loss of this replica's samples before each step", "something else",
                        "Do you compute the loss in each step, from its inputs, and before minimize changes the "
                        "parameters?", "scores = model(x), once; loss = cross_entropy(scores, y); then minimize(loss).")
    for rank, seen in enumerate(observations):
        _judge_graph(seen, rank)


@functools.cache
def in_one_process(replicas: int, factor: float = 1, only: int | None = None, steps: int = STEPS) -> dict:
    """Train on the mean gradient of all replicas' samples, or of replica ``only``, times ``factor``."""
    import torch

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    seen = {"loss": [], "accuracy": [], "later": [], "start": _flat(model)}
    for step in range(steps):
        optimizer.zero_grad()
        batches = [make_batch(replica, step) for replica in range(replicas)]
        losses = [torch.nn.functional.cross_entropy(model(x), y) for x, y in batches]
        mean = sum(losses) / replicas if only is None else losses[only]
        seen["accuracy"].append([accuracy(model, *batch) for batch in batches])
        (mean * factor).backward()
        optimizer.step()
        seen["later"].append([accuracy(model, *batch) for batch in batches])
        seen["loss"].append([loss.item() for loss in losses])
    tensors = {name: as_tensor(values) for name, values in seen.items()}
    return tensors | {"after": _flat(model)}


def accuracy(model, x, y) -> float:
    """Return the fraction of samples whose label is predicted."""
    return (model(x).argmax(1) == y).double().mean().item()


def _flat(model):
    import torch

    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _judge_first_losses(between, reference) -> None:
    """Check the losses of the first step, before any training: each must be of the replica's own samples."""
    first = reference["loss"][0]
    for rank, one in enumerate(between):
        got = as_tensor(one["loss"][0])
        if same(got, first):
            continue
        what = "the loss of each replica's own samples, in the first step"
        ranks = len(between)
        wrong = rows(rank, what)
        wrong("loss-reduced", any(same(got, value.expand_as(got)) for value in (first.mean(), first.sum())),
              "one loss for all replicas",
              "run returns the losses of all replicas.", "Return loss unchanged; map_reduce is for the accuracy.")
        wrong("loss-scaled", same(got, first / ranks) or same(got, first * ranks),
              f"1/{ranks}, or {ranks} times as much", "Which operation averages over replicas, and how often?",
              "minimize(loss) of the wrapped optimizer does, once.")
        wrong("other-loss", True, "something else",
              "Is it the mean cross-entropy of model(x) and y?", "x, y = inputs; loss = cross_entropy(model(x), y).")


def _judge_parameters(between, reference) -> None:
    ranks, expected = len(between), reference["after"]
    after = [as_tensor(one["after"]) for one in between]
    what = f"the parameters of one process with all replicas' samples, after {STEPS} steps"
    off = [rank for rank in range(ranks) if not same(after[rank], expected)]
    if not off:
        return
    rank = off[0]
    wrong = rows(rank, what)
    wrong("no-step", all(same(values, reference["start"]) for values in after), "the initial parameters",
          "Which call updates the parameters?", "optimizer.minimize(loss): gradients, their mean, and the step.")
    wrong("not-averaged", all(same(values, in_one_process(ranks, only=r)["after"]) for r, values in enumerate(after)),
          "the parameters of a process that trains only on its own samples",
          "Each replica makes a separate step, so replicas become different. Which optimizer averages over them?",
          "optimizer = replicator.wrap_optimizer(torch.optim.SGD(...)), then optimizer.minimize(loss).")
    for factor, mistake in ((ranks, "summed"), (1 / ranks, "averaged-twice")):
        wrong(mistake, all(same(values, in_one_process(ranks, factor=factor)["after"]) for values in after),
              f"the parameters for a gradient {factor:.3g} times as large",
              "minimize averages over replicas. What else adds or divides: the loss, or the rate?",
              f"Pass this replica's loss unchanged to minimize, and use a rate of {RATE}.")
    wrong("replicas-apart", any(not same(values, after[0]) for values in after),
          "others, and not the same on all replicas",
          "What differs between replicas, apart from their samples? Search for replica_id.",
          "Rate, model and the order of operations are equal on all replicas. Only inputs differ.")
    wrong("other-values", True, "others, the same on all replicas",
          f"Do you use torch.optim.SGD(model.parameters(), lr={RATE}), with one minimize per step?",
          "No momentum, no other optimizer. Create it once in build_step, and not in each step.")


def _judge_accuracy(one, reference, rank: int, ranks: int) -> None:
    got, own = as_tensor(one["accuracy"]), reference["accuracy"]
    expected = own.mean(1, keepdim=True).expand_as(own)
    got = got if (got - expected).abs().max() > 1e-6 else expected  # tolerates accuracies in float32
    what = "the fraction of right answers among all replicas' samples, the same on all replicas"
    if same(got, expected):
        return
    wrong = rows(rank, what)
    wrong("local-metric", same(got, own), "the accuracy on each replica's own samples",
          "It is an accuracy, but for which samples?", 'replicator.map_reduce(accuracy, "mean") averages.')
    wrong("metric-summed", same(got, expected * ranks), f"{ranks} times as much",
          "map_reduce adds by default. Which argument averages?", 'map_reduce(accuracy, "mean").')
    wrong("metric-later",
          same(got, reference["later"].mean(1, keepdim=True).expand_as(own)) or same(got, reference["later"]),
          "the accuracy with the scores after the step",
          "With which parameters do you compute the scores?", "Compute model(x) once, and use its scores for both.")
    wrong("other-metric", True, "something else",
          "Is it a fraction of right answers, over all samples of all replicas? What does map_reduce do with it?",
          'right = (scores.argmax(1) == y).double().mean(); replicator.map_reduce(right, "mean").')


def _judge_graph(seen, rank: int) -> None:
    wrong = rows(rank)
    wrong("not-captured", "refusal" in seen, "a step that can be captured as a graph", seen.get("refusal"),
          "A graph is captured before values exist. Which line asks for a value?",
          "Use only tensors: no if on a value, no .item(), no random numbers, no backward() in step_fn.")
    for name in ("loss", "accuracy", "after"):
        got, wanted = as_tensor(seen["in-graph"][name]), as_tensor(seen["between"][name])
        if name == "accuracy" and got.shape == wanted.shape and (got - wanted).abs().max() <= 1e-6:
            continue  # tolerates accuracies in float32
        wrong("graph-differs", not same(got, wanted), f"the same {name} in a graph as a process per replica",
              "something else", "One process captures all replicas. Which value do you read for only one replica?",
              "Read replicator.replica_id and replicator.replicas inside step_fn, not before.")


EXERCISES = {"step-build": Exercise("build_step", observe_step, judge_step, any_size=True)}
