"""Run ``dtlib train``: on new ranks, or on the ranks that already run this command.

Errors that every rank reports are printed once.
"""

import json
import os
import sys
import warnings
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.files import private_temp_folder, writing
from dtlib.world.launch import forked_ranks, run_ranks, settings_of_mpi

# Environment variable with the path of a file. Rank 0 writes the error on which all ranks agree into this file, and the
# process that started the ranks raises it.
SAYS = "DTLIB_SAYS"
# Seconds that a rank with an error waits for the other ranks to report theirs.
SECONDS = 5


def train(options: Namespace, ranks: int) -> int:
    """Start ``ranks`` ranks with the same arguments, and return the exit status.

    Raises:
        DtlibError: the error that all ranks report, or one for ranks that ended with another status than 0 or 2.
    """
    names = ("config", "runtime", "backend", "stage", "steps", "save", "log", "json")
    given = {name: getattr(options, name) for name in names}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    command = ["-m", "dtlib", "train", options.workload, *flags, *["--resume"] * options.resume]
    # Forked ranks share one import of torch, which takes seconds.
    forked = forked_ranks() if ranks > 1 else nullcontext()
    with private_temp_folder("train") as folder, forked:
        sentence = folder / "sentence"
        status = run_ranks(command, ranks, env={SAYS: str(sentence)})
        if sentence.exists():
            raise DtlibError(sentence.read_text(encoding="utf-8"))
    if status not in (0, 2):
        raise DtlibError(
            f"The ranks ended with status {status} and the output above: run `dtlib doctor` to find the "
            f"cause.{settings_of_mpi()}"
        )
    return status


def train_on_this_rank(options: Namespace) -> int:
    """Train on this rank, print the table on rank 0, and return the exit status."""
    from dtlib.training.run import train as train_here
    from dtlib.world import init

    # Print warnings without the line of source that caused them.
    warnings.formatwarning = lambda message, *_, **__: f"dtlib train: {message}\n"
    comm = init().comm
    # A separate communicator with a short time limit, for `_all_say`: training may leave `comm` with pending
    # operations.
    ending = comm.split(0)
    ending.time_limit = SECONDS
    try:
        if options.json:
            _check_can_be_written(options.json, comm)
        if options.backend and options.runtime != "torch":
            raise DtlibError(f"--backend={options.backend} is for torch.distributed: use it with --runtime=torch.")
        if options.backend == "dtlib":
            import torch

            import dtlib.backend  # noqa: F401  (the import registers the backend)

            torch.distributed.init_process_group("dtlib", init_method="dtlib://")
        result = train_here(
            options.workload, options.config, options.runtime, save=options.save, resume=options.resume,
            log=options.log, stage=options.stage, steps=options.steps,
        )  # fmt: skip
        if comm.rank == 0:
            print(_table(result), flush=True)
        if options.json:
            _write(options.json, result, comm)
    except DtlibError as problem:
        return _all_say(problem, ending)
    return 0


def _check_can_be_written(path, comm) -> None:
    """Refuse a result file that cannot be written, before training starts; check what can be checked by then."""
    from dtlib.training.run import agreed, appended

    def check():
        if comm.rank == 0 and (Path(path).exists() or not os.access(Path(path).absolute().parent, os.W_OK)):
            appended(path).close()

    agreed(comm, check)


def _write(path, result: dict, comm) -> None:
    from dtlib.training.run import agreed

    def write():
        with writing(path, "training is done; the table above has its result"):
            if comm.rank == 0:
                Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    agreed(comm, write)


def _all_say(problem: DtlibError, ending) -> int:
    """Print an error once if every rank has it; if only some ranks have one, end all ranks."""
    try:
        ending.barrier()
    except DtlibError:
        print(f"dtlib train: rank {ending.rank}: {problem}", file=sys.stderr, flush=True)
        # The other ranks have no error and wait in a collective. This exit makes mpiexec end them.
        os._exit(2)
    where = os.environ.get(SAYS)
    if ending.rank == 0 and where:
        Path(where).write_text(str(problem), encoding="utf-8", errors="replace")
    elif ending.rank == 0:
        print(f"dtlib train: {problem}", file=sys.stderr)
    return 0 if where else 2


def _table(result: dict) -> str:
    from tabulate import tabulate

    stages = f", {result['stages']} stages of a pipeline" if result["stages"] > 1 else ""
    tensor = f", {result['tensor']} tensor ranks" if result["tensor"] > 1 else ""
    of = f"{result['workload']}, {result['runtime']}, {result['ranks']} ranks, ZeRO stage {result['stage']}"
    rows = [("run", of + stages + tensor), ("steps", result["steps"]), ("time", f"{result['seconds']:.3g} s")]
    if result["losses"]:
        rows += [("loss", f"{result['losses'][0]:.4f} at first, {result['loss']:.4f} at last")]
        rows += [("samples per second", f"{result['samples_per_second']:,.0f}")]
        rows += [("model states per rank", ", ".join(f"{states / 1e6:.3g} MB" for states in result["bytes_per_rank"]))]
    for name in ("accuracy", "rouge_l", "lead_rouge_l", "test_loss"):
        if name in result:
            rows.append((name.replace("_", " "), f"{result[name]:.4f}"))
    return tabulate(rows, tablefmt="plain", disable_numparse=True)
