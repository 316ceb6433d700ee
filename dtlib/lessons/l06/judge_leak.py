"""Lesson 06: a stage 2 with right values that holds more from step to step, judged by bytes."""

from dtlib.lab.checks.equality import NUMBER, SPARE, same
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lab.checks.held import Snapshot, nbytes
from dtlib.lessons.l06.observe_adam import length_of, own_shard

STEPS = 4
SAMPLES, WIDTHS = 24, (16, 40, 10)  # a batch's output is larger than the net, and its first row is not
ROW = WIDTHS[-1] * NUMBER  # bytes of a guess

# fix: ShardedSteps(comm, model) with step(x, y)


def make_net():
    import torch
    from torch import nn

    torch.manual_seed(0)
    inside, hidden, outside = WIDTHS
    return nn.Sequential(nn.Linear(inside, hidden), nn.Tanh(), nn.Linear(hidden, outside)).double()


def make_batch(rank: int, step: int):
    import torch

    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    x = torch.randn(SAMPLES, WIDTHS[0], dtype=torch.float64, generator=generator)
    return x, torch.randint(0, WIDTHS[-1], (SAMPLES,), generator=generator)


def observe_steps(cls, comm):
    """After each step: its loss, the shards, the guess, and bytes of all that is new; and the most while it ran."""
    import torch

    from dtlib.measure.live import Live

    net, seen = make_net(), []
    with Snapshot(cls) as before:
        steps = cls(comm, net)
        for step in range(STEPS):
            with Live() as live:
                loss = steps.step(*make_batch(comm.rank, step))
            one = {"loss": float(loss) if isinstance(loss, float | torch.Tensor) else None, "peak": live.peak}
            del loss
            one["shards"] = [_numbers(getattr(steps, "shards", {}), parameter) for parameter in net.parameters()]
            one["guesses"] = [_numbers(getattr(steps, "guesses", []), at) for at in range(step + 1)]
            one["whole"] = [name for name, parameter in net.named_parameters() if parameter.grad is not None]
            hooks = [parameter._post_accumulate_grad_hooks for parameter in net.parameters()]
            one["held"] = nbytes(before.new(of=[steps, *hooks]))
            seen.append(one)
    return seen


def _numbers(found, key):
    """A copy, so that it does not count as held."""
    import torch

    try:
        tensor = found[key]
    except (KeyError, TypeError, IndexError):
        return None
    return tensor.detach().flatten().tolist() if isinstance(tensor, torch.Tensor) else None


def expected_of(ranks: int, step: int):
    """Losses and first guesses by rank, and the averages of gradients."""
    import torch
    from torch.nn.functional import cross_entropy

    net, losses, guesses, gradients = make_net(), [], [], []
    for rank in range(ranks):
        x, y = make_batch(rank, step)
        net.zero_grad()
        output = net(x)
        loss = cross_entropy(output, y)
        loss.backward()
        losses.append(loss.item())
        guesses.append(output[0].detach())
        gradients.append([parameter.grad.flatten().clone() for parameter in net.parameters()])
    return losses, guesses, [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]


def held_by(ranks: int, step: int) -> int:
    """Shards of the last step, and a guess of each."""
    return NUMBER * sum(length_of(p.numel(), ranks) for p in make_net().parameters()) + ROW * (step + 1)


