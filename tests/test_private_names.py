"""Which private names of torch the package touches. When torch is upgraded, look at these lines first.

python -m tests.test_private_names [FOLDER]     prints them
"""

import ast
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Of objects that torch makes: tensors, storages, modules, optimizers, groups, works, wrapped modules, graphs.
OF_OBJECTS = {
    "_version", "_cdata", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_grad",
    "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks", "_post_accumulate_grad_hooks",
    "_execution_engine", "_get_fsdp_state", "_fsdp_param_groups", "_training_state", "_check_reducer_finalized",
    "_remove_autograd_hooks", "_dispatch_cache", "_schema", "_make_wrapper_subclass", "_rendezvous_handlers",
    "_set_group_name", "_get_backend", "_optimizer_step_pre_hooks", "_graph",
}  # fmt: skip


def private_names(folder: Path) -> dict[str, Counter]:
    """For each file, by its path below ``folder``, the private names of torch, with how many lines have each."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(("lessons/", "course/")) and (lines := lines_of(path)):
            found[name] = Counter(used for _, used in lines)
    return found


def lines_of(path: Path) -> set[tuple[int, str]]:
    tree, of_torch, lines = ast.parse(path.read_text()), {"torch": "torch"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    of_torch[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    note(lines, node, alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                of_torch[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                note(lines, node, f"{node.module}.{alias.name}")
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if (dotted := dotted_name(node, of_torch)) and id(node) in inner:
                continue  # of a longer name
            if dotted:
                note(lines, node, dotted)
            elif node.attr in OF_OBJECTS and getattr(node.value, "id", "") not in ("self", "cls"):
                lines.add((node.lineno, node.attr))
        elif isinstance(node, ast.Constant) and node.value in OF_OBJECTS:  # getattr(parameter, "_backward_hooks")
            lines.add((node.lineno, node.value))
    return lines


def note(lines, node, dotted: str) -> None:
    """A dotted name, up to the first part of it that is private."""
    parts = dotted.split(".")
    for at, part in enumerate(parts):
        if part.startswith("_") and not part.startswith("__"):
            until = at + 2 if part == "_C" else at + 1  # what of torch's C++
            lines.add((node.lineno, ".".join(parts[:until])))
            return


def dotted_name(node: ast.Attribute, of_torch: dict[str, str]) -> str | None:
    parts, at = [], node
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    if isinstance(at, ast.Name) and at.id in of_torch:
        return ".".join([of_torch[at.id], *reversed(parts)])
    return None


# Each file, its names, and on how many lines a name stands if on several.
KNOWN = """
backend/process_groups.py: torch.distributed.distributed_c10d._DistributedBackendOptions
backend/interrupted_modules.py: _check_reducer_finalized, _fsdp_param_groups x2, _get_fsdp_state,
    _remove_autograd_hooks, _training_state
checkpoint/local_shards.py: _non_persistent_buffers_set
comm/torch/group_on_communicator.py: torch.distributed.distributed_c10d._world
comm/torch/communicator_on_group.py: torch.distributed.distributed_c10d._world
comm/torch/backend_work.py: torch._C._current_autograd_node, torch.autograd.Variable._execution_engine,
    torch.distributed._Work
comm/torch/group_work.py: _get_backend
gradients/preconditions.py: torch.autograd.Variable._execution_engine
gradients/local_gradient.py: torch.Tensor._make_subclass, torch._C.DisableTorchFunctionSubclass
gradients/precision.py: _version x4, torch._foreach_mul_
gradients/reducer.py: _cdata, _post_accumulate_grad_hooks, torch._C._storage_Use_Count,
    torch.autograd.Variable._execution_engine
gradients/shard_info.py: _post_accumulate_grad_hooks
horovod/operations.py: _version
lab/checks/answer_memory.py: _cdata, _version
measure/live.py: _cdata x5, torch.utils._python_dispatch, torch.utils._pytree
measure/storages.py: _cdata
parallel/context/module.py: torch._C._current_graph_task_id, torch.nn.modules.batchnorm._NormBase,
    torch.nn.modules.conv._ConvNd, torch.nn.modules.pooling._AdaptiveAvgPoolNd,
    torch.nn.modules.pooling._AdaptiveMaxPoolNd, torch.nn.modules.pooling._AvgPoolNd,
    torch.nn.modules.pooling._LPPoolNd, torch.nn.modules.pooling._MaxPoolNd
parallel/data/checks.py: _version
parallel/data/batch_norm.py: _buffers, _modules, torch.nn.modules.batchnorm._BatchNorm x2
parallel/data/plain.py: torch.autograd.Variable._execution_engine
parallel/pipeline/checks.py: torch.nn.modules.batchnorm._BatchNorm
parallel/pipeline/cuts.py: torch.utils._pytree
parallel/pipeline/interpreter.py: torch.utils._pytree
parallel/pipeline/linear.py: _backward_hooks, _post_accumulate_grad_hooks
parallel/pipeline/stage.py: _version x2, torch.ops.aten._unsafe_view, torch.utils._pytree
parallel/replicator/__init__.py: torch.utils._pytree
parallel/replicator/graph.py: _cdata x3, _schema, torch._subclasses x4, torch.utils._python_dispatch
parallel/tensor/layers.py: _backward_hooks, _backward_pre_hooks, _forward_hooks, _forward_pre_hooks
parallel/zero/plain.py: torch._C._current_graph_task_id
parallel/zero/sharded/parameter_locations.py: _parameters
parallel/zero/sharded/unit.py: _backward_hooks x2, _parameters x3, torch._C._current_graph_task_id,
    torch.autograd.Variable._execution_engine, torch.utils._pytree
training/deepspeed_engine.py: torch.utils._pytree
training/pipeline_engine.py: torch.utils._pytree
training/run.py: torch.utils._pytree
"""


@pytest.mark.lint
def test_private_names_of_torch_are_those_that_are_listed():
    known = {}
    for file, names in re.findall(r"^(\S+):((?: .*|\n )+)$", KNOWN, re.MULTILINE):
        known[file] = {name: int(count or 1) for name, count in re.findall(r"([\w.]+)(?: x(\d+))?", names)}
    assert private_names(ROOT / "dtlib") == known, "run python -m tests.test_private_names, and change KNOWN"


if __name__ == "__main__":
    for file, names in private_names(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dtlib").items():
        words = [name + f" x{count}" * (count > 1) for name, count in sorted(names.items())]
        print(textwrap.fill(f"{file}: {', '.join(words)}", 120, subsequent_indent="    ", break_on_hyphens=False))
