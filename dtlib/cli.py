"""The command line: dtlib doctor | lab | wall | fresh | tour | pi | train | plan | browser."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dtlib
from dtlib import wall
from dtlib.errors import MOST, DtlibError, number, read_number
from dtlib.lab.course import current_folder
from dtlib.world.launch import is_rank, run_ranks, settings_of_mpi
from dtlib.world.machine import gpu_names, usable_cores

MOST_RANKS_PER_CORE = 16
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class _Parser(argparse.ArgumentParser):
    def exit(self, status=0, message=None):
        print(end="", flush=True)  # raises OSError here, not at exit, as in main
        super().exit(status, message)

    def error(self, message):
        said = message.replace("the following arguments are required: ", f"type {self.prog} ").replace(" | ", " or ")
        said = re.sub(r"argument (\w.*): invalid choice: ('.*') .*", rf"there is no \2: type {self.prog} \1", said)
        self.exit(2, f"{self.prog}: {said}\n")  # without the usage, which --help prints

    def add_number(self, name: str, help: str, default: int | None = None, **limits: Any) -> None:
        """Add an option whose value is a number (``errors.number``), written as 10000000, 10_000_000 or 1e7."""
        self.add_argument(name, default=default, help=help, type=lambda text: number(name, read_number(text), **limits))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status. Prints ``DtlibError`` as one message, with status 2."""
    command, said, status = "dtlib", "", 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may be unable to print ±
    try:
        try:
            if sys.stdout is None:
                raise DtlibError("Standard output is closed, so nothing can be printed: use >/dev/null instead.")
            options = _options(arguments)
            command = f"dtlib {options.command}"
            current_folder()  # raises if it was deleted, because mpiexec and JupyterLab need it
            status = _COMMANDS[options.command](options)
        except DtlibError as problem:
            said = str(problem)
        print(end="", flush=True)  # raises OSError here, not at exit, if output cannot be written
    except OSError as problem:
        if problem.filename:
            said = f"{problem.filename} cannot be used ({problem.strerror}): name another, or free space."
        elif problem.errno in UNWRITABLE:
            # Standard output cannot be written. EPIPE is no error: the reader, such as `| head`, has ended.
            status = 0 if problem.errno == errno.EPIPE else 2
            said = said or f"the output cannot be written ({problem.strerror}): write it elsewhere." * bool(status)
            # Python flushes standard output again at exit, and would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            raise
    if said:
        print(f"{command}: {said}", file=sys.stderr)
    return status


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    most = MOST_RANKS_PER_CORE * usable_cores()
    # Limits of all options that are a number of ranks.
    some: dict[str, Any] = {"most": most, "why": f", {MOST_RANKS_PER_CORE} for each core here"}
    parser = _Parser(prog="dtlib", description="A workshop kit for distributed deep learning.")
    parser.add_argument("--version", action="version", version=f"dtlib {dtlib.__version__}")
    commands = parser.add_subparsers(dest="command", metavar=" | ".join(_COMMANDS))
    commands.add_parser("doctor", help="check this machine, and print problems and solutions")
    lab = commands.add_parser(
        "lab", help="copy the course to this folder (in a clone: to work/), and open JupyterLab",
        epilog="Other arguments are JupyterLab's, such as --port=8890.",
    )  # fmt: skip
    lab.add_argument("--no-browser", action="store_true", help="only print the address")
    lab.add_argument("--hub", action="store_true", help="for JupyterHub, which runs this for each learner")

    wall.add_arguments(commands.add_parser("wall", help="show a page with the progress of learners, and who is stuck"))
    fresh = commands.add_parser("fresh", help="restore the notebooks of a lesson, and keep yours under another name")
    fresh.add_argument("lesson", metavar="LESSON", help="its number, such as 04, or the name of a notebook")

    tour = commands.add_parser("tour", help="solve exercises of lessons 00 to 08 on MPI engines and print a table")
    tour.add_number("--ranks", "engines to start (default: 2)", 2, **some)
    tour.add_argument("--profile", help="folder of an ipyparallel profile (default: a copy of this machine's)")

    pi = commands.add_parser("pi", help="estimate pi on MPI ranks")
    pi.add_number("--points", "number of points (default: 1e8)", 10**8, why=": more would take weeks")
    pi.add_number("--ranks", "ranks to start (default: one per core)", **some)
    pi.add_argument("--kernel", choices=("loop", "numpy", "compiled", "gpu"), default="compiled", help="how to count")
    pi.add_number("--seed", "another seed gives other points (default: 0)", 0, least=-MOST)
    pi.add_argument("--json", action="store_true", help="print one JSON object")

    train = commands.add_parser("train", help="train a workload on ranks: the lessons' models, by one config")
    models = ("vision", "summarization", "decoder")
    train.add_argument("workload", choices=models, metavar=" | ".join(models))
    train.add_argument("--config", metavar="FILE", help="JSON: DeepSpeed's keys, `workload`, `run` (default: ours)")
    train.add_number("--ranks", "ranks to start (default: one per core)", **some)
    train.add_argument("--runtime", choices=("dtlib", "torch", "deepspeed"), default="dtlib", help="whose classes")
    train.add_argument("--backend", choices=("gloo", "dtlib"), help="of torch.distributed, for --runtime torch")
    train.add_argument("--stage", type=int, choices=range(4), help="of ZeRO, in place of the config's")
    train.add_number("--steps", "in place of the config's")
    train.add_argument("--save", metavar="DIR", help="save checkpoints there")
    train.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --save")
    train.add_argument("--log", metavar="FILE", help="add a line of JSON per step")
    train.add_argument("--json", metavar="FILE", help="write the result")
    plan = commands.add_parser("plan", help="print which meshes of GPUs a model fits on, and how long a step takes")
    plan.add_argument(
        "model", nargs="?", help="a name such as llama3-8b, a config.json, or layers=...,hidden=...,heads=..."
    )
    plan.add_number("--gpus", "of the whole job (default: 8)", 8)
    plan.add_argument("--device", default="h100", help="v100, a100, h100, h200 or b200 (default: h100)")
    plan.add_number("--batch", "samples per step (default: four million tokens)", 0)
    plan.add_number("--seq", "tokens per sample, instead of the model's", 0)
    plan.add_argument("--fixed", default="", help="fixed parts of the plan: zero=3,recompute=full")
    plan.add_number("--best", "number of plans to show (default: 10)", 10)
    plan.add_number("--tokens", "of the whole training: print days, too", most=10**18, whole=False)
    plan.add_argument("--write", metavar="FILE", help="write the plan as a config of dtlib train")
    plan.add_argument("--json", action="store_true", help="print the best plans as JSON")

    browser = commands.add_parser("browser", help="write a web page that needs no installation")
    browser.add_argument("folder", nargs="?", default="dtlib-browser", help="its folder (default: dtlib-browser)")
    options, unknown = parser.parse_known_args(arguments)
    if options.command == "lab":
        options.jupyter = [argument for argument in unknown if argument != "--"]
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command is None:
        parser.print_help()
        parser.exit()
    return options


