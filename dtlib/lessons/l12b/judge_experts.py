"""Lesson 12b: checks of a balance loss for experts, and of dispatching tokens to experts and back."""

import pickle
from contextlib import ExitStack, contextmanager, suppress
from typing import SupportsInt
from unittest.mock import patch

from dtlib.lab.checks.equality import MARGIN
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l12.judge_context import about, is_like, numbers, same

TOKENS, EXPERTS = 12, 5
WIDTH = 64  # so wide that one row has more bytes than all counts

_MEAN = "dist.all_reduce(share, op=dist.ReduceOp.AVG, group=comm.group)"

# Balance loss


def choices(rank: int, top: int):
    """Return probabilities that favour other experts on each rank, and the chosen experts."""
    import torch

    probabilities = (numbers(rank, TOKENS, EXPERTS, of=top) + 2 * torch.eye(EXPERTS)[rank % EXPERTS]).softmax(-1)
    return probabilities, probabilities.topk(top).indices


def share_of(chosen):
    """Return each expert's share of the choices."""
    return chosen.flatten().bincount(minlength=EXPERTS).double() / chosen.numel()


def observe_balance(balance, comm):
    """Return loss and gradient with one and with two choices per token, or an error."""
    import torch

    seen = []
    for top in (1, 2):
        probabilities, chosen = choices(comm.rank, top)
        probabilities.requires_grad_()
        loss = balance(comm, probabilities, chosen.clone())
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1):
            return {"error": about(loss)}
        gradient = None
        if loss.requires_grad:
            gradient = torch.autograd.grad(loss.sum(), probabilities, allow_unused=True)[0]
        seen.append((loss.item(), gradient))
    comm.barrier()
    return {"seen": seen}


def judge_balance(observations) -> None:
    """Check gradients and losses of the balance over all ranks."""
    import torch

    ranks = len(observations)
    for rank, seen in enumerate(observations):
        wrong = rows(rank)
        wrong("type", "error" in seen, "a loss: one number", seen.get("error"), "Return a tensor with one element.")
        wrong("detached", any(gradient is None for _, gradient in seen["seen"]),
              "a loss with a gradient for the probabilities", "a number without a gradient",
              "The gate learns from the gradient of this loss. Which line loses the gradient?",
              "The share of choices has no gradient; probabilities.mean(0) has one, if no line detaches it.")
    ones = torch.ones(TOKENS, 1).double() * EXPERTS / TOKENS
    for rank, seen in enumerate(observations):
        factors = []
        for top, (_, got) in zip((1, 2), seen["seen"], strict=True):
            of_all = sum(share_of(choices(each, top)[1]) for each in range(ranks)) / ranks
            expected = f"top {top}: experts / tokens * (share of all ranks' choices), for each token's probability"
            own = ones * share_of(choices(rank, top)[1])
            everywhere = [(seen["seen"][at][1], at + 1) for seen in observations for at in (0, 1)]
            of_one = [r for r in range(ranks) if all(same(c, ones * share_of(choices(r, t)[1])) for c, t in everywhere)]
            wrong = rows(rank, expected)
            if of_one and ranks > 1:
                wrong("one-ranks-share", True, f"the share of rank {of_one[0]}'s choices, on all ranks",
                      "All ranks now use the same share. Which rank's choices does it count?", _MEAN)
            wrong("own-share", same(got, own) and not same(own, ones * of_all),
                  "only the share of this rank's choices",
                  "Each rank may be in balance, but not all ranks together. Whose choices must you count?", _MEAN)
            # The gradient may be right up to a factor, which says what is wrong (_judge_factors).
            factor = got.sum() / (ones * of_all).sum()
            if not same(got, factor * ones * of_all):
                soft = sum(choices(each, top)[0].mean(0) for each in range(ranks)) / ranks
                raise Wrong(*(("probabilities-twice",) if same(got, ones * soft) or same(got, 2 * ones * soft)
                            else ("other-gradient",)), rank, expected, "another gradient",
                            "Which values do you count? Use shares of choices, and means of probabilities.",
                            "experts * (share * probabilities.mean(0)).sum(), with the share of all ranks")
            factors.append(float(factor))
        _judge_factors(rank, factors, ranks)
    for at, top in enumerate((1, 2)):
        mean = sum(seen["seen"][at][0] for seen in observations) / ranks
        both = [choices(rank, top) for rank in range(ranks)]
        share, probability = sum(share_of(c) for _, c in both) / ranks, sum(p.mean(0) for p, _ in both) / ranks
        if not abs(mean - EXPERTS * float((share * probability).sum())) < 1e-6:
            raise Wrong("other-value", 0, "the loss of all tokens, as the mean over ranks", f"{mean:.4g}",
                        "Gradients are right, the value is not. Which constant do you add?")


