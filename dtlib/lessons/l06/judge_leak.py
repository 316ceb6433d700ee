"""Lesson 06: check of a stage 2 with right values and growing memory."""

from dtlib.lab.checks.answer_memory import Snapshot, nbytes
from dtlib.lab.checks.equality import MARGIN, NUMBER, same
from dtlib.lab.checks.exercise import Exercise, rows
from dtlib.lessons.l06.observe_adam import length_of, net_of, own_shard

STEPS = 4
SAMPLES, WIDTHS = 24, (16, 40, 10)  # the output of a batch is larger than the net, its first row smaller
ROW = WIDTHS[-1] * NUMBER  # bytes of a guess

# fix: ShardedSteps(comm, model) with step(x, y)


def make_batch(rank: int, step: int):
    """Return samples and labels of a rank in a step."""
    import torch

    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    x = torch.randn(SAMPLES, WIDTHS[0], dtype=torch.float64, generator=generator)
    return x, torch.randint(0, WIDTHS[-1], (SAMPLES,), generator=generator)


def observe_steps(cls, comm):
    """Return for each step loss, shards and guess, the bytes of new objects, and the peak during the step."""
    import numpy as np
    import torch

    from dtlib.measure.live import Live

    kinds = list, tuple, np.ndarray  # types that a guess for a plot may have, besides tensors
    net, seen = net_of(*WIDTHS), []
    with Snapshot(cls) as before:
        steps = cls(comm, net)
        for step in range(STEPS):
            with Live() as live:
                loss = steps.step(*make_batch(comm.rank, step))
            # Only numbers are kept here, because a reference to the loss or its graph would count as new memory.
            loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
            one = {"loss": float(loss) if isinstance(loss, float | torch.Tensor) else None, "peak": live.peak}
            del loss
            one["shards"] = [_numbers(getattr(steps, "shards", {}), parameter) for parameter in net.parameters()]
            one["guesses"] = [_numbers(getattr(steps, "guesses", []), at, *kinds) for at in range(step + 1)]
            one["behind shards"] = sum(_behind(getattr(steps, "shards", {}), p) for p in net.parameters())
            one["behind guess"] = _behind(getattr(steps, "guesses", []), step)
            one["whole"] = [name for name, parameter in net.named_parameters() if parameter.grad is not None]
            hooks = [parameter._post_accumulate_grad_hooks for parameter in net.parameters()]
            one["held"] = nbytes(before.new(of=[steps, *hooks]))
            seen.append(one)
    return seen


def _numbers(found, key, *others: type):
    """Return a tensor's numbers as a copy, which does not keep its memory alive; also of ``others``' types."""
    import numpy as np
    import torch

    try:
        value = found[key]
        if isinstance(value, torch.Tensor):
            return value.detach().flatten().tolist()
        return np.array(value, dtype=float).ravel().tolist() if isinstance(value, others) else None
    except (KeyError, TypeError, IndexError, ValueError):
        return None


def _behind(found, key) -> int:
    """Return the bytes of the memory that a tensor or an array is a view of, 0 for other types."""
    import numpy as np
    import torch

    try:
        value = found[key]
    except (KeyError, TypeError, IndexError):
        return 0
    while isinstance(value, np.ndarray) and value.base is not None:
        value = value.base
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    return value.nbytes if isinstance(value, np.ndarray) else 0


def expected_of(ranks: int, step: int):
    """Return losses and first guesses by rank, and the averaged gradients."""
    import torch
    from torch.nn.functional import cross_entropy

    net, losses, guesses, gradients = net_of(*WIDTHS), [], [], []
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
    """Return the bytes that a rank must store: shards of the last step, and one guess per step."""
    return NUMBER * sum(length_of(p.numel(), ranks) for p in net_of(*WIDTHS).parameters()) + ROW * (step + 1)


