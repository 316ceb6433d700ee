"""``dtlib train``: the ranks that it starts, or those that it was started on; one sentence where that cannot be."""

import json
import os
import sys
import warnings
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.files import own_folder, writing
from dtlib.world.launch import forked_ranks, run_ranks, settings_of_mpi

SAYS = "DTLIB_SAYS"  # where rank 0 leaves the sentence that all ranks agree on, for whoever started them
SECONDS = 5  # that ranks wait for one another with an error


def train(options: Namespace, ranks: int) -> int:
    """Start as many ranks on the same arguments; returns the exit status."""
    names = ("config", "runtime", "backend", "stage", "steps", "save", "log", "json")
    given = {name: getattr(options, name) for name in names}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    command = ["-m", "dtlib", "train", options.workload, *flags, *["--resume"] * options.resume]
    forked = forked_ranks() if ranks > 1 else nullcontext()  # torch is imported once
    with own_folder("train") as folder, forked:
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
    from dtlib.training.run import train as train_here
    from dtlib.world import init

    warnings.formatwarning = lambda message, *_, **__: f"dtlib train: {message}\n"  # without a line of source
    comm = init().comm
    ending = comm.split(0)
    ending.time_limit = SECONDS
    try:
        if options.json:
            _check_can_be_written(options.json, comm)
        if options.backend and options.runtime != "torch":
            raise DtlibError(f"--backend={options.backend} is for torch.distributed: use it with --runtime=torch.")
        if options.backend == "dtlib":
            import torch

            import dtlib.backend  # noqa: F401, which registers it

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
    """Before training, as far as can be told then."""
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
    """Of an error that all ranks have one sentence is enough; one that a rank has alone ends the others too."""
    try:
        ending.barrier()
    except DtlibError:
        print(f"dtlib train: rank {ending.rank}: {problem}", file=sys.stderr, flush=True)
        os._exit(2)  # mpiexec ends the others, which wait
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
        rows += [("model states per rank", ", ".join(f"{held / 1e6:.3g} MB" for held in result["bytes_per_rank"]))]
    for name in ("accuracy", "rouge_l", "lead_rouge_l", "test_loss"):
        if name in result:
            rows.append((name.replace("_", " "), f"{result[name]:.4f}"))
    return tabulate(rows, tablefmt="plain", disable_numparse=True)
