"""Many networks at once are the same as one after another, in plain torch."""

import pytest
import torch
from torch import nn

from dtlib.workloads import digits


def plain(task):
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    with torch.no_grad():
        for layer, weight, bias in zip(net[::2], task.start[::2], task.start[1::2], strict=True):
            layer.weight.copy_(weight.T)
            layer.bias.copy_(bias[0])
    return net


def double(task):
    task.start = [parameter.double() for parameter in task.start]
    return task


@pytest.fixture
def in_float64(monkeypatch):
    images, labels = digits.load()
    monkeypatch.setattr(digits, "load", lambda: (images.double(), labels))
    return images.double(), labels


def trained_alone(task, batch, rates, data, until=0.0):
    images, labels = data[0][task.train], task.labels
    net = plain(task).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    for step, rate in enumerate(rates):
        if until and step % digits.CHECK_EVERY == 0 and nn.functional.cross_entropy(net(images), labels) <= until:
            break
        places = task.order[step * batch :][:batch]
        optimizer.param_groups[0]["lr"] = float(rate)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[places]), labels[places]).backward()
        optimizer.step()
    return net


def assert_equal(parameters, nets):
    for number, net in enumerate(nets):
        together = [p[number] for p in parameters]
        for layer, weight, bias in zip(net[::2], together[::2], together[1::2], strict=True):
            torch.testing.assert_close(weight.T, layer.weight.detach(), rtol=0, atol=1e-12)
            torch.testing.assert_close(bias[0], layer.bias.detach(), rtol=0, atol=1e-12)


def test_training_together_equals_training_one_by_one(in_float64):
    tasks = [double(digits.task(seed, train=200, epochs=4)) for seed in (0, 1, 0)]
    rates = torch.rand(25, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.2
    parameters = digits.train(tasks, 32, rates)
    nets = [trained_alone(t, 32, rates[:, i], in_float64) for i, t in enumerate(tasks)]
    assert_equal(parameters, nets)
    assert not torch.equal(parameters[0][0], parameters[0][2]), "the same seed with other rates is another network"

    images, labels = in_float64
    errors = [
        (net(images[t.test]).argmax(1) != labels[t.test]).double().mean() for t, net in zip(tasks, nets, strict=True)
    ]
    assert digits.test_errors(parameters, tasks).tolist() == [error.item() for error in errors]


def test_a_network_that_has_come_down_stays_and_the_others_go_on(in_float64):
    tasks = [double(digits.task(seed, train=100, epochs=60)) for seed in (0, 1)]
    rates = torch.tensor([[0.1, 0.001]]).double().repeat(240, 1)
    parameters = digits.train(tasks, 25, rates, until=0.5)
    nets = [trained_alone(t, 25, rates[:, i], in_float64, until=0.5) for i, t in enumerate(tasks)]
    assert_equal(parameters, nets)
    quick, slow = digits.train_losses(parameters, tasks).tolist()
    assert quick <= 0.5 < slow


def test_a_run_that_diverges_harms_no_other():
    tasks = [digits.task(seed, train=200, epochs=4) for seed in (0, 1)]
    rates = torch.tensor([[1e6, 0.02]]).repeat(25, 1)
    both = digits.train(tasks, 32, rates)
    alone = digits.train(tasks[1:], 32, rates[:, 1:])
    assert not torch.isfinite(both[0][0]).all()
    for together, single in zip(both, alone, strict=True):
        torch.testing.assert_close(together[1], single[0])
    assert digits.test_errors(both, tasks)[0] > 0.8


def test_sharpness_is_the_largest_eigenvalue_of_the_hessian(in_float64, monkeypatch):
    monkeypatch.setattr(digits, "WIDTHS", (64, 2, 3, 10))
    tasks = [double(digits.task(seed, train=100, epochs=20)) for seed in (0, 1)]
    parameters = digits.train(tasks, 20, torch.full((100, 2), 0.05, dtype=torch.float64))
    for number, sharp in enumerate(digits.sharpness(parameters, tasks, rounds=200).tolist()):
        one = [p[number : number + 1] for p in parameters]
        shapes = [p.shape for p in one]

        def loss(flat, shapes=shapes, task=tasks[number]):
            pieces = flat.split([shape.numel() for shape in shapes])
            return digits.train_losses([p.view(s) for p, s in zip(pieces, shapes, strict=True)], [task])[0]

        hessian = torch.autograd.functional.hessian(loss, torch.cat([p.flatten() for p in one]))
        assert sharp == pytest.approx(torch.linalg.eigvalsh(hessian).abs().max().item(), rel=1e-3)


def test_a_seed_decides_everything_and_the_batch_nothing():
    one, again, other = digits.task(3), digits.task(3), digits.task(4)
    assert torch.equal(one.order, again.order)
    assert not torch.equal(one.order, other.order)
    assert sorted([*one.train.tolist(), *one.test.tolist()]) == list(range(1797))
    assert torch.equal(one.labels, digits.load()[1][one.train])
    assert len(one.order) == 20 * 1280
    assert all(len(set(epoch.tolist())) == 1280 for epoch in one.order.split(1280))


def test_noise_replaces_its_fraction_of_labels_by_others():
    noisy = digits.task(0, train=600, noise=0.2)
    assert (noisy.labels != digits.load()[1][noisy.train]).sum() == 120
    assert noisy.labels.min() >= 0
    assert noisy.labels.max() <= 9
