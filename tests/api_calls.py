"""How often cells of the course call each API.

Calls are found by their syntax: ``dist.all_reduce(...)`` is torch.distributed's, ``comm.mpi.Reduce(...)`` mpi4py's, and
``comm.all_reduce(...)`` dtlib's.
"""

import ast
import re
from collections import Counter
from pathlib import Path

from dtlib.comm.mpi4py_comm import Mpi4pyComm
from dtlib.lab.lesson_files import notebooks

OURS = {
    "send", "recv", "broadcast", "reduce", "all_reduce", "reduce_scatter", "all_gather", "gather", "scatter",
    "all_to_all", "barrier", "all_gather_object", "broadcast_object",
}  # fmt: skip
COMMUNICATORS = re.compile(r"(^|\.)(comm|tensor_comm|data_comm|both|slow|group|there)$|mesh\[")


def api_of(call: ast.Call) -> str | None:
    """``mpi4py``, ``torch.distributed`` or ``dtlib``; None for another call."""
    if not isinstance(call.func, ast.Attribute):
        return None
    owner, name = ast.unparse(call.func.value), call.func.attr
    if owner in ("dist", "torch.distributed"):
        return "torch.distributed"
    if owner.endswith(("comm.mpi", "COMM_WORLD")) or owner == "mpi":
        return "mpi4py" if hasattr(Mpi4pyComm, name) and not name.startswith("Get_") else None
    return "dtlib" if name in OURS and COMMUNICATORS.search(owner) else None


def cells(source: Path, tag: str | None = None) -> list[str]:
    """The code cells of a notebook's source, without magics; of a tag, if one is given."""
    found = []
    for cell in re.split(r"^# %%(?= |$)", source.read_text(), flags=re.M)[1:]:
        head, _, code = cell.partition("\n")
        if "[markdown]" not in head and (tag is None or f'"{tag}"' in head):
            found.append(re.sub(r"^# %%px.*$", "", code, flags=re.M))
    return found


def calls(codes: list[str]) -> Counter:
    counted = Counter()
    for code in codes:
        plain = "\n".join("pass" if line.startswith(("%", "!")) else line for line in code.splitlines())
        nodes = ast.walk(ast.parse(plain))
        counted.update(api for node in nodes if isinstance(node, ast.Call) and (api := api_of(node)))
    return counted


def sources(kind: str) -> dict[str, Path]:
    """Of ``exercises`` or ``lectures``: name of the notebook, and its source."""
    return {name: path for name, path in notebooks().items() if name.endswith("exercises") == (kind == "exercises")}