def _judge_factors(rank: int, factors: list[float], ranks: int) -> None:
    """Recognise a mistake from the factors of the gradient, with one and with two choices per token."""
    known = {
        (1, 2): ("of-tokens",
                 "With two choices per token, there are twice as many choices as tokens.",
                 "chosen.numel(), not len(chosen)"),
        (ranks, ranks): ("summed", "Shares add up to one. What is the sum of the shares of all ranks?", _MEAN),
        (1 / ranks, 1 / ranks): ("divided-twice", "You already have the mean. Which line divides again?",
                                 "op=dist.ReduceOp.AVG. Do not divide again."),
        (TOKENS, TOKENS): ("sum-of-probabilities", "A share is between 0 and 1. Is your mean probability, too?",
                           "probabilities.mean(0)"),
        (ranks / EXPERTS, ranks / EXPERTS): ("ranks-for-experts",
                                             "How many experts are there? The number of ranks may differ.",
                                             "experts = probabilities.shape[1]; some experts may share a rank."),
        (1 / EXPERTS, 1 / EXPERTS): ("without-experts",
                                     "With equally many tokens per expert it must be 1. Which factor is missing?",
                                     "experts * (...).sum()"),
    }
    wrong = rows(rank, "experts * sum of share * mean probability")
    times = f"{factors[0]:.3g} times as much with one choice per token, {factors[1]:.3g} with two"
    for found, (mistake, *hints) in known.items():
        wrong(mistake, found != (1, 1) and all(abs(a - b) < 1e-6 for a, b in zip(factors, found, strict=True)),
              times, *hints)
    wrong("other-factor", not all(abs(factor - 1) < 1e-6 for factor in factors),
          times, "By what do you divide, and how often?", "A share is the choices of an expert / all choices.")


# Dispatching tokens


def cases(rank: int, ranks: int) -> dict:
    """Return by case the tokens of a rank, and the expert (a rank) that each token has chosen."""
    import torch

    count = 5 + 2 * rank
    x, chance = numbers(rank, count, WIDTH, of=7), torch.Generator().manual_seed(rank)
    return {
        "tokens of all ranks for all experts": (x, torch.randint(ranks, (count,), generator=chance)),
        "all tokens for the last expert": (x, torch.full((count,), ranks - 1)),
        "each token for its own rank's expert": (x, torch.full((count,), rank)),
        "a rank without tokens": (x[: count * (rank > 0)], torch.arange(count * (rank > 0)) % ranks),
    }


def expert_of(rank: int):
    """Return the expert of a rank: a function by rows, different on each rank, which changes zeros."""
    return lambda rows: (rank + 1) * (rows + 1).tanh() + rank


def _pickled(*things) -> int:
    return sum(len(pickle.dumps(thing)) for thing in things)


def _exchanged(buffer, rank: int, size: int) -> int:
    """Return the bytes for other ranks in an argument of Alltoallv.

    The argument is ``[array, counts]`` or ``[array, (counts, places)]``.
    """
    array, counts = buffer[:2]
    counts = [int(count) for count in (counts if isinstance(counts[0], SupportsInt) else counts[0])]
    return (sum(counts) - counts[rank]) * array.itemsize


# Collective of mpi4py -> bytes that this rank sends to other ranks.
REACHES = {
    "Alltoall": lambda sent, rank, size: sent.nbytes * (size - 1) // size,
    "Alltoallv": _exchanged,
    "Allgather": lambda sent, rank, size: sent.nbytes * (size - 1),
    "alltoall": lambda sent, rank, size: _pickled(*sent[:rank], *sent[rank + 1 :]),
    "allgather": lambda sent, rank, size: _pickled(sent) * (size - 1),
}


@contextmanager
def counted_by_arguments():
    """Return a context whose list gets the bytes that calls of mpi4py send to other ranks.

    They are computed from the arguments, because MPI does not report them.
    """
    from dtlib.comm.mpi4py_comm import Mpi4pyComm

    found: list[int] = []

    def counting(theirs, reaches):
        def call(self, sent, *rest):
            with suppress(AttributeError, TypeError, IndexError):  # arguments of another form
                found.append(reaches(sent, self.rank, self.size))
            return theirs(self, sent, *rest)

        return call

    with ExitStack() as stack:
        for name, reaches in REACHES.items():
            call = counting(getattr(Mpi4pyComm, name), reaches)
            stack.enter_context(patch.object(Mpi4pyComm, name, call))
        yield found


