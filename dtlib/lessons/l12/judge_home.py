"""Lesson 12, the backward ring: check that gradients reach the rank of their keys."""

from itertools import groupby

from dtlib.lab.checks.equality import factors
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l12.judge_context import KEYS, WIDTH, about, is_like, numbers, same


def summand(rank: int, owner: int):
    """Return what a rank's queries add to the gradients of ``owner``'s keys and values."""
    return numbers(rank, 2, KEYS, WIDTH, of=100 + owner)


def observe_send_home(send_home, comm):
    """Return the result, the owners that the answer asked for, and the bytes sent."""
    from dtlib.comm.watch.recorder import recording

    asked: list = []

    def of(owner):
        asked.append(owner)
        return summand(comm.rank, owner)

    with recording() as events:
        got = send_home(comm, of)
    sent = sum(event.bytes for event in events if event.kind == "operation")
    comm.barrier()
    return {"sent": sent, "asked": asked, "got": got.detach().clone() if is_like(got, 2, KEYS, WIDTH) else about(got)}


def judge_send_home(observations) -> None:
    """Check each rank's sum of gradients, the order of owners, and bytes."""
    ranks, size = len(observations), summand(0, 0).nbytes

    def complete(owner):
        return sum(summand(rank, owner % ranks) for rank in range(ranks))

    for rank, seen in enumerate(observations):
        got, expected = seen["got"], f"the gradients of rank {rank}'s own keys, one summand from each of {ranks} ranks"
        if isinstance(got, str):
            raise Wrong("type", rank, f"a tensor of {(2, KEYS, WIDTH)}", got,
                        "Return this rank's own gradients.",
                        "pass_on starts to send. Call its result: pass_on(comm, travelling)()")
        others = {
            "one-hop-too-few": (complete(rank + 1), f"complete, but for the keys of rank {(rank + 1) % ranks}",
                                "The gradients are complete, but they belong to the keys of another rank. Which one?",
                                "After N steps, send once more: return pass_on(comm, travelling)()"),
            "one-hop-too-many": (complete(rank - 1), f"complete, but for the keys of rank {(rank - 1) % ranks}",
                                 "Is there one hop too many, or does the last hop go in the wrong direction?",
                                 "N hops for N ranks, all in one direction. The last hop is after the last step."),
            "alone": (summand(rank, rank), "only this rank's summand",
                      "Which ranks' queries use these keys? Their summands must arrive too."),
            "overwritten": (summand((rank - 1) % ranks, rank), "only the summand of another rank",
                            "Each rank adds its summand to the tensor that arrives. Where do you add?",
                            "here = summand(owner) + pass_on(comm, travelling)()"),
            "of-all": (sum(complete(owner) for owner in range(ranks)), "the sum of all ranks' gradients, for all keys",
                       "Each rank has different keys. Why do you add their gradients?"),
            "divided": (complete(rank) / ranks, f"divided by {ranks}",
                        "The gradient of keys is a sum over all queries, on all ranks. Which line divides?"),
        }
        if not same(got, complete(rank), 1e-12):
            wrong = rows(rank, expected)
            for mistake, (other, told, *hints) in others.items():
                wrong(mistake, same(got, other), told, *hints)
            wrong("rounded", same(got, complete(rank)), "nearly right, but rounded",
                  "In which type do you send them?")
            wrong("other-gradients", True, _in_words(got, ranks),
                  "Follow one tensor. Where does it start, which ranks add to it, and where does it end?",
                  "In step s a rank has the keys of owner (comm.rank - step) % comm.size; after N hops they are back.")
    for rank, seen in enumerate(observations):
        wrong, owners = rows(rank), [(rank - step) % ranks for step in range(ranks)]
        wrong("too-many-bytes", seen["sent"] > ranks * size, f"{ranks} hops of {size} bytes at most",
              f"{seen['sent']} bytes",
              "The values are right, but you send too much: summands, or sums?",
              "Send one tensor in each hop, and add every rank's summand to it.")
        wrong("keys-not-there", [owner for owner, _ in groupby(seen["asked"])] != owners,
              f"owners {owners}, in this order", f"owners {seen['asked']}",
              "The result is right. But for which keys may this rank call summand in step s?",
              "owner = (comm.rank - step) % comm.size, and one more hop after the last step.")


def _in_words(got, ranks: int) -> str:
    """Return as text which summands are in a result, and how often."""
    each = [(rank, owner) for owner in range(ranks) for rank in range(ranks)]
    often = factors(got, *(summand(*one) for one in each)) if len(each) <= got.numel() else None
    if often is None:
        return "something else, not these summands"
    of_keys = {owner: [] for owner in range(ranks)}
    for (rank, owner), times in zip(each, often, strict=True):
        if abs(times) > 1e-6:
            of_keys[owner].append(f"rank {rank}'s" + (f" {times:.3g} times" if abs(times - 1) > 1e-6 else ""))
    return "; ".join(f"of rank {owner}'s keys: {', '.join(found)}" for owner, found in of_keys.items() if found)


EXERCISES = {"last-hop-fix": Exercise("send_home", observe_send_home, judge_send_home, any_size=True)}
