"""Lesson 09: each sample exactly once, whoever reads it; the cost of a format."""

import math
import warnings

from dtlib.lab.checks.exercise import Exercise, Wrong

# --- samples of a rank: my_samples(order, rank, ranks) --------------------------------------------

SPLITS = ((12, 3), (10, 3), (7, 4), (2, 3), (103, 4), (5, 1))  # samples, ranks
_FIRST = 500  # the numbers of the orders: no answer shall take places for numbers


def order_of(samples: int) -> list[int]:
    """A fixed order: 7 has no factor in common with these numbers of samples, but for 7 itself."""
    step = 5 if samples % 7 == 0 else 7
    return [_FIRST + step * at % samples for at in range(samples)]


def observe_split(my_samples, comm):
    return [
        [numbers_of(my_samples(order_of(samples), rank, ranks)) for rank in range(ranks)] for samples, ranks in SPLITS
    ]


def numbers_of(values):
    """A list of whole numbers, or text where it is none."""
    try:
        return [int(value) for value in values]
    except (TypeError, ValueError):
        return f"{values!r:.60}"


def judge_split(observations) -> None:
    """Together the ranks have every sample of the order once, and none has two more than another."""
    for (samples, ranks), of_ranks in zip(SPLITS, observations[0], strict=True):
        case = f"{samples} samples on {ranks} ranks"
        for rank, mine in enumerate(of_ranks):
            if isinstance(mine, str):
                raise Wrong("type", rank, "a list of this rank's sample numbers", mine, "Return a slice of order.")
        _once(of_ranks, order_of(samples), case, ranks)
        sizes = [len(mine) for mine in of_ranks]
        if max(sizes) - min(sizes) > 1:
            raise Wrong(
                "uneven", sizes.index(max(sizes)), f"{case}: sizes that differ by one at most", f"{sizes}",
                "All ranks wait for the one that has most.", "order[rank::ranks] deals samples like cards.",
            )  # fmt: skip


def _once(of_ranks, order, case, ranks) -> None:
    seen = [number for mine in of_ranks for number in mine]
    if strange := sorted(set(seen) - set(order)):
        raise Wrong(
            "strange-samples", None, f"{case}: numbers of the order alone", f"{strange[:5]}",
            "order holds the numbers of samples: return some of them, not their places.",
        )  # fmt: skip
    if twice := sorted({number for number in seen if seen.count(number) > 1}):
        if len(seen) == ranks * len(order):
            raise Wrong(
                "all-on-every-rank", None, f"{case}: each once", f"all of them on each of {ranks} ranks",
                "Nothing was shared out: use rank and ranks.",
            )  # fmt: skip
        who = [rank for rank, mine in enumerate(of_ranks) if twice[0] in mine]
        raise Wrong(
            "overlap", None, f"{case}: each once", f"sample {twice[0]} on ranks {who}",
            "Some libraries repeat samples so that all ranks have as many. Here none comes twice.",
            "order[rank::ranks] deals samples like cards.",
        )  # fmt: skip
    if lost := sorted(set(order) - set(seen)):
        raise Wrong(
            "lost", None, f"{case}: all of them", f"{len(lost)} are on no rank: {lost[:5]}",
            "Does somebody take what is left where samples cannot be divided by readers? // cuts it off.",
            "order[rank::ranks] deals samples like cards.",
        )  # fmt: skip


# --- a loader that reads twice: Stream(order, rank, ranks), an IterableDataset -------------------

STREAMS = ((20, 1, 0), (20, 1, 2), (21, 2, 3), (11, 2, 0))  # samples, ranks, workers