def judge_steps(observations) -> None:
    """Values first; then what is held after each step, and what grows from one to the next."""
    ranks = len(observations)
    for step in range(STEPS):
        _judge_values([seen[step] for seen in observations], step)
    for rank, seen in enumerate(observations):
        first, last, wanted = seen[0]["held"], seen[-1]["held"], held_by(ranks, STEPS - 1)
        grows = (last - first) // (STEPS - 1)
        # A bucket, with its padding, and the shard that its handle gives.
        sent = sum(length_of(p.numel(), ranks) * (ranks + 1) for p in make_net().parameters()) * NUMBER
        output = SAMPLES * ROW
        wrong = rows(rank)
        expected = f"{wanted} bytes held after {STEPS} steps: shards, and {STEPS} guesses"
        wrong("gradients-kept", seen[-1]["whole"], expected, f"whole gradients, such as {seen[-1]['whole'][:1]}",
              "The leaks were elsewhere; who freed gradients before?", "Keep parameter.grad = None in the hook.")
        wrong("both-kept", abs(grows - sent - output) <= SPARE, expected, f"{last} bytes, {grows} more in each step",
              "Two lines hold memory that grows. Which lines of the table above have more bytes in each step?",
              "One keeps buckets that have arrived, the other a view: see what self.sent and self.guesses refer to.")
        wrong("buckets-kept", abs(grows - sent - ROW) <= SPARE, expected, f"{last} bytes, {grows} more in each step",
              "In each step as many bytes as all gradients have come to stay. Which list refers to flat memory?",
              "After all handles have been waited for, self.sent.clear(): the handles go, and the buckets with them.")
        wrong("outputs-kept", abs(grows - output) <= SPARE, expected, f"{last} bytes, {grows} more in each step",
              "A guess has ten numbers. How many bytes has the memory that it is a view of?",
              "A view keeps its whole storage: keep output[0].detach().clone(), which has memory of its own.")
        wrong("something-grows", grows > ROW + SPARE // 2, expected, f"{last} bytes, {grows} more in each step",
              "Less than before, and yet more from step to step. What does each step add to?",
              "Print live.by_line() after one step and after four, and compare.")
        wrong("last-step-kept", last > wanted + SPARE, expected, f"{last} bytes, as after the first step",
              "It does not grow, but what the last step has sent is there until the next one. Who refers to it?",
              "Clear the list at the end of step(), not at its beginning; keep no `flat` and no output in self.")


def _judge_values(seen, step: int) -> None:
    import torch

    ranks = len(seen)
    losses, guesses, averages = expected_of(ranks, step)
    for rank, one in enumerate(seen):
        wrong = rows(rank, f"step {step + 1}: the loss {losses[rank]:.6f}, this rank's shards, a guess of each step")
        wrong("no-loss", one["loss"] is None, "no loss", "step(x, y) returned the loss. Does it still?",
              "return loss.item(), a number.")
        wrong("other-loss", not abs(one["loss"] - losses[rank]) < 1e-9, f"a loss of {one['loss']:.6f}",
              "Values were right before. What has changed in the forward pass?", "cross_entropy(self.model(x), y).")
        for at, (name, average) in enumerate(zip(_names(), averages, strict=True)):
            wrong("no-shard", one["shards"][at] is None, f"no shard of {name}",
                  "After step(), self.shards[parameter] is this rank's shard of the average. Is it still there?",
                  "Shards are what is asked for: free what lies beside them, not them.")
            expected = own_shard(average, rank, ranks)
            got = torch.tensor(one["shards"][at], dtype=torch.float64)[: len(expected)]
            wrong("not-arrived", not same(got, expected), f"other values in the shard of {name}",
                  "The values were right before. Is every handle waited for, before its memory goes?",
                  "First wait for all handles, then clear the list.")
        kept = one["guesses"][-1] if one["guesses"] else None
        wrong("no-guess", any(guess is None for guess in one["guesses"]), "fewer guesses",
              "self.guesses has the first row of the output of each step. Are all there?",
              "Keep one guess for each step, of ten numbers.")
        if not same(torch.tensor(kept, dtype=torch.float64), guesses[rank]):
            raise Wrong("other-guess", rank, f"the first row of step {step + 1}'s output", "other numbers",
                        "Whose memory does the guess lie in, and who writes there?",
                        "output[0].detach().clone() before anything else happens to output.")


def _names() -> list[str]:
    return [name for name, _ in make_net().named_parameters()]


EXERCISES = {"zero-leak": Exercise("ShardedSteps", observe_steps, judge_steps, any_size=True)}
