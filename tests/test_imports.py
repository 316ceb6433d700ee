"""Importing dtlib changes nothing outside of it; ``import dtlib.backend`` adds one backend and one URL scheme."""

import json
import subprocess
import sys
from importlib.metadata import distribution

import pytest

from tests.conftest import ROOT

# Programs of their own, as what a process has imported stays. ``seen()`` is all that an import could change: what names
# in modules and classes of torch and of others stand for, tables of torch, and state of the process.
SEEN = """
import os, signal, sys, threading, types, warnings

def names_in(module):
    yield from vars(module).items()
    for name, thing in list(vars(module).items()):
        if isinstance(thing, type) and thing.__module__ == module.__name__:
            yield from ((f"{name}.{inner}", value) for inner, value in vars(thing).items())

def seen():
    from torch.distributed.distributed_c10d import Backend
    import torch
    found = {}
    for path, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and path.split(".")[0] in WATCHED:
            found.update({f"{path}: {name}": value for name, value in names_in(module)})
    for table in ("backend_list", "backend_type_map", "backend_capability", "default_device_backend_map", "_plugins"):
        entries = getattr(Backend, table)
        for key in entries:
            found[f"Backend.{table}[{key}]"] = None if isinstance(entries, list) else entries[key]
    rendezvous = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    found.update({f"rendezvous {scheme}": handler for scheme, handler in rendezvous.items()})
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::"):
            operator = getattr(torch.ops.c10d, name.removeprefix("c10d::").partition(".")[0]).default
            found[f"{name} kernels"] = str(sorted(map(str, operator.py_kernels)))
            found[f"{name} cache"] = str({str(key): str(kernel) for key, kernel in operator._dispatch_cache.items()})
    found.update({f"variable {name}": value for name, value in os.environ.items()})
    found.update({f"signal {number}": signal.getsignal(number) for number in signal.valid_signals()})
    found.update({f"sys.{name}": getattr(sys, name) for name in ("excepthook", "displayhook", "unraisablehook")})
    found["sys.path"], found["sys.meta_path"] = str(sys.path), str(sys.meta_path)
    found["warnings"], found["threads"] = str(warnings.filters), threading.active_count()
    return found

def changed(before, after):
    missing = object()
    same = lambda name: (one := before.get(name, missing)) is (other := after.get(name, missing)) or (
        isinstance(one, (str, int, tuple)) and one == other)
    return sorted(name for name in before.keys() | after.keys() if not same(name))
"""
NO_IMPORT = ("lecture", "exercises", "appendix", "puzzle", "__main__")  # cells; programs
EVERYTHING = f"""
import importlib
from pathlib import Path
import dtlib

def everything():
    home = Path(dtlib.__file__).parent
    for path in sorted(home.rglob("*.py")):
        parts = path.relative_to(home).with_suffix("").parts
        if parts[0] not in ("backend", "course") and parts[-1] not in {NO_IMPORT}:
            try:
                importlib.import_module(".".join(["dtlib", *parts]).removesuffix(".__init__"))
            except ModuleNotFoundError as problem:  # an extra
                assert problem.name.split(".")[0] in ("deepspeed", "triton", "jupyterhub", "batchspawner"), problem
"""


def said(program: str):
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
def test_importing_everything_but_the_backend_changes_nothing():
    others = said(EVERYTHING + "everything()\nimport json, sys; print(json.dumps([*sys.modules]))")
    others = [name for name in others if name.split(".")[0] not in ("dtlib", "__main__")]
    assert "torch.distributed" in others and len(others) > 1000
    found = said(f"""
WATCHED = ("torch", "numpy", "mpi4py", "builtins", "io", "subprocess", "matplotlib", "IPython", "ipyparallel")
import contextlib, importlib, json
for name in {others}:  # what dtlib imports of others, without dtlib
    with contextlib.suppress(Exception):
        importlib.import_module(name)
{SEEN}
import dtlib
seen()  # which makes torch load some of its own
before = seen()
{EVERYTHING}
everything()
assert "dtlib.parallel.zero.optimizer" in sys.modules and "dtlib.backend" not in sys.modules
after = seen()
print(json.dumps([len(before), changed(before, after)]))""")
    # Operators in a namespace of our own, by which the Replicator marks exchanges in a graph, and torch's warning.
    changed = {*found[1]} - {"torch.library: __warningregistry__"}
    assert found[0] > 20_000 and changed == {"torch.ops: dtlib"}, found[1][:20]


def test_a_program_that_imports_torch_alone_is_as_without_dtlib():
    program = (
        "import json, sys, torch.distributed as dist; print(json.dumps([dist.Backend.backend_list, *sys.modules]))"
    )
    backends, *modules = said(program)
    assert "gloo" in backends and "dtlib" not in backends
    assert "torch.distributed" in modules and not any(name.startswith("dtlib") for name in modules)
    groups = {point.group for point in distribution("dtlib").entry_points}
    assert groups == {"console_scripts", "dtlib.lab", "dtlib.lab.listeners"}


def test_what_importing_the_backend_adds():
    found = said(f"""
WATCHED = ("torch",)
import json, sys, torch.distributed
{SEEN}
import dtlib
seen()  # which makes torch load some of its own
before, modules = seen(), set(sys.modules)
import dtlib.backend
print(json.dumps([changed(before, seen()), sorted(set(sys.modules) - modules)]))""")
    assert found[0] == [
        "Backend._plugins[DTLIB]", "Backend.backend_capability[dtlib]", "Backend.backend_list[dtlib]",
        "Backend.backend_type_map[dtlib]", "rendezvous dtlib", "torch.distributed.distributed_c10d: Backend.DTLIB",
    ]  # fmt: skip
    assert found[1] == ["dtlib.backend"]