def observe_dispatch(dispatch, comm):
    """Return for each case the result and the bytes that this rank sent."""
    from dtlib.comm.watch.recorder import recording

    seen, apart = {}, comm.split(0)  # no receive of an answer can match this barrier
    for what, (x, chosen) in cases(comm.rank, comm.size).items():
        with recording() as events, counted_by_arguments() as counted:
            got = dispatch(comm, x.clone(), chosen.clone(), expert_of(comm.rank))
        sent = sum(e.bytes for e in events if e.kind == "operation") + sum(counted)
        apart.barrier()
        seen[what] = (got.detach().clone() if is_like(got, *x.shape) else about(got), sent)
    return seen


def judge_dispatch(observations) -> None:
    """Check that each token returns with its expert's result, and that bytes are minimal."""
    import torch

    ranks = len(observations)
    everyones = [cases(rank, ranks) for rank in range(ranks)]
    for what in everyones[0]:
        chosen_by = [of_rank[what][1] for of_rank in everyones]
        for rank, seen in enumerate(observations):
            (x, chosen), (got, sent) = everyones[rank][what], seen[what]
            wrong = rows(rank)
            wrong("type", isinstance(got, str), f"{what}: {tuple(x.shape)}, one row per token", got,
                  "Return one row for each token of this rank. Which ranks wait for the rows that you received?",
                  "A second all_to_all_single sends them back: exchange received and sent.")
            right = torch.stack([expert_of(int(e))(row) for e, row in zip(chosen, x, strict=True)]) if len(x) else x
            if len(x) and not same(got, right, 1e-12):
                _explain_dispatch(rank, f"{what}: for each token the output of its expert", got, right, x)
            leave = int((chosen != rank).sum())
            arrive = sum(int((theirs == rank).sum()) for other, theirs in enumerate(chosen_by) if other != rank)
            most = (leave + arrive) * WIDTH * 8
            wrong("too-many-bytes", sent > most + MARGIN,
                  f"{what}: {most} bytes, {leave} rows to other ranks and {arrive} rows back", f"{sent} bytes",
                  "The values are right, but you send too much. Which rows must be sent?",
                  "all_to_all_single(out, rows, received, sent, ...): the rows for each rank, which may be zero.")


def _explain_dispatch(rank, expected, got, right, x) -> None:
    import torch

    lost = (got == 0).all(1) | (got == x).all(1)
    is_there = [(got - row).abs().amax(1).min() < 1e-6 for row in right]
    wrong = rows(rank, expected)
    wrong("own-expert", same(got, expert_of(rank)(x)), "the output of this rank's expert for all of them",
          "A token belongs to expert chosen[i], on rank chosen[i]. Do you send the token there before the call?",
          "Sort the tokens by their expert, then call all_to_all_single.")
    wrong("unchanged", same(got, x), "the unchanged tokens", "Where do you call expert(rows)?")
    wrong("lost", bool(lost.any()) and all(same(c, r) for c, r in zip(got[~lost], right[~lost], strict=True)),
          f"{int(lost.sum())} of {len(x)} tokens without a result",
          "How many rows does each rank receive? The numbers differ between ranks.",
          "First send the numbers of rows with all_to_all_single, and then the rows.")
    wrong("rounded", same(got, right, 1e-2), "nearly the right values, but rounded",
          "In which type do you send the rows?", "torch.empty(...) is float32: x.new_empty(...) has the type of x.")
    wrong("not-in-order", all(is_there), "the right rows, in another order",
          "You sorted the rows before you sent them. To which token does the first returned row belong?",
          "out[order] = back, with order = chosen.argsort(stable=True)")
    wrong("no-number", bool(torch.isnan(got).any()), "NaN",
          "Do you overwrite all old values of torch.empty?")
    wrong("other-rows", True, "others",
          "In which order do rows arrive, and in which order do you send them back? Try it with two tokens.",
          "The received rows are sorted by rank. Send them back in the same order.")


EXERCISES = {
    "balance-fix": Exercise("balance", observe_balance, judge_balance, any_size=True),
    "dispatch-build": Exercise("dispatch", observe_dispatch, judge_dispatch, any_size=True),
}