def _doctor(options) -> int:
    from dtlib.lab import doctor

    return doctor.report()


def _lab(options) -> int:
    from dtlib.lab import server

    return server.serve_hub(options.jupyter) if options.hub else server.serve(not options.no_browser, options.jupyter)


def _fresh(options) -> int:
    from dtlib.lab import course

    print(*course.restore(options.lesson), sep="\n")
    return 0


def _tour(options) -> int:
    from dtlib.tour import tour

    return tour(options.ranks, options.profile)


def _pi(options) -> int:
    if is_rank():
        return _pi_on_this_rank(options)
    if options.kernel == "gpu" and not gpu_names():
        raise DtlibError("--kernel gpu finds no NVIDIA GPU: leave it out, or use --kernel compiled.")
    ranks = options.ranks or usable_cores()
    command = f"-m dtlib pi --points={options.points} --kernel={options.kernel} --seed={options.seed}".split()
    status = run_ranks(command + ["--json"] * options.json, ranks)
    if status not in (0, 2):
        raise DtlibError(
            f"mpiexec ended with status {status} and the output above: run `dtlib doctor` to find the "
            f"cause.{settings_of_mpi()}"
        )
    return status


def _pi_on_this_rank(options) -> int:
    from dtlib.measure.progress import RankProgress
    from dtlib.pi import KERNELS, Estimate, count_on_ranks
    from dtlib.world import init

    comm = init().comm
    kernel = KERNELS[options.kernel]
    kernel(0, 1)  # compile before the time is taken
    # The table shows the speed-up over one rank, so rank 0 first counts alone.
    alone = None
    if not options.json:
        comm.barrier()
        alone = _points_per_second_alone(kernel, options.points) if comm.rank == 0 else None
    with RankProgress(comm, options.points) as progress:
        comm.barrier()
        began = time.perf_counter()
        inside = count_on_ranks(options.points, comm, kernel, options.seed, progress)
        seconds = time.perf_counter() - began
    if comm.rank == 0:
        estimate = Estimate(options.points, inside)
        if options.json:
            print(json.dumps({
                "points": estimate.points, "inside": estimate.inside, "pi": estimate.pi,
                "standard_error": estimate.standard_error, "seconds": seconds, "ranks": comm.size,
            }))  # fmt: skip
        else:
            print(_pi_table(estimate, seconds, alone, comm.size))
    return 0


