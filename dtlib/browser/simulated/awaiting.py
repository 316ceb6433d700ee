"""``await`` is put before each operation of a cell, and functions that call one become asynchronous, so that ranks of
one process can take turns."""

import ast
from types import CodeType

from dtlib.browser.simulated.communicator import OPERATIONS

SINGLE = "reduce_scatter_single", "all_gather_single", "all_to_all_single"  # names of torch.distributed
TAKE_TURNS = (*OPERATIONS, *SINGLE, "wait", "done")  # methods before which `await` is put


def compiled(source: str, file: str, take_turns: set) -> tuple[CodeType, tuple[int, ...]]:
    """The code of a cell with ``await`` where a rank may have to wait, and the lines where that is; ``take_turns`` are
    the names of functions that have to be awaited, those of former cells and, afterwards, of this one.

    Raises:
        SyntaxError: also for an operation where no ``await`` can stand.
    """
    tree = ast.parse(source, file)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    take_turns.difference_update(node.name for node in functions)
    while more := {f.name for f in functions if f.name not in take_turns and _waits(f, take_turns)}:
        take_turns |= more
    awaits = _Awaits(take_turns, file)
    tree = awaits.visit(tree)
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = tree.body[-1]
        last.value = ast.Call(ast.Name("_show", ast.Load()), [last.value], [])
    ast.fix_missing_locations(tree)
    code = compile(tree, file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return code, tuple(sorted(awaits.lines))


def _name(function) -> str:
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _waits(function, take_turns) -> bool:
    inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef) and node is not function]
    hidden = {id(part) for node in inner for part in ast.walk(node)}
    return any(
        isinstance(node, ast.Call) and id(node) not in hidden and _gives_way(node.func, take_turns)
        for node in ast.walk(function)
    )


def _gives_way(function, take_turns) -> bool:
    return (isinstance(function, ast.Attribute) and function.attr in TAKE_TURNS) or _name(function) in take_turns


class _Awaits(ast.NodeTransformer):
    def __init__(self, take_turns: set, file: str):
        self.take_turns, self.file = take_turns, file
        self.lines: set = set()

    def visit_Call(self, node):
        self.generic_visit(node)
        if not _gives_way(node.func, self.take_turns):
            return node
        self.lines.add(node.lineno)
        return ast.copy_location(ast.Await(ast.Call(ast.Name("_turn", ast.Load()), [node], [])), node)

    def visit_Await(self, node):
        """Where the learner has written ``await``, it stands already."""
        node.value = self.visit(node.value)
        return node.value if isinstance(node.value, ast.Await) else node

    def visit_FunctionDef(self, node):
        waits = node.name in self.take_turns and _waits(node, self.take_turns)
        if waits and any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node)):
            self._refuse(node, "a function with `yield`", "return a list")
        self.generic_visit(node)
        if not waits:
            return node
        return ast.copy_location(ast.AsyncFunctionDef(**{name: getattr(node, name) for name in node._fields}), node)

    def visit_Lambda(self, node):
        if any(isinstance(part, ast.Call) and _gives_way(part.func, self.take_turns) for part in ast.walk(node)):
            self._refuse(node, "a lambda", "write a def")
        return node

    def visit_GeneratorExp(self, node):
        self.generic_visit(node)
        waits = any(isinstance(part, ast.Await) for part in ast.walk(node))
        return ast.copy_location(ast.ListComp(node.elt, node.generators), node) if waits else node

    def _refuse(self, node, where: str, cure: str):
        said = f"an operation in {where} cannot take turns in this page: {cure}"
        raise SyntaxError(said, (self.file, node.lineno, 0, ""))
