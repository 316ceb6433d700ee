"""Lesson 09: checks that ranks and workers read each sample exactly once."""

import warnings

from dtlib.lab.checks.equality import whole_numbers
from dtlib.lab.checks.exercise import Exercise, Wrong, rows

# --- Samples of a rank: my_samples(comm, count) ---------------------------------------------------

COUNTS = (12, 10, 103, 2, 0)
_FIRST = 500  # first sample number, so that answers that return positions instead of numbers are detected


def order_of(samples: int) -> list[int]:
    """Return a fixed permutation, as numbers with gaps.

    Multiplication by 7, or by 5 if 7 divides the number of samples, is a permutation. With gaps, an answer that splits
    samples by the remainder of their numbers splits them unevenly.
    """
    step = 5 if samples % 7 == 0 else 7
    return [_FIRST + 6 * (step * at % samples) for at in range(samples)]


def observe_split(my_samples, comm):
    """Return this rank's samples for several counts; each rank has another random seed."""
    import random

    import torch

    torch.manual_seed(100 + comm.rank)
    random.seed(100 + comm.rank)
    seen = [whole_numbers(my_samples(comm, count)) for count in COUNTS]
    return seen, whole_numbers(my_samples(comm, COUNTS[2]))


def judge_split(observations) -> None:
    """Check that ranks read each sample once, in equal parts, and in another order in the next epoch."""
    ranks = len(observations)
    for which, count in enumerate(COUNTS):
        case, of_ranks = f"{count} samples on {ranks} ranks", [seen[which] for seen, _ in observations]
        for rank, mine in enumerate(of_ranks):
            if isinstance(mine, str):
                raise Wrong("type", rank, "a list of sample numbers", mine, "Return a part of the order.", DEAL)
        _judge_orders(of_ranks, count, case, ranks)
        _once(of_ranks, list(range(count)), case, ranks)
        sizes = [len(mine) for mine in of_ranks]
        if max(sizes) - min(sizes) > 1:
            raise Wrong("uneven", sizes.index(max(sizes)), f"{case}: sizes that differ by at most one", f"{sizes}",
                        "All ranks wait for the rank with the most samples. How even are your parts?", DEAL)
    for rank, (seen, again) in enumerate(observations):
        wrong = rows(rank, "another order in the next epoch")
        wrong("never-shuffled", seen[2] == again, "the same order", "What should be random?",
              "torch.randperm on rank 0")


DEAL = "order[comm.rank :: comm.size] deals the samples like cards."
_SAME = "dist.broadcast(order, group_src=0, group=comm.group), before ranks take their parts"