def judge_steps(observations) -> None:
    """Check values, then the memory after each step and its growth."""
    ranks = len(observations)
    for step in range(STEPS):
        _judge_values([seen[step] for seen in observations], step)
    for rank, seen in enumerate(observations):
        first, last, wanted = seen[0]["held"], seen[-1]["held"], held_by(ranks, STEPS - 1)
        grows = (last - first) // (STEPS - 1)
        # Bytes of a padded bucket and of the shard that its handle returns.
        sent = sum(length_of(p.numel(), ranks) * (ranks + 1) for p in net_of(*WIDTHS).parameters()) * NUMBER
        output = SAMPLES * ROW
        views = seen[-1]["behind guess"] > ROW + MARGIN
        wrong = rows(rank, f"{wanted} bytes in use after {STEPS} steps: shards, and {STEPS} guesses")
        growth = f"{last} bytes, {grows} more in each step"
        wrong("both-kept", abs(grows - sent - output) <= MARGIN, growth,
              "The memory of two lines grows. Which lines of the table above have more bytes in each step?",
              "One line keeps complete buckets, the other a view. To which memory do self.sent and self.guesses refer?")
        wrong("buckets-kept", abs(grows - sent - ROW) <= MARGIN, growth,
              "In each step, memory grows by the bytes of all gradients. What refers to flat memory, directly or by a "
              "handle?", "Wait for all handles, then call self.sent.clear(): this frees the handles and their buckets.")
        wrong("outputs-kept", views and abs(grows - output) <= MARGIN, growth,
              "A guess has ten numbers. How many bytes does its whole storage have?",
              "A view keeps its whole storage. Store output[0].detach().clone(), which has separate memory.")
        wrong("outputs-elsewhere", abs(grows - output) <= MARGIN, growth,
              "The guesses have separate memory. Where else does each step keep its whole output?",
              "A list, an attribute or a function keeps it, perhaps as an array. Keep only the first row.")
        wrong("something-grows", grows > ROW + MARGIN // 2, growth,
              "Memory grows in each step. Print live.by_line() after one step and after four: which line has more?",
              "Which list, attribute or function refers to this memory? Keep only what the next step needs.")
        padded = NUMBER * sum(length_of(p.numel(), ranks) for p in net_of(*WIDTHS).parameters())
        wrong("shards-are-views", seen[-1]["behind shards"] > padded + MARGIN,
              f"{last} bytes: {seen[-1]['behind shards']} behind the shards, of {padded}",
              "Memory does not grow. But how many bytes has the storage behind the view of a shard?",
              "A slice keeps the whole bucket. Use reduce_scatter into a tensor with the length of a shard, as before.")
        wrong("last-step-kept", last > wanted + MARGIN, f"{last} bytes, and the same after one more step",
              "Memory does not grow, but something of the last step remains until the next step: buckets, or an "
              "output. What refers to it?",
              "Clear the whole list at the end of step(), not at its start; a loop that removes from its own list "
              "skips entries. Do not store `flat` or an output in attributes.")
        most, at = max((one["held"] - held_by(ranks, step), step) for step, one in enumerate(seen))
        wrong("some-steps-kept", most > MARGIN, f"{last}; but {most} bytes more than necessary after step {at + 1}",
              "Memory is right after the last step, but not after an earlier one. When do you free memory?",
              "Clear the list at the end of every step.")


def _judge_values(seen, step: int) -> None:
    import torch

    ranks = len(seen)
    losses, guesses, averages = expected_of(ranks, step)
    for rank, one in enumerate(seen):
        wrong = rows(rank, f"step {step + 1}: the loss {losses[rank]:.6f}, this rank's shards, a guess of each step")
        wrong("no-loss", one["loss"] is None, "no loss", "step(x, y) should return the loss. What does it return now?",
              "return loss.item(), a number.")
        wrong("other-loss", not abs(one["loss"] - losses[rank]) < 1e-9, f"a loss of {one['loss']:.6f}",
              "Values were right before. What changed in the forward pass?", "cross_entropy(self.model(x), y).")
        wrong("gradients-kept", one["whole"], f"whole gradients: {', '.join(one['whole'])}",
              "Other lines had the leaks. Which line freed gradients?", "Keep parameter.grad = None in the hook.")
        for at, (name, average) in enumerate(zip(_names(), averages, strict=True)):
            wrong("no-shard", one["shards"][at] is None, f"no shard of {name}",
                  "After step(), self.shards[parameter] must be this rank's shard of the mean. Does it still exist?",
                  "The shards must stay. Free only other memory.")
            expected = own_shard(average, rank, ranks)
            got = torch.tensor(one["shards"][at], dtype=torch.float64)[: len(expected)]
            wrong("not-arrived", not same(got, expected), f"other values in the shard of {name}",
                  "The values were right before. Do you wait for every handle before you free its memory?",
                  "First wait for all handles, then clear the list. Do not remove entries in a loop over the list.")
        kept = one["guesses"][-1] if one["guesses"] else None
        wrong("no-guess", any(guess is None for guess in one["guesses"]), "fewer guesses",
              "self.guesses has the first row of the output of each step. Is one missing?",
              "Keep one guess for each step, of ten numbers.")
        guess = torch.tensor(kept or [], dtype=torch.float64)
        wrong("guess-length", guess.shape != guesses[rank].shape, f"a guess of {len(guess)} numbers",
              "A guess is the first row of the output. Is yours?", "Select the row, then copy it.")
        right = same(guess, guesses[rank])
        wrong("rounded-guess", not right and torch.allclose(guess, guesses[rank], 1e-2, 1e-2),
              "a guess in fewer digits",
              "You converted the guess to another dtype. Does the conversion copy if the dtype is equal?",
              "Keep the dtype, and copy explicitly.")
        wrong("other-guess", not right, "other numbers in the guess",
              "Do you store only the first row? Does another line write into its memory later?",
              "output[0].detach().clone() before anything else happens to output.")


def _names() -> list[str]:
    return [name for name, _ in net_of(*WIDTHS).named_parameters()]


EXERCISES = {"zero-leak": Exercise("ShardedSteps", observe_steps, judge_steps, any_size=True)}
