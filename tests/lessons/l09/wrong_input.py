"""Plausible wrong answers to lesson 09, and the mistake that the check must recognise in each."""

import math

import torch
from torch import distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

# fix: my_samples(comm, count)


def of_rank_0(comm, order):
    dist.broadcast(order, group_src=0, group=comm.group)
    return order.tolist()


def in_order(comm, count):
    return of_rank_0(comm, torch.randperm(count))


def as_it_was(comm, count):
    """Both planted bugs."""
    order, each = torch.randperm(count), count // comm.size
    return order[comm.rank * each : (comm.rank + 1) * each].tolist()


def cuts_off_the_rest(comm, count):
    """The second planted bug."""
    order, each = in_order(comm, count), count // comm.size
    return order[comm.rank * each : (comm.rank + 1) * each]


def shuffles_for_itself(comm, count):
    """The first planted bug."""
    return torch.randperm(count)[comm.rank :: comm.size].tolist()


def broadcasts_too_late(comm, count):
    mine = torch.randperm(count)[comm.rank :: comm.size].contiguous()
    other = torch.randperm(count)
    dist.broadcast(other, group_src=0, group=comm.group)
    return mine.tolist()


def rest_to_the_last(comm, count):
    order, each = in_order(comm, count), count // comm.size
    return order[comm.rank * each : None if comm.rank == comm.size - 1 else (comm.rank + 1) * each]


def pads_like_a_distributed_sampler(comm, count):
    order, each = in_order(comm, count), math.ceil(count / comm.size)
    return (order * 2)[: each * comm.size][comm.rank :: comm.size]


def one_too_many(comm, count):
    order, each = in_order(comm, count), math.ceil(count / comm.size)
    return order[comm.rank * each : (comm.rank + 1) * each + 1]


def shares_nothing(comm, count):
    return in_order(comm, count)


def from_one_on(comm, count):
    """Samples are counted from 0."""
    return [number + 1 for number in in_order(comm, count)][comm.rank :: comm.size]


def never_random(comm, count):
    return list(range(comm.rank, count, comm.size))


def the_same_seed_each_time(comm, count):
    torch.manual_seed(0)
    return torch.randperm(count)[comm.rank :: comm.size].tolist()


def begins_too_late(comm, count):
    return in_order(comm, count)[comm.rank + 1 :: comm.size]


def three_ranks(comm, count):
    return in_order(comm, count)[comm.rank :: 3]


def how_many(comm, count):
    return count // comm.size


# fix: Stream(order, rank, ranks)


class _Stream(IterableDataset):
    def __init__(self, order, rank, ranks):
        self.order, self.rank, self.ranks = order, rank, ranks


class EveryWorkerAll(_Stream):
    """The planted bug: workers are copies, and each of them reads what is its rank's."""

    def __iter__(self):
        return iter(self.order[self.rank :: self.ranks])


class WithoutWorkersNone(_Stream):
    def __iter__(self):
        worker = get_worker_info()
        return iter(self.order[self.rank :: self.ranks][worker.id :: worker.num_workers])


class TwoWorkers(_Stream):
    """Right for one rank with two, as in the first cell that tries it."""

    def __iter__(self):
        worker = get_worker_info()
        mine = self.order[self.rank :: self.ranks]
        return iter(mine if worker is None else mine[worker.id :: 2])


class BeginsElsewhere(_Stream):
    def __iter__(self):
        worker = get_worker_info()
        mine = self.order[self.rank :: self.ranks]
        return iter(mine if worker is None else mine[worker.id :])


class ForgetsTheRank(_Stream):
    def __iter__(self):
        worker = get_worker_info()
        return iter(self.order if worker is None else self.order[worker.id :: worker.num_workers])


class SharesRoundedDown(_Stream):
    """Nothing is read twice, and what is left at the end of a rank's share not at all."""

    def __iter__(self):
        worker = get_worker_info()
        mine = self.order[self.rank :: self.ranks]
        each = len(mine) // (worker.num_workers if worker else 1)
        at = worker.id if worker else 0
        return iter(mine[at * each : (at + 1) * each])


class Worker0ReadsAll(_Stream):
    """Each sample once, and no faster than without workers."""

    def __iter__(self):
        worker = get_worker_info()
        return iter(self.order[self.rank :: self.ranks] if worker is None or worker.id == 0 else [])


class CutsAgain(_Stream):
    """Right in the first epoch: the next one cuts what is left of it."""

    def __iter__(self):
        worker = get_worker_info()
        self.order = self.order[self.rank :: self.ranks]
        if worker is not None:
            self.order = self.order[worker.id :: worker.num_workers]
        return iter(self.order)


class UsesItUp(_Stream):
    """Right in the first epoch, after which nothing is left."""

    def __init__(self, order, rank, ranks):
        super().__init__(order, rank, ranks)
        self.mine = None

    def __iter__(self):
        worker = get_worker_info()
        at, of = (worker.id, worker.num_workers) if worker else (0, 1)
        if self.mine is None:
            self.mine = iter(self.order[self.rank :: self.ranks][at::of])
        return self.mine


class WorkersAsRanks(_Stream):
    """Both are counted, but as if there were ranks + workers readers."""

    def __iter__(self):
        worker = get_worker_info()
        at, of = (worker.id, worker.num_workers) if worker else (0, 0)
        return iter(self.order[self.rank + at :: self.ranks + of])


