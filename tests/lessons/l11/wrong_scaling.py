"""Plausible wrong answers to lesson 11, and the mistake that the check must recognise in each."""

import math

import torch
from torch import distributed as dist

# fix: efficiency(comm, seconds, kind)


def slowest(comm, seconds, op=dist.ReduceOp.MAX):
    took = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(took, op=op, group=comm.group)
    return dict(zip(seconds, took.tolist(), strict=True))


def as_it_was(comm, seconds, kind):
    """The planted bugs: its own seconds, one kind of scaling, and one rank to begin with."""
    return {n: seconds[min(seconds)] / (n * took) for n, took in seconds.items()}


def counts_from_one(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    first = min(seconds)
    return {n: seconds[first] / took / (n if kind == "strong" else 1) for n, took in seconds.items()}


def one_kind(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    first = min(seconds)
    return {n: first * seconds[first] / (n * took) for n, took in seconds.items()}


def the_other_kind(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    return {n: seconds[min(seconds)] / took for n, took in seconds.items()}


def speed_ups(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    first = min(seconds)
    return {n: seconds[first] / took * (n / first if kind == "weak" else 1) for n, took in seconds.items()}


def from_the_one_before(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    found, before = {}, min(seconds)
    for n in sorted(seconds):
        found[n] = seconds[before] / seconds[n] * (before / n if kind == "strong" else 1)
        before = n
    return found


def the_base_divides(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    first = min(seconds)
    return {n: seconds[first] / took / (first * n if kind == "strong" else 1) for n, took in seconds.items()}


def less_what_is_lost(comm, seconds, kind):
    """Nearly that, and at times it looks like fewer digits."""
    seconds = slowest(comm, seconds)
    first = min(seconds)
    return {n: 2 - took / seconds[first] * (n / first if kind == "strong" else 1) for n, took in seconds.items()}


def in_percent(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    first = min(seconds)
    return {n: 100 * seconds[first] / took * (first / n if kind == "strong" else 1) for n, took in seconds.items()}


def trusts_the_order(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    first = next(iter(seconds))
    return {n: seconds[first] / took * (first / n if kind == "strong" else 1) for n, took in seconds.items()}


def whole_multiples(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    first = min(seconds)
    return {n: seconds[first] / took / (n // first if kind == "strong" else 1) for n, took in seconds.items()}


def from_the_largest(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    last = max(seconds)
    return {n: seconds[last] / took * (last / n if kind == "strong" else 1) for n, took in seconds.items()}


def from_the_longest_time(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    first, base = min(seconds), max(seconds.values())
    return {n: base / took * (first / n) if kind == "strong" else seconds[first] / took for n, took in seconds.items()}


def from_the_best_time(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    right = right_efficiencies(seconds, kind)
    return right if kind == "strong" else {n: min(seconds.values()) / took for n, took in seconds.items()}


def rounded_efficiencies(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    return {n: round(found, 6) for n, found in right_efficiencies(seconds, kind).items()}


def right_efficiencies(seconds, kind):
    first = min(seconds)
    return {n: seconds[first] / took * (first / n if kind == "strong" else 1) for n, took in seconds.items()}


def at_most_one(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    return {n: min(found, 1.0) for n, found in right_efficiencies(seconds, kind).items()}


def a_list(comm, seconds, kind):
    seconds = slowest(comm, seconds)
    first = min(seconds)
    return [seconds[first] / took for took in seconds.values()]


def of_the_slowest(comm, seconds, kind):
    """One of the planted bugs is mended."""
    seconds = slowest(comm, seconds)
    return {n: seconds[min(seconds)] / (n * took) for n, took in seconds.items()}


def of_this_rank(comm, seconds, kind):
    return right_efficiencies(seconds, kind)


def of_the_fastest(comm, seconds, kind):
    return right_efficiencies(slowest(comm, seconds, dist.ReduceOp.MIN), kind)


def of_the_sum(comm, seconds, kind):
    """Nobody has said which operation."""
    return right_efficiencies(slowest(comm, seconds, dist.ReduceOp.SUM), kind)


def of_the_mean(comm, seconds, kind):
    return right_efficiencies(slowest(comm, seconds, dist.ReduceOp.AVG), kind)


# build: step_seconds(ranks, compute, count, latency, bandwidth)


def ring(n, count, a, b):
    return 2 * (n - 1) * (a + count / n / b)


def doubling(n, count, a, b):
    return math.log2(n) * (a + count / b)


def halving(n, count, a, b):
    return 2 * math.log2(n) * a + 2 * (n - 1) / n * count / b


def cheapest(*network):
    return min(ring(*network), doubling(*network), halving(*network))


def always_the_ring(ranks, compute, count, latency, bandwidth):
    return compute + ring(ranks, count, latency, bandwidth)


def always_doubling(ranks, compute, count, latency, bandwidth):
    return compute + doubling(ranks, count, latency, bandwidth)


def two_of_three(ranks, compute, count, latency, bandwidth):
    return compute + min(ring(ranks, count, latency, bandwidth), doubling(ranks, count, latency, bandwidth))


def bandwidth_alone(ranks, compute, count, latency, bandwidth):
    return compute + cheapest(ranks, count, 0.0, bandwidth)


def multiplies_by_bandwidth(ranks, compute, count, latency, bandwidth):
    return compute + cheapest(ranks, count, latency, 1 / bandwidth)


def hides_it(ranks, compute, count, latency, bandwidth):
    return max(compute, cheapest(ranks, count, latency, bandwidth))


def communication_alone(ranks, compute, count, latency, bandwidth):
    return cheapest(ranks, count, latency, bandwidth) if ranks > 1 else compute


def whole_arrays(ranks, compute, count, latency, bandwidth):
    return compute + 2 * (ranks - 1) * (latency + count / bandwidth)


def a_message_to_oneself(ranks, compute, count, latency, bandwidth):
    return compute + latency + cheapest(ranks, count, latency, bandwidth)


def rounded_seconds(ranks, compute, count, latency, bandwidth):
    return round(right_seconds(ranks, compute, count, latency, bandwidth), 6)


def right_seconds(ranks, compute, count, latency, bandwidth):
    return compute + cheapest(ranks, count, latency, bandwidth) if ranks > 1 else compute


def the_slowest(ranks, compute, count, latency, bandwidth):
    network = count, latency, bandwidth
    return compute + max(ring(ranks, *network), doubling(ranks, *network), halving(ranks, *network))


def one_phase_of_the_ring(ranks, compute, count, latency, bandwidth):
    network = count, latency, bandwidth
    return compute + min(ring(ranks, *network) / 2, doubling(ranks, *network), halving(ranks, *network))


def shares_out_computing(ranks, compute, count, latency, bandwidth):
    network = count, latency, bandwidth
    return right_seconds(ranks, compute / ranks, *network)


def whole_bytes(ranks, compute, count, latency, bandwidth):
    of_halving = 2 * math.log2(ranks) * latency + 2 * (ranks - 1) * (count // ranks) / bandwidth
    of_ring = 2 * (ranks - 1) * (latency + count // ranks / bandwidth)
    return compute + min(of_ring, doubling(ranks, count, latency, bandwidth), of_halving)


def natural_logarithm(ranks, compute, count, latency, bandwidth):
    rounds, of_ring = math.log(ranks), 2 * (ranks - 1) / ranks * count / bandwidth
    of_doubling = rounds * (latency + count / bandwidth)
    return compute + min(ring(ranks, count, latency, bandwidth), of_doubling, 2 * rounds * latency + of_ring)


def sends_halves_by_doubling(ranks, compute, count, latency, bandwidth):
    network = count, latency, bandwidth
    by_doubling = math.log2(ranks) * (latency + count / 2 / bandwidth)
    return compute + min(ring(ranks, *network), by_doubling, halving(ranks, *network))


def halves_with_whole_messages(ranks, compute, count, latency, bandwidth):
    network = count, latency, bandwidth
    return compute + min(ring(ranks, *network), doubling(ranks, *network), 2 * doubling(ranks, *network))


def latencies_of_the_ring(ranks, compute, count, latency, bandwidth):
    """Every algorithm pays the ring's latencies, so that the ring is always the cheapest."""
    if ranks == 1:
        return compute
    sent = [2 * count * (ranks - 1) / ranks, count * math.log2(ranks)]
    return compute + min(2 * (ranks - 1) * latency + each / bandwidth for each in sent)


def asks_for_three(ranks, compute, count, latency, bandwidth):
    """The number of ranks of the notebook, whatever was passed."""
    return compute + cheapest(3, count, latency, bandwidth)


WRONG = {
    "efficiency-fix": {
        as_it_was: "own-seconds",
        of_the_slowest: "strong-for-weak",
        of_this_rank: "own-seconds",
        of_the_fastest: "fastest-rank",
        of_the_sum: "sum-of-ranks",
        of_the_mean: "sum-of-ranks",
        counts_from_one: "one-rank-base",
        one_kind: "strong-for-weak",
        the_other_kind: "weak-for-strong",
        speed_ups: "speed-up",
        in_percent: "percent",
        from_the_one_before: "from-the-one-before",
        the_base_divides: "base-divides",
        less_what_is_lost: "other-value",
        trusts_the_order: "first-key",
        whole_multiples: "whole-multiples",
        from_the_largest: "last-key",
        from_the_longest_time: "longest-time",
        from_the_best_time: "shortest-time",
        rounded_efficiencies: "rounded",
        at_most_one: "cut-to-one",
        a_list: "type",
    },
    "step-model-build": {
        always_the_ring: "always-ring",
        always_doubling: "always-recursive-doubling",
        two_of_three: "without-halving",
        bandwidth_alone: "no-latency",
        multiplies_by_bandwidth: "bandwidth-multiplied",
        hides_it: "overlapped",
        communication_alone: "no-compute",
        whole_arrays: "whole-array",
        a_message_to_oneself: "one-rank",
        rounded_seconds: "rounded",
        sends_halves_by_doubling: "doubling-half",
        the_slowest: "slowest",
        one_phase_of_the_ring: "half-a-ring",
        shares_out_computing: "compute-shared-out",
        whole_bytes: "whole-bytes",
        natural_logarithm: "natural-log",
        halves_with_whole_messages: "without-halving",
        latencies_of_the_ring: "always-ring",
        asks_for_three: "other-ranks",
    },
}
