"""Pages of the reference that are generated: commands from ``--help``, the API from docstrings, and the packages."""

import ast
import inspect
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from dtlib import cli
from dtlib.lab.lesson_files import notebooks, title

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "dtlib": "World, tracing and training",
    "dtlib.comm": "Communication",
    "dtlib.parallel.data": "Data parallelism",
    "dtlib.horovod": "Horovod's API",
    "dtlib.parallel.zero": "ZeRO",
    "dtlib.parallel.pipeline": "Pipelines",
    "dtlib.schedule": "Schedules",
    "dtlib.parallel.tensor": "Tensor parallelism",
    "dtlib.parallel.context": "Context parallelism",
    "dtlib.parallel.expert": "Expert parallelism",
    "dtlib.parallel.local": "Local steps",
    "dtlib.parallel.compression": "Gradient compression",
    "dtlib.parallel.replicator": "TF-Replicator's model",
    "dtlib.training": "Engines and configurations",
    "dtlib.checkpoint": "Checkpoints",
    "dtlib.recovery": "Faults",
    "dtlib.storage": "Data input",
    "dtlib.planner": "The planner",
}
# Members of torch's classes are in torch's reference.
OTHERS = "Module, Optimizer, Function, Sampler, Future, Exception, object"
# What each target of the Makefile does.
TARGETS = {
    "lab": "install into `.venv`, and open JupyterLab on the course",
    "tour": "run the core of lessons 00 to 08 on ranks, without a browser",
    "test": "run the fast tests",
    "test-slow": "run the tests marked `slow`",
    "test-all": "run fast and slow tests",
    "test-nightly": "run the tests marked `nightly`: Slurm, two hosts, DeepSpeed, repeats",
    "test-gpu": "run the tests that need an NVIDIA GPU",
    "gpu-report": "write gpu-report.md on a machine with an NVIDIA GPU; untried on a GPU",
    "lint": "run ruff, mypy and the tests that only read files",
    "notebooks": "build and execute all notebooks",
    "workshop": "build the notebooks of a short track: `TRACK=half-day`",
    "slides": "write one deck for each lesson to `notebooks/slides/`",
    "book": "write this site to `build/book/`",
    "browser": "write the web page that needs no installation to `build/browser.html`",
    "wheelhouse": "download all wheels, to install without a network",
    "lock": "compile `requirements.lock` from `pyproject.toml`",
    "clean": "delete `.venv`",
}


def pages() -> dict[str, str]:
    """Name -> Markdown."""
    return {"commands": commands(), "api": api(), "packages": packages()}


def public(package: str) -> list[str]:
    module = import_module(package)
    names = getattr(module, "__all__", None) or getattr(module, "_LAZY", None) or vars(module)
    found = {name: getattr(module, name) for name in names if not name.startswith("_")}
    ours = [name for name, value in found.items() if str(getattr(value, "__module__", "")).startswith("dtlib")]
    return [name for name in ours if callable(found[name]) and inspect.getdoc(found[name])]


def api() -> str:
    """Public classes and functions with their docstrings."""
    parts = ["# API\n\nGenerated from the docstrings. [Packages](packages.md) has every package in one sentence.\n"]
    shown: set[object] = set()
    for package, heading in PACKAGES.items():
        module = import_module(package)
        names = [name for name in public(package) if getattr(module, name) not in shown]
        shown |= {getattr(module, name) for name in names}
        if not names:
            continue
        parts.append(f"## {heading}: `{package}`\n\n```{{eval-rst}}")
        for name in names:
            kind = "class" if inspect.isclass(getattr(module, name)) else "function"
            parts.append(f".. auto{kind}:: {package}.{name}")
            parts.append(f"   :members:\n   :inherited-members: {OTHERS}\n" if kind == "class" else "")
        parts.append("```\n")
    return "\n".join(parts)


def commands() -> str:
    """Every command with its options, as ``--help`` prints them; targets of make; benchmarks."""
    text = "# Commands\n\nIn a clone the programs are in `.venv/bin`. Terminals of `make lab` find them.\n"
    text += "\n## make\n\n| command | what it does |\n|---|---|\n"
    text += "".join(f"| `make {name}` | {words} |\n" for name, words in TARGETS.items())
    text += "\n## dtlib\n"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, said in zip(cli._COMMANDS, pool.map(lambda each: _help("dtlib", each), cli._COMMANDS), strict=True):
            text += f"\n### dtlib {name}\n\n```text\n{said}\n```\n"
    text += "\n## Benchmarks\n\n`python -m benchmarks NAME` measures dtlib and a peer, interleaved in one run.\n"
    text += "\n| name | question |\n|---|---|\n"
    names = re.search(r"\{([\w,-]+)\}", _help("benchmarks"))
    assert names
    for name in names[1].split(","):
        text += f"| `{name}` | {_first(ROOT / 'benchmarks' / (name.replace('-', '_') + '.py'))} |\n"
    return text


def _help(*command: str) -> str:
    words = [sys.executable, "-m", *command, "--help"]
    settings = {**os.environ, "COLUMNS": "100", "PYTHON_COLORS": "0"}
    return subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True, check=True).stdout.strip()


def packages() -> str:
    """Every folder with the first sentence of its ``__init__.py``."""
    text = "# Packages\n\nEvery folder, and the first sentence of its `__init__.py`.\n\n"
    text += "| folder | what it is for |\n|---|---|\n"
    lectures = {source.parent: title(source) for source in notebooks().values() if source.stem == "lecture"}
    for path in folders():
        words = _first(path) or f"Lesson {lectures[path.parent]}"
        text += f"| `{path.parent.relative_to(ROOT)}/` | {words} |\n"
    return text


def folders() -> list[Path]:
    """The ``__init__.py`` of each package of the repository."""
    top = [ROOT / folder / "__init__.py" for folder in ("benchmarks", "tools", "tests")]
    inside = [path for path in (ROOT / "dtlib").rglob("__init__.py") if "course" not in path.relative_to(ROOT).parts]
    return [*sorted(inside, key=lambda path: path.parent), *top]


def _first(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line, for a cell of a table."""
    words = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    return " ".join(words.split()).replace("``", "`").replace("|", "\\|")