def _judge_orders(of_ranks, count, case, ranks) -> None:
    """Recognise ranks that take parts of different orders: some samples are read twice, others never."""
    seen = [number for mine in of_ranks for number in mine]
    twice, lost = len(seen) - len(set(seen)), count - len(set(seen))
    if ranks > 1 and twice and lost and len(seen) <= count and not set(seen) - set(range(count)):
        raise Wrong("own-order", None, f"{case}: each once", f"{twice} occur twice, {lost} are on no rank",
                    "Each rank selects a part of an order. Is the order the same on all ranks?", _SAME)
    if not twice and count % ranks and [len(mine) for mine in of_ranks] == [count // ranks] * ranks:
        raise Wrong("lost", None, f"{case}: all of them", f"{lost} are on no rank",
                    "Which rank gets the rest if the samples do not divide by the ranks? // drops it.", DEAL)


def _once(of_ranks, order, case, ranks, cure=DEAL) -> None:
    seen = [number for mine in of_ranks for number in mine]
    wrong = rows(None)
    if strange := sorted(set(seen) - set(order)):
        wrong("strange-samples", True, f"{case}: only numbers of the order", f"{strange[:5]}",
              "Are all returned numbers sample numbers in the valid range?", cure)
    if twice := sorted({number for number in seen if seen.count(number) > 1}):
        wrong("all-on-every-rank", len(seen) == ranks * len(order), f"{case}: each once",
              f"all samples on each of {ranks} ranks", "Nothing is divided. Which part should each rank select?", cure)
        who = [rank for rank, mine in enumerate(of_ranks) if twice[0] in mine]
        wrong("overlap", True, f"{case}: each once", f"sample {twice[0]} on ranks {who}",
              "Where do parts begin and end? Do you repeat samples to make them equal?", cure)
    lost = [number for number in order if number not in seen]
    wrong("lost", lost and lost == order[-len(lost) :] and len(lost) < ranks, f"{case}: all of them",
          f"{len(lost)} are on no rank, the last of the order: {lost[:5]}",
          "Does a reader get the rest if the samples do not divide by the readers? // drops it.", cure)
    if lost:
        places = [order.index(number) for number in lost]
        wrong("lost-on-the-way", True, f"{case}: all of them",
              f"{len(lost)} are on no rank: positions {', '.join(map(str, places[:5]))} of the order",
              "At which position does each reader start, what is its step, and where does it end?", cure)


# --- A loader that reads twice: Stream(order, rank, ranks), an IterableDataset -------------------

STREAMS = ((20, 1, 0), (20, 1, 2), (21, 2, 3), (11, 2, 0))  # (samples, ranks, workers)


def observe_stream(Stream, comm):
    """Return the samples of two epochs for several numbers of ranks and workers, with the worker's number."""
    from multiprocessing import get_all_start_methods

    from torch.utils.data import DataLoader, IterableDataset

    if not (isinstance(Stream, type) and issubclass(Stream, IterableDataset)):
        return f"{Stream!r:.60}"
    fork = "fork" if "fork" in get_all_start_methods() else None
    seen = []
    for samples, ranks, workers in STREAMS:
        streams = [Stream(order_of(samples), rank, ranks) for rank in range(ranks)]
        settings = {"batch_size": None, "num_workers": workers, "multiprocessing_context": fork if workers else None}
        settings |= {"collate_fn": _with_worker, "persistent_workers": workers > 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about more workers than cores
            loaders = [DataLoader(stream, **settings) for stream in streams]
            try:
                seen.append([[_epoch(loader) for _ in range(2)] for loader in loaders])
            except AttributeError as error:
                if workers or "'NoneType'" not in f"{error}":
                    raise
                return {"without workers": f"{error}"}
    return seen


def _with_worker(number) -> tuple:
    """Return (number of the worker, sample)."""
    from torch.utils.data import get_worker_info

    return (info.id if (info := get_worker_info()) else 0), int(number)


def _epoch(loader) -> list:
    try:
        return list(loader)
    except Exception as error:
        if "DataLoader worker" not in f"{error}":
            raise
        said = f"{error}".strip().splitlines()[-1].partition(": ")[2]
        raise type(error)(f"{said} (in a worker)") from error  # without the worker's traceback


def judge_stream(observations) -> None:
    """Check that each sample is read once per epoch, and that all workers read, for any number of workers."""
    wrong = rows(None)
    wrong("type", isinstance(observations[0], str), "a class, a kind of IterableDataset", observations[0],
          "class Stream(IterableDataset):", "Pass the class itself, not an object of it.")
    if isinstance(observations[0], dict):
        wrong("without-workers", True, "a DataLoader with num_workers=0: this rank's samples",
              observations[0]["without workers"],
              "Without workers get_worker_info() returns None. Which samples does this process read then?",
              f"If it is None, order[rank::ranks]. Otherwise {SHARE.removeprefix('mine = ')}")
    for (samples, ranks, workers), of_ranks in zip(STREAMS, observations[0], strict=True):
        case = f"{samples} samples, {ranks} rank{'s' * (ranks > 1)}, {workers} workers each"
        _judge_epoch(case, samples, ranks, workers, [[n for _, n in first] for first, _ in of_ranks])
        for rank, (first, second) in enumerate(of_ranks):
            _judge_workers(case, workers, rank, [worker for worker, _ in first])
            if sorted(n for _, n in second) != sorted(n for _, n in first):
                raise Wrong("second-epoch", rank, f"{case}: the same {len(first)} samples in the second epoch",
                            f"{len(second)} samples in it",
                            "__iter__ is called once per epoch. What does the first call change in self?",
                            "Use a local name: mine = self.order[...]; self.order stays complete.")


def _judge_workers(case: str, workers: int, rank: int, who: list) -> None:
    counts = [who.count(worker) for worker in range(workers)]
    if workers > 1 and max(counts) > -(-len(who) // workers) + 1:
        raise Wrong("workers-idle", rank, f"{case}: workers that read about {len(who) / workers:.0f} samples each",
                    f"they read {', '.join(map(str, counts))}",
                    "Each sample is read once, but as slowly as without workers. What do the other workers do?", SHARE)


SHARE = "mine = order[rank::ranks], and of this part mine[worker.id :: worker.num_workers]."


def _judge_epoch(case: str, samples: int, ranks: int, workers: int, of_ranks) -> None:
    order = order_of(samples)
    seen = [number for mine in of_ranks for number in mine]
    most = max(seen.count(number) for number in order)
    wrong = rows(None)
    wrong("every-worker-reads-all", workers and most == workers and len(seen) == workers * samples,
          f"{case}: each sample once", f"each {workers} times",
          "Every worker has a copy of the data set. How does a worker know its number?",
          "get_worker_info() has id and num_workers: call it in __iter__, which runs in the worker.")
    for written in range(2, workers):
        parts = [
            [number for worker in range(workers) for number in order[rank::ranks][worker::written]]
            for rank in range(ranks)
        ]
        wrong("workers-written-in",
              all(sorted(mine) == sorted(part) for mine, part in zip(of_ranks, parts, strict=True)),
              f"{case}: each sample once", f"the right result for {written} workers",
              f"Does your code contain the number {written}?", SHARE)
    everywhere = all(sorted(mine) == sorted(order) for mine in of_ranks)
    if workers and most > 1 and not everywhere:
        twice = next(number for number in order if seen.count(number) > 1)
        wrong("workers-overlap", True, f"{case}: each sample once", f"sample {twice} {seen.count(twice)} times",
              "Do workers read the samples of others, does each have its own order, or do ranks overlap?", SHARE)
    _once(of_ranks, order, case, ranks, SHARE)


EXERCISES = {
    "shard-fix": Exercise("my_samples", observe_split, judge_split, any_size=True),
    "twice-fix": Exercise("Stream", observe_stream, judge_stream, needs_ranks=False),
}
