"""Workloads of MLPerf Storage: the bytes that a model reads per step and its compute time; scaled to a laptop.

The published table is ``data/mlperf_storage_workloads.csv``. A workload needs batch * record / step time in bytes/s.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike

import numpy as np

# Bytes of a record that training reads, if it does not read all. dlrm_b200.yaml of mlcommons/storage@0b42eb5 marks 40
# of 200 columns, of 4 bytes each, with ``read: true``.
READ = {"dlrm": 160}


@dataclass(frozen=True)
class Workload:
    """One workload.

    ``record_bytes`` is the mean size of a sample, ``batch`` the samples per step, and ``compute_seconds`` the time of a
    step. ``least_au`` is the lowest accelerator utilisation that the benchmark accepts, and ``scale`` says how the
    workload was scaled.
    """

    name: str
    accelerator: str
    form: str
    samples: int
    record_bytes: int
    batch: int
    compute_seconds: float
    least_au: float | None
    scale: str = "as published"

    @property
    def bytes_a_second(self) -> float:
        """The bytes that storage has to deliver each second so that the accelerator never waits."""
        return self.batch * READ.get(self.name, self.record_bytes) / self.compute_seconds

    @property
    def dtype(self) -> np.dtype:
        """The dtype of a record: one field ``data`` of bytes."""
        return np.dtype([("data", "u1", (self.record_bytes,))])

    def records(self, seed: int = 0) -> Iterator[bytes]:
        """Yield ``samples`` records of random bytes, which no file system can compress."""
        random = np.random.default_rng(seed)
        return (random.bytes(self.record_bytes) for _ in range(self.samples))

    def scaled(self, samples: int, record_bytes: int, batch: int, compute_seconds: float) -> "Workload":
        """Return the workload with these smaller sizes; its ``scale`` lists the factors."""
        sizes = {"samples": samples, "record_bytes": record_bytes, "batch": batch, "compute_seconds": compute_seconds}
        factors = {name: float(f"{getattr(self, name) / value:.3g}") for name, value in sizes.items()}
        said = (f"{name} / {factor:{',.0f' if factor >= 1000 else 'g'}}" for name, factor in factors.items())
        scale = "SCALED: " + ", ".join(said)
        return replace(
            self, samples=samples, record_bytes=record_bytes, batch=batch, compute_seconds=compute_seconds, scale=scale
        )


def published(file: str | PathLike[str]) -> list[Workload]:
    """Return the rows of the published table in ``file``."""
    with open(file, newline="") as opened:
        return [
            Workload(
                row["workload"], row["accelerator"], row["format"], int(row["files"]) * int(row["samples_per_file"]),
                round(float(row["record_bytes"])), int(row["batch"]), float(row["compute_s_per_step"]),
                float(row["min_AU"]) if row["min_AU"] else None,
            )
            for row in csv.DictReader(opened)
        ]  # fmt: skip


def named(file: str | PathLike[str], name: str, accelerator: str) -> Workload:
    """Return the row of workload ``name`` on ``accelerator``."""
    return next(row for row in published(file) if (row.name, row.accelerator) == (name, accelerator))
