"""Lesson 09: check of a cost model for file formats, in seconds per epoch."""

import math

from dtlib.lab.checks.equality import number, rounded
from dtlib.lab.checks.exercise import Exercise, Wrong, rows

BUDGETS = (  # (samples, record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read)
    (1000, 2500, 100, 500.0, 1e6, 1.0), (1001, 100_000, 64, 2000.0, 1e9, 0.25), (10, 1024, 4, 10.0, 1e5, 0.1),
)
FORMS = ("files", "shards", "tar", "parquet")


def cost(*arguments) -> float:
    """Return the seconds of an epoch."""
    return sum(opening_and_reading(*arguments))


def opening_and_reading(form, samples, record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read):
    """Return the seconds for opening files, and for reading bytes."""
    files = samples if form == "files" else math.ceil(samples / per_shard)
    size = samples * record_bytes
    if form == "tar":
        size = samples * (512 + math.ceil(record_bytes / 512) * 512)
    if form == "parquet":
        size *= columns_read
    return files / opens_a_second, size / bytes_a_second


def observe_cost(epoch_seconds, comm):
    """Return the result for each budget and format."""
    return [[(form, number(epoch_seconds(form, *budget))) for form in FORMS] for budget in BUDGETS]


FORMULA = "files / opens_a_second + bytes / bytes_a_second"
FILES = 'samples, if form == "files"; else math.ceil(samples / per_shard)'
OF_FILES = "files-in-shards", "opens-of-samples", "shards-rounded-down", "shards-not-whole", "a-shard-too-many"


def judge_cost(observations) -> None:
    """Check that the cost is opens / (opens per second) + bytes / (bytes per second)."""
    times = [
        (got, form, budget) for budget, of_forms in zip(BUDGETS, observations[0], strict=True) for form, got in of_forms
    ]
    if all(got == max(opening_and_reading(form, *budget)) for got, form, budget in times):
        raise Wrong("larger-of-two", None, "opening and reading, added up", "the larger of the two",
                    "Here each file is first opened, then read. How do the two times combine?", FORMULA)
    for budget, of_forms in zip(BUDGETS, observations[0], strict=True):
        samples, record_bytes, per_shard, opens, speed, fraction = budget
        case = (
            f"{samples} samples of {record_bytes} bytes, {per_shard} a shard, {opens:g} opens/s, {speed:g} bytes/s, "
            f"columns_read {fraction:g}"
        )
        for form, got in of_forms:
            wanted = cost(form, *budget)
            wrong = rows(None, f"{wanted:.6g} s for {form}: {case}")
            wrong("type", isinstance(got, str), got, "Return a number of seconds.", f"return {FORMULA}")
            if math.isclose(got, wanted, rel_tol=1e-9):
                continue
            size = samples * record_bytes
            files = samples if form == "files" else math.ceil(samples / per_shard)
            plain = files / opens + size / speed
            mistakes = [
                (wanted - files / opens, "no-opens", "Opening files needs time too: files / opens_a_second."),
                (files / opens, "no-bytes", "Reading the bytes needs time too: bytes / bytes_a_second."),
                (samples / opens + wanted - files / opens, "opens-of-samples",
                 "A shard is opened once, and not once for each of its samples."),
                (samples // per_shard / opens + wanted - files / opens, "shards-rounded-down",
                 "The last shard may have few samples, but it is a file too: round up."),
                (samples / per_shard / opens + wanted - files / opens, "shards-not-whole",
                 "There are no half files: round up."),
                ((samples // per_shard + 1) / opens + wanted - files / opens, "a-shard-too-many",
                 "1000 samples are 10 shards of 100, and not 11: round up, do not add one."),
                (files * opens + wanted - files / opens, "opens-multiplied",
                 "opens_a_second is a rate. How long does this number of opens take?"),
                (1 / opens + wanted - files / opens, "one-file", f"Each of the {files} files is opened."),
                (1000 * wanted, "milliseconds", "These are milliseconds: return seconds."),
                (wanted / samples, "of-one-sample", "This is the time of one sample. Compute all."),
            ]
            if form == "files":
                mistakes = [(math.ceil(samples / per_shard) / opens + size / speed, "files-in-shards",
                             'Here each sample is a file: per_shard does not apply to "files".'), *mistakes]
            else:
                read = (wanted - files / opens) * files * per_shard / samples
                mistakes += [(files / opens + read, "whole-shards",
                              "The last shard has fewer samples. Do you read samples that do not exist?")]
            if form == "tar":
                mistakes += [
                    (plain, "no-headers", "A tar file has 512 bytes before each record. Do you count them?"),
                    (plain + 512 * samples / speed, "no-padding",
                     "Records in a tar file fill whole blocks of 512 bytes. Do you round up?"),
                    (files / opens + samples * (record_bytes // 512 + 2) * 512 / speed, "a-block-too-many",
                     "A record of 1024 bytes needs two blocks, not three: round up."),
                    (wanted - 512 * samples / speed, "no-headers",
                     "A tar file has 512 bytes before each record. Do you count them?"),
                    (files / opens + (math.ceil(size / 512) * 512 + 512 * samples) / speed, "padded-once",
                     "Each record starts in a new block. Do you round up for each record?"),
                    (files / opens + (size + 512 * files) / speed, "header-a-file",
                     "The 512 bytes are before each record, and not once in a file."),
                    (wanted + 1024 * files / speed, "end-of-archive", "Do not count the end of a tar file."),
                ]
            if form == "parquet":
                mistakes += [
                    (plain, "all-columns", "From Parquet only the requested columns are read."),
                    (files / opens + size / fraction / speed, "columns-divided",
                     "Fewer columns have fewer bytes: multiply by columns_read."),
                ]
            elif fraction < 1:
                mistakes += [(files / opens + (wanted - files / opens) * fraction, "columns-everywhere",
                              "Files with whole records are read completely: only Parquet can skip columns.")]
            for value, mistake, hint in mistakes:
                cure = FILES if mistake in OF_FILES else FORMULA
                wrong(mistake, math.isclose(got, value, rel_tol=1e-9), f"{got:.6g} s", hint, cure)
            if rounded(got, wanted):
                raise Wrong("rounded", None, f"{wanted!r} s for {form}: {case}", f"{got!r} s",
                            "The formula is right, but digits are missing. Do you use round(), int() or //?",
                            "Only numbers of files and of 512-byte blocks are whole. Do not round the seconds.")
            wrong("other-cost", True, f"{got:.6g} s",
                  f"Opening takes {files / opens:.6g} s, and reading {wanted - files / opens:.6g} s. Which differs?",
                  f"{FORMULA}. Files: samples, or samples / per_shard rounded up. Bytes: see the list in the text.")


EXERCISES = {"format-budget": Exercise("epoch_seconds", observe_cost, judge_cost, needs_ranks=False)}
