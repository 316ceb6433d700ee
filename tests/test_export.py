"""``dtlib export``: short files that need torch alone, and train to the bit as the plain cores do on gloo."""

import ast
import subprocess
import sys

import pytest

from dtlib.cli import main
from dtlib.export import EXPORTS, MOST_LINES, exported
from tests.cases import all_cases

# A world of forked ranks after the other, as torch takes seconds to be imported; each rank writes to a file of its own.
RANKS = """
import contextlib, os, runpy, sys

class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("dtlib", "mpi4py"):
            raise ModuleNotFoundError(f"{name} is not there")

folder, ranks, *names = sys.argv[1:]
ranks = int(ranks)
sys.meta_path.insert(0, Bare())
import torch, torch._dynamo  # which an optimizer imports
from torch.distributed import TCPStore, group

def run(name):
    if kind == "bare":
        return runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
    strategy, build, model = EXPORTS[name]
    plain = import_module(f"dtlib.parallel.{strategy}.plain")
    arguments = eval(f"(lambda comm, x, y: {build}, {model})", vars(plain) | vars(demos))
    demos.main(lambda: as_communicator(group.WORLD), *arguments)

torch.set_num_threads(1)
os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
for kind in ("bare", "plain"):
    if kind == "plain":
        del sys.meta_path[0]
        from importlib import import_module
        from dtlib.comm import as_communicator
        from dtlib.export import EXPORTS, demos
    stores = {name: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for name in names}
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if not pids[-1]:
            sys.stdout = open(f"{folder}/{kind} {rank}", "w")
            for name, store in stores.items():
                facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                os.environ.update({key: str(value) for key, value in {**facts, "MASTER_PORT": store.port}.items()})
                run(name)
            sys.stdout.flush()
            os._exit(0)  # the stores are the parent's
    for _ in range(ranks):
        if os.wait()[1]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            sys.exit("a rank failed")
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_strategy_trains_without_dtlib_to_the_bit_as_its_plain_core(tmp_path, ranks):
    for name in EXPORTS:
        (tmp_path / f"{name}.py").write_text(exported(name))
    command = [sys.executable, "-I", "-c", RANKS, str(tmp_path), str(ranks), *EXPORTS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for rank in range(ranks):
        bare, plain = ((tmp_path / f"{kind} {rank}").read_text() for kind in ("bare", "plain"))
        assert bare == plain
        assert bare.count(f"rank {rank}: loss ") == 5 * len(EXPORTS) and "nan" not in bare


def test_an_export_is_short_and_imports_torch_alone():
    with all_cases() as case:
        for name in EXPORTS:
            lines = exported(name).splitlines()
            tree = ast.parse("\n".join(lines))
            imported = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
            imported += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
            words = "as_communicator", "contract.", "recorder", "check_"
            with case(name):
                assert len(lines) <= MOST_LINES == 150 and max(map(len, lines)) <= 120
                assert {module.partition(".")[0] for module in imported} <= {"torch", *sys.stdlib_module_names}
                assert not any(word in "\n".join(lines[6:]) for word in words)


def test_a_text_file_is_written_without_torch():
    code = "import sys; from dtlib.export import exported; exported('ddp'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_export_is_written_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", "ddp"]) == 0
    assert (tmp_path / "ddp.py").read_text() == exported("ddp") and "torchrun" in capsys.readouterr().out
    (tmp_path / "ddp.py").write_text("mine")
    assert main(["export", "ddp"]) == 2 and "--to" in capsys.readouterr().err
    assert (tmp_path / "ddp.py").read_text() == "mine"
    assert main(["export", "zero1", "--to", "mine/zero.py"]) == 2 and "mine/zero.py" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_runs_an_export(tmp_path):
    (tmp_path / "tensor.py").write_text(exported("tensor"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "tensor.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0 and ran.stdout.count(" in one process") == 10, ran.stdout + ran.stderr
