"""Lesson 06: check of sharded gradients, by values, bytes sent and memory."""

from itertools import pairwise

from dtlib.lab.checks.answer_memory import Snapshot, nbytes
from dtlib.lab.checks.equality import MARGIN, NUMBER, same
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l06.observe_adam import length_of, loss_of, make_batch, own_shard

TWICE = "op=dist.ReduceOp.AVG divides already. Which line divides again?", "Use AVG, or a sum / comm.size."
SIZES = (16, 13, 12, 12)  # sizes: some divide by 2, 3 and 4; two biases have equal lengths

# fix: shard_gradients(comm, module)


def make_net():
    """Return the net, the same on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    first, *others = (nn.Linear(a, b, dtype=torch.float64) for a, b in pairwise(SIZES))
    return nn.Sequential(first, *(layer for other in others for layer in (nn.Tanh(), other)))


def observe_sharded(shard_gradients, comm):
    """Return for two backward passes the averaged shards, bytes sent, and bytes of all new objects."""
    from dtlib.comm.watch.recorder import recording

    net = make_net()
    passes = []
    with Snapshot(shard_gradients) as before:
        shards = shard_gradients(comm, net)
        for step in range(2):
            with recording() as events:
                loss_of(net, make_batch("uneven", comm.rank, step)).backward()
            seen = {"shards": [_shard_of(shards, parameter) for parameter in net.parameters()]}
            seen["whole"] = [name for name, parameter in net.named_parameters() if parameter.grad is not None]
            seen["sent"] = sum(event.bytes for event in events if event.kind == "operation")
            passes.append(seen)
            net.zero_grad()
        hooks = [parameter._post_accumulate_grad_hooks for parameter in net.parameters()]
        passes[-1]["held"] = nbytes(before.new(of=[shards, *hooks]))
    return passes


def _shard_of(shards, parameter):
    """Return a shard as a copy, which does not keep its memory alive."""
    import torch

    try:
        shard = shards[parameter]
    except (KeyError, TypeError, IndexError):
        return None
    return shard.detach().flatten().tolist() if isinstance(shard, torch.Tensor) else None


def judge_sharded(observations) -> None:
    """Check shards of the averages, bytes of a reduce_scatter, and that only the shards are stored."""
    for step in range(2):
        _judge_shards([seen[step] for seen in observations], step)
    ranks = len(observations)
    if ranks == 1:
        return
    lengths = sum(length_of(p.numel(), ranks) for p in make_net().parameters())
    for rank, passes in enumerate(observations):
        sent, wanted = passes[0]["sent"], (ranks - 1) * lengths * NUMBER
        if sent > wanted + MARGIN:
            raise Wrong(
                "all-reduced", rank, f"{wanted} bytes sent in a backward pass: shards to their owners", f"{sent} bytes",
                "The values are right. Which ranks receive the mean of a gradient, and which ranks need it?",
                'comm.reduce_scatter(own, flat, op="mean") gives each rank only its shard, with half of the bytes.')
    for rank, passes in enumerate(observations):
        whole, held, wanted = passes[-1]["whole"], passes[-1]["held"], lengths * NUMBER
        wrong = rows(rank)
        if whole:
            wrong("gradients-kept", True, "no whole gradients after backward()",
                  f"{len(whole)}, such as {whole[0]}.grad",
                  "The shards have been sent. What still needs the whole gradient?", "Set parameter.grad = None.")
        wrong("memory-kept", held > wanted + MARGIN, f"{wanted} bytes in use after backward(): this rank's shards",
              f"{held} bytes",
              "The shards are small, but much memory is in use. A slice is a view: which storage does it keep?",
              "Create own = torch.empty(length, dtype=parameter.dtype), and keep no other tensors.")


def _judge_shards(seen, step: int) -> None:
    import torch

    # This process computes the gradients of all ranks, and averages them.
    ranks, net = len(seen), make_net()
    locals_ = []
    for rank in range(ranks):
        net.zero_grad()
        loss_of(net, make_batch("uneven", rank, step)).backward()
        locals_.append([parameter.grad.flatten().clone() for parameter in net.parameters()])
    for i, (name, _) in enumerate(net.named_parameters()):
        average = torch.stack([gradients[i] for gradients in locals_]).mean(0)
        for rank, one in enumerate(seen):
            expected = own_shard(average, rank, ranks)
            what = f"the average of {name}.grad, shard {rank} of {ranks}, in backward pass {step + 1}"
            wrong = rows(rank, what)
            wrong("no-shard", one["shards"][i] is None, "no tensor", *_no_shard(name))
            got = torch.tensor(one["shards"][i], dtype=torch.float64)
            if len(got) < len(expected):
                raise Wrong("tail-forgotten", rank, f"{what}: {length_of(len(average), ranks)} elements", f"{len(got)}",
                            f"{len(average)} elements do not divide by {ranks}. Which rank has the last ones?",
                            "Round length up, -(-parameter.numel() // comm.size), and pad flat with zeros.")
            padding, got = got[len(expected) :], got[: len(expected)]
            if same(got, expected):
                _judge_padding(padding, length_of(len(average), ranks) - len(expected), len(expected), rank, what)
                continue
            wrong("shared-memory", any(other == one["shards"][i] for j, other in enumerate(one["shards"]) if j != i),
                  "the shard of another parameter of the same length",
                  "Each parameter needs separate memory for its shard. Do two parameters share a tensor?",
                  "own = torch.empty(length, dtype=parameter.dtype) in the hook, for every gradient.")
            wrong("second-pass", step, "something else, after a correct first pass",
                  "Which data of the pass before do you still use?", "Create a new flat tensor in each pass.")
            _judge_shard(got, average, [gradients[i] for gradients in locals_], rank, what)


def _no_shard(name: str) -> tuple:
    return (f"Is there a tensor shards[parameter] for {name} after backward()?",
            "In the hook of each parameter: shards[parameter] = own. The keys are the parameters themselves.")


def _judge_padding(padding, wanted: int, elements: int, rank: int, what: str) -> None:
    """Check that all shards of a gradient have equal lengths, padded with zeros."""
    wrong = rows(rank)
    wrong("whole-gradient", elements + len(padding) > 2 * (elements + wanted), f"{what}: {elements + wanted} elements",
          f"all {elements + len(padding)}",
          "These are the means of all shards. Which shard does this rank need?",
          "shards[parameter] = own, the result of reduce_scatter; no all_gather.")
    wrong("no-padding", len(padding) != wanted, f"{what}: {elements + wanted} elements, {wanted} of them padding",
          f"{elements + len(padding)} elements",
          "The values are right. How long must a shard be on every rank if a size does not divide?",
          "Keep all `length` elements of own: an all_gather needs shards of equal length on all ranks.")
    if padding.any():  # also true for NaN
        wrong("padding-not-zero", True, f"{what}: zeros as padding", f"{padding[padding != 0][0]:g} among them",
              "The padding belongs to no parameter, but a norm of this shard includes it. Which value should it have?",
              "flat = torch.zeros(...), not torch.empty(...): no line writes to the padding.")


def _judge_shard(got, average, locals_, rank: int, what: str) -> None:
    import torch

    ranks = len(locals_)
    expected = own_shard(average, rank, ranks)
    wrong = rows(rank, what)
    wrong("not-divided", same(got, expected * ranks), f"{ranks} times as much", "This is the sum over ranks.",
          "Average: op=dist.ReduceOp.AVG, or divide by comm.size once.")
    wrong("divided-twice", same(got, expected / ranks), f"1/{ranks} of the mean", *TWICE)
    wrong("not-averaged", same(got, own_shard(locals_[rank], rank, ranks)), "this rank's own gradient",
          "Do you take the shard from the result of reduce_scatter?",
          "reduce_scatter does not change flat: the result is in own.")
    shards = [own_shard(average, other, ranks)[: len(got)] for other in range(ranks)]
    wrong("other-shard", any(len(shard) and same(got[: len(shard)], shard) for shard in shards),
          "the shard of another rank", "Which rank owns which shard? Rank r owns shard r.",
          "Elements comm.rank * length to (comm.rank + 1) * length.")
    if len(got) == len(expected) and torch.allclose(got, expected, rtol=1e-2, atol=1e-3 * expected.abs().max()):
        raise Wrong("rounded", rank, f"{what}, in float64, the type of the gradient",
                    "nearly the right values, but rounded", "Which dtype does flat have?",
                    "dtype=parameter.dtype for flat and for own.")
    factor = (got @ expected / (expected @ expected)).item() if len(got) == len(expected) else 0
    wrong("scaled", same(got, factor * expected), f"{factor:.4g} times as much",
          "By what do you divide the sum over ranks? It must also be right for other numbers of ranks.", TWICE[1])
    wrong("other-values", True, "something else",
          "Which operation combines which tensors? Where in flat is the gradient?",
          'op=dist.ReduceOp.AVG, of gradients; flat has length * comm.size elements: the gradient, then zeros.')


EXERCISES = {"zero2-fix": Exercise("shard_gradients", observe_sharded, judge_sharded, any_size=True)}
