"""Observation of a learner's workload: its parts, its evaluation of known models, and its training."""

import hashlib

from dtlib.lab.checks.world_guard import WorldCommUsed, refuse_world_comm

STEPS = 25
# Name of a model -> test images, of n, for which it is right.
KNOWN = {
    "all": lambda places, n: places >= 0,
    "the first": lambda places, n: places == 0,
    "the last two": lambda places, n: places >= n - 2,
    "some": lambda places, n: places * places % 7 < 2,
}


def observe_workload(my_workload, comm) -> dict:
    """Return the parts, evaluations on all ranks and on one rank less, and results of 25 steps."""
    import torch

    from dtlib.training.run import train
    from dtlib.workloads.workload import Workload

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + comm.rank)  # answers that set no seed get different models
        work = my_workload({})
    if not isinstance(work, Workload):
        return {"kind": type(work).__name__}
    parts = {name: getattr(work, name) for name in ("model", "train", "test", "loss_fn", "evaluate")}
    if missing := [name for name, part in parts.items() if part is None]:
        return {"kind": "Workload", "odd": f"no {' and no '.join(missing)}"}
    if not isinstance(work.model, torch.nn.Module):
        return {"kind": "Workload", "odd": f"a {type(work.model).__name__} for a model, which is no nn.Module"}
    collate = work.collate or torch.utils.data.default_collate
    x, y = collate([work.train[place] for place in range(12)])
    outputs = work.model(x).detach()
    seen = {"kind": "Workload", "shape": list(outputs.shape), "parameters": _digest(work.model.state_dict().values())}
    seen["image"] = list(x.shape[1:])
    seen |= _losses(work.loss_fn, outputs, y)
    random = [type(part).__name__ for part in work.model.modules() if "Drop" in f"{part}" or "BatchNorm" in f"{part}"]
    images, labels = _all_of(work.test)
    of_train = _all_of(work.train)[0]
    seen["trains on"] = [len(of_train), _digest([of_train])]
    seen["in train"] = sum(bool((of_train == image).flatten(1).all(1).any()) for image in images) / len(images)
    # All ranks return here together, because the calls below are collective.
    if any(comm.all_gather_object(seen["in train"] > 0.1 or "losses" in seen)):
        return seen
    # Evaluate also on all ranks but the last, because an answer may use the world instead of its communicator.
    fewer = comm.split(comm.rank // max(1, comm.size - 1))
    fewer.time_limit = comm.time_limit
    seen["evaluated"] = [_evaluated(work, images, labels, on) | {"random": random[-1:]} for on in (comm, fewer)]
    rows = outputs.sum(-1)
    seen["probabilities"] = bool((outputs >= 0).all()) and torch.allclose(rows, torch.ones_like(rows), atol=1e-4)
    if any(comm.all_gather_object(not seen["evaluated"][0]["figures"] or len(seen["shape"]) != 2)):
        return seen
    if len(set(comm.all_gather_object(f"{seen['parameters']} {seen['trains on']}"))) > 1:
        return seen
    config = {
        "train_batch_size": 24 * comm.size, "run": {"steps": STEPS},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }  # fmt: skip
    result = train(lambda own: my_workload({}), config, comm=comm)
    losses = result["losses"]
    return seen | {"first": losses[0], "last": sum(losses[-5:]) / 5, "accuracy": result["accuracy"]}


def _digest(tensors) -> str:
    values = [tensor.detach().double().numpy().tobytes() for tensor in tensors]
    return hashlib.sha1(b"".join(values)).hexdigest()


def _losses(loss_fn, outputs, y) -> dict:
    """Return losses of twelve samples: whole and from two parts, and with other samples' targets.

    ``ratios`` are losses divided by the cross-entropy.
    """
    import torch

    if (numbers := getattr(loss_fn(outputs, y), "numel", lambda: 1)()) != 1:
        return {"losses": numbers}
    parts = [float(loss_fn(outputs[part], y[part])) for part in (slice(0, 4), slice(4, 12))]
    others = [float(loss_fn(outputs, y.roll(by, 0))) for by in (0, 1, 5)]
    entropies = [float(torch.nn.functional.cross_entropy(outputs, y.roll(by, 0))) for by in (0, 1, 5)]
    return {
        "ratios": [a / b for a, b in zip(others, entropies, strict=True)],
        "whole": others[0],
        "mean": (4 * parts[0] + 8 * parts[1]) / 12,
        "with others": others[1:],
    }


def _all_of(data) -> tuple:
    import torch

    images = torch.stack([data[place][0] for place in range(len(data))])
    labels = torch.stack([torch.as_tensor(data[place][1]) for place in range(len(data))])
    return images, labels if labels.dim() == 1 else labels.argmax(1)


def _evaluated(work, images, labels, comm) -> dict:
    """Return results of ``evaluate`` for models that know some images, and the images that they saw."""
    import torch
    from torch import nn

    class Knows(nn.Module):
        def __init__(self, places):
            super().__init__()
            self.places, self.seen, self.strange, self.trains = places, set(), 0, False
            self.weight = nn.Parameter(torch.zeros(1))  # answers may need the device of a parameter

        def forward(self, x):
            self.trains |= self.training
            same = (x.flatten(1)[:, None] == images.flatten(1)).all(-1)
            self.strange += int((~same.any(1)).sum())
            at = same.int().argmax(1)
            self.seen |= set(same.nonzero()[:, 1].tolist())
            right = torch.where(self.places[at] & same.any(1), labels[at], (labels[at] + 1) % 10)
            # The label has the highest score, or the second highest if the model is wrong.
            scores = 2 * nn.functional.one_hot(right, 10) + nn.functional.one_hot(labels[at], 10)
            return scores.to(x.dtype)

    n = len(images)
    found = {"ranks": comm.size, "images": n, "figures": {}, "wanted": {}, "seen": [], "strange": 0}
    for name, known in KNOWN.items():
        model = Knows(known(torch.arange(n), n))
        try:
            with refuse_world_comm():
                got = work.evaluate(model, comm)
        except WorldCommUsed as call:
            return found | {"of the world": f"{call}"}
        if not isinstance(got, dict) or "accuracy" not in got:
            keys = f" with {', '.join(map(str, got)) or 'nothing'}" if isinstance(got, dict) else ""
            return found | {"odd": f"a {type(got).__name__}{keys}"}
        found["figures"][name] = float(got["accuracy"])
        found["wanted"][name] = float(model.places.double().mean())
        found["seen"], found["strange"], found["trains"] = sorted(model.seen), model.strange, model.trains
    return found