# build: epoch_seconds(form, samples, record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read)


def _cost(opens=None, size=None, combine=lambda a, b: a + b):
    def epoch_seconds(form, samples, record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read):
        files = samples if form == "files" else math.ceil(samples / per_shard)
        stored = samples * record_bytes
        if form == "tar":
            stored = samples * (512 + math.ceil(record_bytes / 512) * 512)
        if form == "parquet":
            stored *= columns_read
        files = opens(form, samples, per_shard) if opens else files
        stored = size(form, samples, record_bytes, columns_read, stored) if size else stored
        return combine(files / opens_a_second, stored / bytes_a_second)

    return epoch_seconds


def _shards(rounded):
    return lambda form, samples, per_shard: samples if form == "files" else rounded(samples / per_shard)


def _cost_of_multiplied_opens(form, samples, record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read):
    rest = samples, record_bytes, per_shard, 1 / opens_a_second, bytes_a_second, columns_read
    return _cost()(form, *rest)


def _cost_of_one_sample(form, samples, *rest):
    return _cost()(form, samples, *rest) / samples


def _cost_of_archives(form, samples, record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read):
    rest = record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read
    more = 1024 * math.ceil(samples / per_shard) / bytes_a_second if form == "tar" else 0
    return _cost()(form, samples, *rest) + more


def _cost_of_whole_shards(form, samples, record_bytes, per_shard, *rest):
    return _cost()(
        form, samples if form == "files" else math.ceil(samples / per_shard) * per_shard, record_bytes, per_shard, *rest
    )


def _no_cost(form, samples, record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read): ...


NAMED = {
    "format-budget": {
        "free opens": (_cost(opens=lambda *_: 0), "no-opens"),
        "free bytes": (_cost(size=lambda *_: 0), "no-bytes"),
        "an open a sample": (_cost(opens=lambda form, samples, _: samples), "opens-of-samples"),
        "shards rounded down": (_cost(opens=_shards(math.floor)), "shards-rounded-down"),
        "files in shards": (_cost(opens=lambda _, samples, per: math.ceil(samples / per)), "files-in-shards"),
        "half a shard": (_cost(opens=_shards(float)), "shards-not-whole"),
        "the larger of two": (_cost(combine=max), "larger-of-two"),
        "tar without headers": (_cost(size=lambda f, n, b, c, s: n * b if f == "tar" else s), "no-headers"),
        "tar without padding": (_cost(size=lambda f, n, b, c, s: n * (b + 512) if f == "tar" else s), "no-padding"),
        "parquet reads all": (_cost(size=lambda f, n, b, c, s: n * b if f == "parquet" else s), "all-columns"),
        "columns everywhere": (_cost(size=lambda f, n, b, c, s: s if f == "parquet" else s * c), "columns-everywhere"),
        "rounded": (_cost(combine=lambda a, b: round(a + b, 3)), "rounded"),
        "whole seconds": (_cost(combine=lambda a, b: int(a + b)), "rounded"),
        "a shard too many": (_cost(opens=lambda f, n, per: n if f == "files" else n // per + 1), "a-shard-too-many"),
        "a block too many": (
            _cost(size=lambda f, n, b, c, s: n * (b // 512 + 2) * 512 if f == "tar" else s),
            "a-block-too-many",
        ),
        "opens multiplied": (_cost_of_multiplied_opens, "opens-multiplied"),
        "in milliseconds": (_cost(combine=lambda a, b: 1000 * (a + b)), "milliseconds"),
        "one open": (_cost(opens=lambda *_: 1), "one-file"),
        "tar is one file": (
            _cost(opens=lambda f, n, per: n if f == "files" else 1 if f == "tar" else -(-n // per)),
            "one-file",
        ),
        "of one sample": (_cost_of_one_sample, "of-one-sample"),
        "columns divided": (_cost(size=lambda f, n, b, c, s: n * b / c if f == "parquet" else s), "columns-divided"),
        "whole shards": (_cost_of_whole_shards, "whole-shards"),
        "two blocks at the end": (_cost_of_archives, "end-of-archive"),
        "tar takes twice": (_cost(size=lambda f, n, b, c, s: 2 * s if f == "tar" else s), "other-cost"),
        "no number": (_no_cost, "type"),
    },
}


WRONG = {
    "shard-fix": {
        as_it_was: "own-order",
        shuffles_for_itself: "own-order",
        broadcasts_too_late: "own-order",
        cuts_off_the_rest: "lost",
        rest_to_the_last: "uneven",
        pads_like_a_distributed_sampler: "overlap",
        one_too_many: "overlap",
        shares_nothing: "all-on-every-rank",
        from_one_on: "strange-samples",
        never_random: "never-shuffled",
        the_same_seed_each_time: "never-shuffled",
        begins_too_late: "lost-on-the-way",
        three_ranks: "other-size",
        how_many: "type",
    },
    "twice-fix": {
        EveryWorkerAll: "every-worker-reads-all",
        WithoutWorkersNone: "without-workers",
        TwoWorkers: "workers-written-in",
        BeginsElsewhere: "workers-overlap",
        ForgetsTheRank: "all-on-every-rank",
        SharesRoundedDown: "lost-on-the-way",
        WorkersAsRanks: "lost-on-the-way",
        Worker0ReadsAll: "workers-idle",
        CutsAgain: "second-epoch",
        UsesItUp: "second-epoch",
    },
}
