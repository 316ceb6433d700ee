"""Which private names of torch the package touches. When torch is upgraded, look at these lines first.

python -m tests.test_private_names [FOLDER]     prints them, and how many lines they are on
"""

import ast
import sys
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


def count_lines(folder: Path) -> int:
    files = (path for path in folder.rglob("*.py") if path.relative_to(folder).parts[0] not in ("lessons", "course"))
    return sum(len({line for line, _ in lines_of(path)}) for path in files)


KNOWN = {
    "backend/process_groups.py": {"torch.distributed.distributed_c10d._DistributedBackendOptions": 1},
    "backend/interrupted_modules.py": {
        "_check_reducer_finalized": 1,
        "_fsdp_param_groups": 2,
        "_get_fsdp_state": 1,
        "_remove_autograd_hooks": 1,
        "_training_state": 1,
    },
    "checkpoint/local_shards.py": {"_non_persistent_buffers_set": 1},
    "comm/torch/group_on_communicator.py": {"torch.distributed.distributed_c10d._world": 1},
    "comm/torch/communicator_on_group.py": {"torch.distributed.distributed_c10d._world": 1},
    "comm/torch/backend_work.py": {
        "torch._C._current_autograd_node": 1,
        "torch.autograd.Variable._execution_engine": 1,
        "torch.distributed._Work": 1,
    },
    "comm/torch/group_work.py": {"_get_backend": 1},
    "gradients/preconditions.py": {"torch.autograd.Variable._execution_engine": 1},
    "gradients/local_gradient.py": {"torch.Tensor._make_subclass": 1, "torch._C.DisableTorchFunctionSubclass": 1},
    "gradients/precision.py": {"_version": 4, "torch._foreach_mul_": 1},
    "gradients/reducer.py": {
        "_cdata": 1,
        "_post_accumulate_grad_hooks": 1,
        "torch._C._storage_Use_Count": 1,
        "torch.autograd.Variable._execution_engine": 1,
    },
    "gradients/shard_info.py": {"_post_accumulate_grad_hooks": 1},
    "horovod/operations.py": {"_version": 1},
    "lab/checks/answer_memory.py": {"_cdata": 1, "_version": 1},
    "measure/live.py": {"_cdata": 5, "torch.utils._python_dispatch": 1, "torch.utils._pytree": 1},
    "measure/storages.py": {"_cdata": 1},
    "parallel/context/module.py": {
        "torch._C._current_graph_task_id": 1,
        "torch.nn.modules.batchnorm._NormBase": 1,
        "torch.nn.modules.conv._ConvNd": 1,
        "torch.nn.modules.pooling._AdaptiveAvgPoolNd": 1,
        "torch.nn.modules.pooling._AdaptiveMaxPoolNd": 1,
        "torch.nn.modules.pooling._AvgPoolNd": 1,
        "torch.nn.modules.pooling._LPPoolNd": 1,
        "torch.nn.modules.pooling._MaxPoolNd": 1,
    },
    "parallel/data/checks.py": {"_version": 1},
    "parallel/data/batch_norm.py": {"_buffers": 1, "_modules": 1, "torch.nn.modules.batchnorm._BatchNorm": 2},
    "parallel/data/plain.py": {"torch.autograd.Variable._execution_engine": 1},
    "parallel/pipeline/checks.py": {"torch.nn.modules.batchnorm._BatchNorm": 1},
    "parallel/pipeline/cuts.py": {"torch.utils._pytree": 1},
    "parallel/pipeline/interpreter.py": {"torch.utils._pytree": 1},
    "parallel/pipeline/linear.py": {"_backward_hooks": 1, "_post_accumulate_grad_hooks": 1},
    "parallel/pipeline/stage.py": {
        "_version": 2,
        "torch.ops.aten._unsafe_view": 1,
        "torch.utils._pytree": 1,
    },
    "parallel/replicator/__init__.py": {"torch.utils._pytree": 1},
    "parallel/replicator/graph.py": {
        "_cdata": 3,
        "_schema": 1,
        "torch._ops": 1,
        "torch._subclasses": 4,
        "torch.utils._python_dispatch": 1,
    },
    "parallel/tensor/layers.py": {
        "_backward_hooks": 1,
        "_backward_pre_hooks": 1,
        "_forward_hooks": 1,
        "_forward_pre_hooks": 1,
    },
    "parallel/zero/plain.py": {"torch._C._current_graph_task_id": 1},
    "parallel/zero/sharded/parameter_locations.py": {"_parameters": 1},
    "parallel/zero/sharded/unit.py": {
        "_backward_hooks": 2,
        "_parameters": 3,
        "torch._C._current_graph_task_id": 1,
        "torch.autograd.Variable._execution_engine": 1,
        "torch.utils._pytree": 1,
    },
    "training/deepspeed_engine.py": {"torch.utils._pytree": 1},
    "training/pipeline_engine.py": {"torch.utils._pytree": 1},
    "training/run.py": {"torch.utils._pytree": 1},
}


@pytest.mark.lint
def test_private_names_of_torch_are_those_that_are_listed():
    found = private_names(ROOT / "dtlib")
    changed = {file: found.get(file) for file in found.keys() | KNOWN.keys() if found.get(file) != KNOWN.get(file)}
    assert not changed, "run python -m tests.test_private_names, and change KNOWN"


if __name__ == "__main__":
    of = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dtlib"
    for file, names in private_names(of).items():
        print(f"    {file!r}: {dict(sorted(names.items()))},")
    print(count_lines(of), "lines")
