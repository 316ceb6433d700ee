"""Lesson 13's race: what it plays in one process is what hooks and classes do on real ranks."""

import torch
from torch import nn

from dtlib.gradients.buckets import FlatBuffer
from dtlib.lessons.l13 import race
from dtlib.parallel import compression
from dtlib.parallel.data.hooks import GradBucket
from dtlib.parallel.local import DiLoCo, LocalSGD
from dtlib.theory.collectives import elements_sent_by_the_busiest
from dtlib.workloads import digits
from tests.ranks import on_ranks

HOOKS = {
    "top 1 %": (compression.top_k_hook, lambda comm: compression.TopKState(comm, 0.01)),
    "top 1 %, no feedback": (compression.top_k_hook, lambda comm: compression.TopKState(comm, 0.01, feedback=False)),
    "8 bits": (compression.eight_bit_hook, compression.EightBitState),
    "PowerSGD": (compression.powerSGD_hook, compression.PowerSGDState),
    "PowerSGD, no feedback": (compression.powerSGD_hook, lambda comm: compression.PowerSGDState(comm, feedback=False)),
}


@on_ranks(4, slow=(4,))
def test_what_the_race_plays_is_what_ranks_compute(world):
    comm, seed, rate, steps = world.comm, 3, 0.05, 16
    assert comm.size == race.RANKS and sum(race.SIZES) == race.COUNT == 8970
    task, images = digits.task(seed, epochs=12), digits.load()[0]
    for name in race.METHODS:
        kilobytes, [*_, expected] = race.run(race.METHODS[name](), [seed], torch.tensor([rate]), steps)
        parameters = [nn.Parameter(tensor.clone()) for tensor in task.start]
        optimizer = torch.optim.SGD(parameters, lr=rate, momentum=digits.MOMENTUM, nesterov=True)
        take_step, model = optimizer.step, nn.ParameterList(parameters)
        if name.startswith("local"):
            take_step = LocalSGD(comm, model, optimizer, 8).step
        if name.startswith("DiLoCo"):
            outer = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
            take_step = DiLoCo(comm, model, optimizer, outer, 8).step
        buffer = FlatBuffer([parameter.shape for parameter in parameters], torch.float32)
        hook, state_on = HOOKS.get(name, (None, lambda comm: None))
        state = state_on(comm)
        for step in range(steps):
            seen = task.order[64 * step + 16 * comm.rank :][:16]
            x, y = images[task.train[seen]][None], task.labels[seen][None]
            gradients = torch.autograd.grad(digits.losses([p[None] for p in parameters], x, y).sum(), parameters)
            if "H = " not in name:
                for view, gradient in zip(buffer.views, gradients, strict=True):
                    view.copy_(gradient)
                if hook is None:
                    comm.all_reduce(buffer.flat, op="mean")
                else:
                    average = hook(state, GradBucket(0, True, parameters, buffer)).wait()
                    buffer.flat.copy_(average)
                gradients = buffer.views
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            take_step()
        at = task.train[: race.LOOKED_AT]
        with torch.no_grad():
            loss = digits.losses([p[None] for p in parameters], images[at][None], task.labels[None, : race.LOOKED_AT])
        torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0, msg=name)
        rounds = steps // 8 if "H = " in name else steps
        assert kilobytes[-1] == rounds * race.METHODS[name]().bytes / 1000
    assert race.Whole.bytes == 4 * elements_sent_by_the_busiest("all_reduce", "ring", 4, race.COUNT) == 53820
