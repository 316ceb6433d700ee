"""``dtlib export ddp``: a strategy's plain core as one file that torchrun runs with torch alone.

It is put together from what is read in class: the plain core as it stands, torch.distributed under dtlib's names
(communicator.py), and a small model that it trains, on ranks and in one process (demos.py). Of each only what is used
stays. A plain core's checks, and its records, need dtlib: they go, and the file says so.
"""

import ast
import re
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.files import read_text

# A row a strategy: the folder of its plain core, what of demos.py trains by it, and the model of one process.
EXPORTS = {
    "ddp": ("data", "data_parallel(comm, x, y)", "perceptrons"),
    "zero1": ("zero", "sharded(comm, x, y, Stage1)", "perceptrons"),
    "zero2": ("zero", "sharded(comm, x, y, Stage2)", "perceptrons"),
    "zero3": ("zero", "sharded(comm, x, y, Stage3)", "perceptrons"),
    "gpipe": ("pipeline", 'pipelined(comm, x, y, "gpipe")', "perceptrons"),
    "1f1b": ("pipeline", 'pipelined(comm, x, y, "1f1b")', "perceptrons"),
    "tensor": ("tensor", "tensor_parallel(comm, x, y)", "perceptrons"),
    "context": ("context", "context_parallel(comm, x, y)", "Attention"),
    "expert": ("expert", "expert_parallel(comm, x, y)", "Mixture"),
}

MOST_LINES = 150
_HEAD = '''"""{about}

Written by `dtlib export {name}` from dtlib/parallel/{strategy}/plain.py, whose checks of its contract are left out.
It needs torch alone: torchrun --nproc-per-node 3 FILE
"""
'''
_CALL = 'if __name__ == "__main__":\n    main(Communicator, lambda comm, x, y: {build}, {model})\n'


def exported(name: str) -> str:
    """The text of the file.

    Args:
        name: a key of ``EXPORTS``.
    """
    if name not in EXPORTS:
        raise DtlibError(f"There is no export {name!r}: choose one of {', '.join(EXPORTS)}.")
    strategy, build, model = EXPORTS[name]
    files = "export/communicator.py", f"parallel/{strategy}/plain.py", "export/demos.py"
    sources = [read_text(Path(__file__).parents[1] / file) for file in files]  # and nothing is imported
    call = _CALL.format(build=build, model=model)
    imports, statements = _used([_without_dtlib(source) for source in sources], call)
    about, dense = (
        (ast.get_docstring(ast.parse(sources[1])) or "").replace("\\", "\\\\"),
        [re.sub(r"\n\n+", "\n", each) for each in statements],
    )
    title = about.partition("\n")[0]
    for words, parts in ((about, statements), (title, statements), (title, dense)):  # the first that is short enough
        head = _HEAD.format(about=words, name=name, strategy=strategy)
        text = "\n\n".join([f"{head}\n{imports}", *parts, call])
        if text.count("\n") <= MOST_LINES:
            break
    return text


def _without_dtlib(source: str) -> str:
    """A module's source without the statements that need what it has from dtlib, or a check; comments stay.

    ``as_communicator(comm)`` becomes ``comm``, ``DtlibError`` ``ValueError``; what stands in a ``with`` stays.
    """
    source = re.sub(r"\bas_communicator\((\w+)\)", r"\1", source).replace("DtlibError(", "ValueError(")
    tree, lines = ast.parse(source), source.splitlines()
    gone: set[int] = set()
    froms = [(node, node.module or "") for node in tree.body if isinstance(node, ast.ImportFrom)]
    imports = [node for node, module in froms if module.startswith("dtlib")]
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check")]
    others = [
        node for node, module in froms if node in imports and not module.startswith(("dtlib.parallel", "dtlib.export"))
    ]
    foreign = {"contract", "asked", "members", *(node.name for node in checks)}
    foreign |= {alias.name for node in others for alias in node.names} - {"Communicator"}  # the file has one

    def goes(node) -> bool:
        """Mark lines that go; whether nothing of this statement stays."""
        if isinstance(node, ast.With) and foreign & _names(*node.items):
            gone.update(range(node.lineno, node.body[0].lineno))
            for number in range(node.body[0].lineno, (node.end_lineno or 0) + 1):
                lines[number - 1] = lines[number - 1].removeprefix("    ")
            return all([goes(each) for each in node.body])
        blocks = [*getattr(node, "body", []), *getattr(node, "orelse", [])]
        asks = isinstance(node, ast.If) and foreign & _names(node.test)
        inside = all([goes(each) for each in blocks]) if blocks else bool(foreign & _names(node))
        whole = bool(asks) or node in checks or inside
        if whole and isinstance(node, ast.FunctionDef) and node not in checks:
            first = node.body[0]
            lines[first.lineno - 1] = " " * first.col_offset + "pass"
            gone.discard(first.lineno)
            return False
        if whole or node in imports:
            gone.update(range(node.lineno, node.end_lineno + 1))
        return whole

    for node in tree.body:
        goes(node)
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in gone)


def _used(sources: list[str], call: str) -> tuple[str, list[str]]:
    """Imports, and statements in their order: what ``call`` needs of these modules. Of the class ``Communicator`` only
    methods that are called stay."""
    statements = [(node, source.splitlines()) for source in sources for node in ast.parse(source).body]
    needed, before = _names(ast.parse(call)), None
    while needed != before:
        before = set(needed)
        for node, _ in statements:
            if needed & _defined(node):
                needed |= _names(*_parts(node, needed))
    imports: dict[str, set[str]] = {}
    texts = []
    for node, lines in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {ast.unparse(alias) for alias in node.names if (alias.asname or alias.name) in needed}
            imports.setdefault(getattr(node, "module", ""), set()).update(names)
        elif needed & _defined(node):
            parts = ["\n".join(lines[part.lineno - 1 : part.end_lineno]) for part in _parts(node, needed)]
            texts.append(parts[0] if len(parts) == 1 else "class Communicator:\n" + "\n\n".join(parts))
    lines = [f"import {name}" for name in sorted(imports.pop("", ()))]
    lines += [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items()) if names]
    return "\n".join(lines), texts


def _defined(node) -> set[str]:
    targets = _names(*node.targets) if isinstance(node, ast.Assign) else set()
    return {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else targets


def _parts(node, needed: set[str]) -> list:
    if getattr(node, "name", "") != "Communicator":
        return [node]

    def name(part) -> str:
        return ast.unparse(part.target) if isinstance(part, ast.AnnAssign) else getattr(part, "name", "__init__")

    return [part for part in node.body if name(part) in {"__init__", *needed}]


def _names(*nodes) -> set[str]:
    """Names that stand in these, and attributes, but for those of torch.distributed itself."""
    walked = [node for each in nodes for node in ast.walk(each)]
    names = {node.id for node in walked if isinstance(node, ast.Name)}
    return names | {n.attr for n in walked if isinstance(n, ast.Attribute) and ast.unparse(n.value) != "dist"}