def observe_stream(Stream, comm):
    from multiprocessing import get_all_start_methods

    from torch.utils.data import DataLoader, IterableDataset

    if not (isinstance(Stream, type) and issubclass(Stream, IterableDataset)):
        return f"{Stream!r:.60}"
    fork = "fork" if "fork" in get_all_start_methods() else None
    seen = []
    for samples, ranks, workers in STREAMS:
        streams = [Stream(order_of(samples), rank, ranks) for rank in range(ranks)]
        settings = {"batch_size": None, "num_workers": workers, "multiprocessing_context": fork if workers else None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are more workers than cores
            seen.append([[int(number) for number in DataLoader(stream, **settings)] for stream in streams])
    return seen


def judge_stream(observations) -> None:
    """With any number of ranks and workers each sample comes once."""
    if isinstance(observations[0], str):
        raise Wrong(
            "type", None, "a class, a kind of IterableDataset", observations[0], "class Stream(IterableDataset):"
        )
    for (samples, ranks, workers), of_ranks in zip(STREAMS, observations[0], strict=True):
        case, order = f"{samples} samples, {ranks} ranks, {workers} workers each", order_of(samples)
        seen = [number for mine in of_ranks for number in mine]
        most = max(seen.count(number) for number in order)
        if workers and most == workers and len(seen) == workers * samples:
            raise Wrong(
                "every-worker-reads-all", None, f"{case}: each sample once", f"each {workers} times",
                "Every worker has a copy of the data set: how does it know which one it is?",
                "get_worker_info() tells id and num_workers; without workers it is None.",
            )  # fmt: skip
        everywhere = all(sorted(mine) == sorted(order) for mine in of_ranks)
        if workers and most > 1 and not everywhere:
            twice = next(number for number in order if seen.count(number) > 1)
            raise Wrong(
                "workers-overlap", None, f"{case}: each sample once", f"sample {twice} {seen.count(twice)} times",
                "Workers begin at different places but walk on over each other's samples, or ranks share some.",
                "Reader rank * num_workers + id of ranks * num_workers takes every (ranks * num_workers)-th sample.",
            )  # fmt: skip
        _once(of_ranks, order, case, ranks)


# --- the seconds of an epoch: epoch_seconds(form, samples, record_bytes, ...) ----------------------

BUDGETS = (  # samples, record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read
    (1000, 2500, 100, 500.0, 1e6, 1.0), (1001, 100_000, 64, 2000.0, 1e9, 0.25), (10, 1024, 4, 10.0, 1e5, 0.1),
)  # fmt: skip
FORMS = ("files", "shards", "tar", "parquet")


def cost(*arguments) -> float:
    return sum(opening_and_reading(*arguments))


def opening_and_reading(form, samples, record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read):
    """Seconds of each."""
    files = samples if form == "files" else math.ceil(samples / per_shard)
    size = samples * record_bytes
    if form == "tar":
        size = samples * (512 + math.ceil(record_bytes / 512) * 512)
    if form == "parquet":
        size *= columns_read
    return files / opens_a_second, size / bytes_a_second


def observe_cost(epoch_seconds, comm):
    return [
        [(form, _number(epoch_seconds(form, *budget))) for form in FORMS] for budget in BUDGETS
    ]  # fmt: skip


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return f"{value!r:.60}"


def judge_cost(observations) -> None:
    """Opens and bytes, each over what can be had in a second, added up."""
    times = [
        (came, form, budget)
        for budget, of_forms in zip(BUDGETS, observations[0], strict=True)
        for form, came in of_forms
    ]
    if all(came == max(opening_and_reading(form, *budget)) for came, form, budget in times):
        raise Wrong(
            "larger-of-two", None, "opening and reading, added up", "the larger of the two",
            "Here a file is opened, then read: the times add up.",
        )  # fmt: skip
    for budget, of_forms in zip(BUDGETS, observations[0], strict=True):
        samples, record_bytes, per_shard, opens, speed, fraction = budget
        case = (
            f"{samples} samples of {record_bytes} bytes, {per_shard} a shard, {opens:g} opens/s, {speed:g} bytes/s, "
            f"{fraction:g} of the columns"
        )
        for form, came in of_forms:
            wanted = cost(form, *budget)
            expected = f"{wanted:.6g} s for {form}: {case}"
            if isinstance(came, str):
                raise Wrong("type", None, expected, came, "Return a number of seconds.")
            if math.isclose(came, wanted, rel_tol=1e-9):
                continue
            size = samples * record_bytes
            files = samples if form == "files" else math.ceil(samples / per_shard)
            plain = files / opens + size / speed
            mistakes = [
                (wanted - files / opens, "no-opens", "Opening files takes time as well: files / opens_a_second."),
                (files / opens, "no-bytes", "The bytes have to come, too: bytes / bytes_a_second."),
                (samples / opens + wanted - files / opens, "opens-of-samples",
                 "A shard is opened once, not once for each of its samples."),
                (samples // per_shard / opens + wanted - files / opens, "shards-rounded-down",
                 "The last shard may have few samples, but it is a file: round up."),
                (samples / per_shard / opens + wanted - files / opens, "shards-not-whole",
                 "There is no half of a file: round up."),
            ]  # fmt: skip
            if form == "tar":
                mistakes += [
                    (plain, "no-headers", "In a tar file 512 bytes stand before each record."),
                    (plain + 512 * samples / speed, "no-padding", "Records in a tar file take whole blocks of 512."),
                ]
            if form == "parquet":
                mistakes += [(plain, "all-columns", "From Parquet only the columns that are asked for are read.")]
            elif fraction < 1:
                mistakes += [
                    (files / opens + (wanted - files / opens) * fraction, "columns-everywhere",
                     "Whoever stores records whole reads them whole: only Parquet can leave columns out.")
                ]  # fmt: skip
            for value, mistake, hint in mistakes:
                if math.isclose(came, value, rel_tol=1e-9):
                    raise Wrong(mistake, None, expected, f"{came:.6g} s", hint)
            raise Wrong(
                "other-cost", None, expected, f"{came:.6g} s", "files / opens_a_second + bytes / bytes_a_second.",
                "Files: as many as samples, or samples / per_shard rounded up. Bytes: see the list in the text.",
            )  # fmt: skip


EXERCISES = {
    "shard-mend": Exercise("my_samples", observe_split, judge_split, needs_ranks=False),
    "twice-mend": Exercise("Stream", observe_stream, judge_stream, needs_ranks=False),
    "format-budget": Exercise("epoch_seconds", observe_cost, judge_cost, needs_ranks=False),
}