def _train(options) -> int:
    from dtlib.training.command import train, train_on_this_rank
    from dtlib.world import torchrun

    if is_rank() or torchrun.started_this():
        return train_on_this_rank(options)
    return train(options, options.ranks or usable_cores())


def _plan(options) -> int:
    from dtlib.planner.command import run

    if options.model is None:
        raise DtlibError("There is no model: pass a name such as llama3-8b, a config.json, or layers=...,hidden=...")
    return run(options)


def _browser(options) -> int:
    from dtlib.browser import build

    return build.run(Path(options.folder))


def _points_per_second_alone(kernel, points: int) -> float:
    """Measure the speed of one rank while the others wait, on a sample of the same points (about half a second)."""
    sample = min(points, 1000)
    while True:
        # Twice, because the first call may compile the kernel for the new size.
        for _ in range(2):
            began = time.perf_counter()
            kernel(0, sample)
            if (seconds := time.perf_counter() - began) <= 0.2:
                break
        if seconds > 0.2 or sample == points:
            return sample / max(seconds, 1e-9)
        sample = min(points, 4 * sample)


def _pi_table(estimate, seconds: float, alone: float | None, ranks: int) -> str:
    from tabulate import tabulate

    rate = estimate.points / seconds
    # In a shorter run the start of the ranks takes longer than counting.
    long_enough = seconds > 0.01
    rows = [
        ("pi", f"{estimate.pi:.8f} ± {estimate.standard_error:.1g} (one standard error)"),
        ("inside", f"{estimate.inside:,} of {estimate.points:,} points"),
        ("time", f"{seconds:.3g} s on {ranks} rank{'s' * (ranks > 1)}"),
        ("points per second", f"{rate:.3g}"),
        ("speed-up", f"{rate / alone:.2f} against one rank" if long_enough else "too few points to tell"),
        ("efficiency", f"{rate / alone / ranks:.0%}" if long_enough else "too few points to tell"),
    ]
    return tabulate(rows, tablefmt="plain")


_COMMANDS = {
    "doctor": _doctor, "lab": _lab, "fresh": _fresh, "tour": _tour, "pi": _pi, "train": _train,
    "plan": _plan, "browser": _browser, "wall": wall.run,
}  # fmt: skip
