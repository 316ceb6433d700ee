"""Plausible wrong answers to lesson 09, and the mistake that the check must recognise in each."""

import math

from torch.utils.data import IterableDataset, get_worker_info

# mend: my_samples(order, rank, ranks)


def cuts_off_the_rest(order, rank, ranks):
    """The planted bug."""
    each = len(order) // ranks
    return order[rank * each : (rank + 1) * each]


def rest_to_the_last(order, rank, ranks):
    each = len(order) // ranks
    return order[rank * each : None if rank == ranks - 1 else (rank + 1) * each]


def pads_like_a_distributed_sampler(order, rank, ranks):
    each = math.ceil(len(order) / ranks)
    padded = (list(order) * 2)[: each * ranks]
    return padded[rank::ranks]


def one_too_many(order, rank, ranks):
    each = math.ceil(len(order) / ranks)
    return order[rank * each : (rank + 1) * each + 1]


def shares_nothing(order, rank, ranks):
    return order


def places_not_numbers(order, rank, ranks):
    return list(range(rank, len(order), ranks))


def how_many(order, rank, ranks):
    return len(order) // ranks


# mend: Stream(order, rank, ranks)


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


class BeginsElsewhere(_Stream):
    def __iter__(self):
        worker = get_worker_info()
        mine = self.order[self.rank :: self.ranks]
        return iter(mine if worker is None else mine[worker.id :])


class ForgetsTheRank(_Stream):
    def __iter__(self):
        worker = get_worker_info()
        return iter(self.order if worker is None else self.order[worker.id :: worker.num_workers])


class OnlyTheFirstWorker(_Stream):
    """Nothing comes twice, and most of it not at all: the others skip what nobody else takes."""

    def __iter__(self):
        worker = get_worker_info()
        mine = self.order[self.rank :: self.ranks]
        each = len(mine) // (worker.num_workers if worker else 1)
        at = worker.id if worker else 0
        return iter(mine[at * each : (at + 1) * each])


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


COSTS = {
    "free opens": (_cost(opens=lambda *_: 0), "no-opens"),
    "free bytes": (_cost(size=lambda *_: 0), "no-bytes"),
    "an open a sample": (_cost(opens=lambda form, samples, _: samples), "opens-of-samples"),
    "shards rounded down": (_cost(opens=_shards(math.floor)), "shards-rounded-down"),
    "half a shard": (_cost(opens=_shards(float)), "shards-not-whole"),
    "the larger of two": (_cost(combine=max), "larger-of-two"),
    "tar without headers": (_cost(size=lambda f, n, b, c, s: n * b if f == "tar" else s), "no-headers"),
    "tar without padding": (_cost(size=lambda f, n, b, c, s: n * (b + 512) if f == "tar" else s), "no-padding"),
    "parquet reads all": (_cost(size=lambda f, n, b, c, s: n * b if f == "parquet" else s), "all-columns"),
    "columns everywhere": (_cost(size=lambda f, n, b, c, s: s if f == "parquet" else s * c), "columns-everywhere"),
    "in milliseconds": (_cost(combine=lambda a, b: 1000 * (a + b)), "other-cost"),
    "no number": (lambda *_: None, "type"),
}

# build: Epoch(order, batch_size, rank, ranks)


class Right:
    """What the others differ from in one thing."""

    def __init__(self, order, batch_size, rank, ranks):
        self.order, self.batch_size, self.rank, self.ranks, self.taken = order, batch_size, rank, ranks, 0

    def step(self):
        return self.batch_size * self.ranks

    def batch(self):
        return self.order[self.taken : self.taken + self.step()][self.rank :: self.ranks]

    def __iter__(self):
        while self.taken < len(self.order):
            batch = self.batch()
            self.taken = min(self.taken + self.step(), len(self.order))
            yield batch

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class CountsBatches(Right):
    """A batch of three ranks is not one of two."""

    def state_dict(self):
        return {"batches": -(-self.taken // self.step())}

    def load_state_dict(self, state):
        self.taken = state["batches"] * self.step()


class CountsItsOwnSamples(Right):
    def state_dict(self):
        return {"samples": self.taken // self.ranks}

    def load_state_dict(self, state):
        self.taken = state["samples"] * self.ranks


class CountsBehindTheYield(Right):
    def __iter__(self):
        while self.taken < len(self.order):
            yield self.batch()
            self.taken = min(self.taken + self.step(), len(self.order))


class ForgetsWhatWasLoaded(Right):
    """Right once: then it counts from the last resume."""

    since = 0

    def load_state_dict(self, state):
        self.taken = self.since = state["taken"]

    def state_dict(self):
        return {"taken": self.taken - self.since}


class NeverLoads(Right):
    def load_state_dict(self, state):
        pass


class SavesItsOwnRest(Right):
    def state_dict(self):
        return {"rest": self.order[self.taken :][self.rank :: self.ranks]}

    def load_state_dict(self, state):
        self.order = state["rest"]


class DropsTheLast(Right):
    def __iter__(self):
        while self.taken + self.step() <= len(self.order):
            batch = self.batch()
            self.taken += self.step()
            yield batch


class ReadsAhead(Right):
    """What was prepared counts, though nobody has had it."""

    def __iter__(self):
        ahead = []
        while self.taken < len(self.order) or ahead:
            while self.taken < len(self.order) and len(ahead) < 3:
                ahead.append(self.batch())
                self.taken = min(self.taken + self.step(), len(self.order))
            yield ahead.pop(0)


class AllOnEveryRank(Right):
    def batch(self):
        return self.order[self.taken : self.taken + self.batch_size]


class TakesTheWholeStep(Right):
    def batch(self):
        return self.order[self.taken : self.taken + self.step()]


class SavesAnArray(Right):
    def state_dict(self):
        return {"taken": {self.taken}}


class YieldsNumbers(Right):
    def batch(self):
        return self.taken


WRONG = {
    "shard-mend": {
        cuts_off_the_rest: "lost",
        rest_to_the_last: "uneven",
        pads_like_a_distributed_sampler: "overlap",
        one_too_many: "overlap",
        shares_nothing: "all-on-every-rank",
        places_not_numbers: "strange-samples",
        how_many: "type",
    },
    "twice-mend": {
        EveryWorkerAll: "every-worker-reads-all",
        WithoutWorkersNone: "raised",
        BeginsElsewhere: "workers-overlap",
        ForgetsTheRank: "all-on-every-rank",
        OnlyTheFirstWorker: "lost",
        WorkersAsRanks: "lost",
    },
    "resume-build": {
        CountsBatches: "other-ranks",
        CountsItsOwnSamples: "other-ranks",
        CountsBehindTheYield: "batch-in-hand",
        ForgetsWhatWasLoaded: "second-resume",
        NeverLoads: "from-the-start",
        SavesItsOwnRest: "states-differ",
        DropsTheLast: "lost",
        ReadsAhead: "lost",
        AllOnEveryRank: "overlap",
        TakesTheWholeStep: "batch-size",
        SavesAnArray: "no-json",
        YieldsNumbers: "type",
    },
}
