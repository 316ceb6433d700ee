"""Plausible wrong steps for the Replicator, and the mistake that the check must recognise in each."""

import torch
from torch.nn.functional import cross_entropy

RATE = 0.5


def built(replicator, model, loss_of=None, metric=None, rate=RATE, minimize=None, own=False):
    """The right answer, with its pieces to turn."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    wrapped = None if own else replicator.wrap_optimizer(optimizer)

    def step_fn(inputs):
        x, y = inputs
        scores = model(x)
        loss = loss_of(scores, y) if loss_of else cross_entropy(scores, y)
        minimize(wrapped or optimizer, loss) if minimize else wrapped.minimize(loss)
        right = (scores.argmax(1) == y).double().mean()
        return {"loss": loss, "accuracy": metric(right, x, y) if metric else replicator.map_reduce(right, "mean")}

    return step_fn


def step_right(replicator, model):
    return built(replicator, model)


def step_of_its_own(replicator, model):
    """The optimizer is not wrapped: replicas drift apart."""

    def minimize(optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return built(replicator, model, minimize=minimize, own=True)


def step_that_divides(replicator, model):
    """Averages twice."""
    return built(replicator, model, minimize=lambda optimizer, loss: optimizer.minimize(loss / replicator.replicas))


def step_that_adds_up(replicator, model):
    def minimize(optimizer, loss):
        optimizer.minimize(replicator.map_reduce(loss, "sum"))

    return built(replicator, model, minimize=minimize)


def step_that_minimizes_nothing(replicator, model):
    return built(replicator, model, minimize=lambda optimizer, loss: None)


def step_with_a_scaled_loss(replicator, model):
    return built(replicator, model, lambda scores, y: cross_entropy(scores, y) / replicator.replicas)


def step_with_a_sum(replicator, model):
    return built(replicator, model, lambda scores, y: cross_entropy(scores, y, reduction="sum"))


def step_with_a_loss_of_all(replicator, model):
    return built(replicator, model, lambda scores, y: replicator.map_reduce(cross_entropy(scores, y), "mean"))


def step_with_a_local_metric(replicator, model):
    """As if what is right here were right everywhere."""
    return built(replicator, model, metric=lambda right, x, y: right)


def step_with_a_sum_of_shares(replicator, model):
    return built(replicator, model, metric=lambda right, x, y: replicator.map_reduce(right))


def step_that_looks_afterwards(replicator, model):
    def metric(right, x, y):
        return replicator.map_reduce((model(x).argmax(1) == y).double().mean(), "mean")

    return built(replicator, model, metric=metric)


def step_with_a_rate_by_id(replicator, model):
    """The replica's number where all must agree."""
    return built(replicator, model, rate=RATE * (1 + replicator.replica_id))


def step_that_only_replica_0_reduces(replicator, model):
    """The others go on, and it waits."""

    def metric(right, x, y):
        return replicator.map_reduce(right, "mean") if replicator.replica_id == 0 else right

    return built(replicator, model, metric=metric)


def step_with_a_branch(replicator, model):
    """Python asks for a value: a process has it, a graph has not."""

    def minimize(optimizer, loss):
        if loss > 0:
            optimizer.minimize(loss)

    return built(replicator, model, minimize=minimize)


def step_with_an_item(replicator, model):
    def metric(right, x, y):
        return replicator.map_reduce(torch.tensor(right.item(), dtype=torch.float64), "mean")

    return built(replicator, model, metric=metric)


def step_with_its_id_from_before(replicator, model):
    """Asked before the graph is captured, the number is 0 for all replicas in it."""
    mine = replicator.replica_id

    def metric(right, x, y):
        # All replicas' shares, each at its own place, over the number of replicas that have this place.
        place = torch.eye(replicator.replicas, dtype=torch.float64)[mine]
        shares, replicas = replicator.map_reduce(torch.stack([right * place, place]), "sum")
        return (shares / replicas.clamp(min=1)).mean()

    return built(replicator, model, metric=metric)


def step_that_wraps_every_time(replicator, model):
    """A process does not mind; a graph is captured with an optimizer more each time."""

    def step_fn(inputs):
        return built(replicator, model)(inputs)

    return step_fn


def step_with_another_rate(replicator, model):
    return built(replicator, model, rate=0.1)


def step_that_returns_a_loss_alone(replicator, model):
    step_fn = built(replicator, model)
    return lambda inputs: step_fn(inputs)["loss"]


def step_that_is_forgotten(replicator, model):
    built(replicator, model)


def step_of_three_replicas(replicator, model):
    """The mean of accuracies by a number."""

    def metric(right, x, y):
        return replicator.map_reduce(right) / 3

    return built(replicator, model, metric=metric)


WRONG = {
    "step-build": {
        step_of_its_own: "not-averaged",
        step_that_divides: "averaged-twice",
        step_that_adds_up: "summed",
        step_that_minimizes_nothing: "no-step",
        step_with_a_scaled_loss: "loss-scaled",
        step_with_a_sum: "other-loss",
        step_with_a_loss_of_all: "loss-reduced",
        step_with_a_local_metric: "local-metric",
        step_with_a_sum_of_shares: "metric-summed",
        step_that_looks_afterwards: "metric-later",
        step_with_a_rate_by_id: "replicas-apart",
        step_that_only_replica_0_reduces: "waited",
        step_with_a_branch: "not-captured",
        step_with_an_item: "not-captured",
        step_with_its_id_from_before: "graph-differs",
        step_that_wraps_every_time: "not-captured",
        step_with_another_rate: "other-values",
        step_that_returns_a_loss_alone: "type",
        step_that_is_forgotten: "type",
        step_of_three_replicas: "other-size",
    },
}
