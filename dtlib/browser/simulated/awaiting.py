"""Rewrite a cell so that the ranks of one process can take turns.

``await`` is put before each operation, and functions that call an operation become asynchronous.
"""

import ast
from types import CodeType

from dtlib.browser.simulated.communicator import OPERATIONS

SINGLE = "reduce_scatter_single", "all_gather_single", "all_to_all_single"  # names in torch.distributed
WAITING_METHODS = (*OPERATIONS, *SINGLE, "wait", "done")  # methods that get an `await`


def compiled(source: str, file: str, awaited: set) -> tuple[CodeType, tuple[int, ...]]:
    """Return the code of a cell with ``await`` before each operation, and the numbers of these lines.

    ``awaited`` has the names of functions that must be awaited. Functions of this cell are added to it.

    Raises:
        SyntaxError: for invalid code, and for an operation in a place where ``await`` is not allowed.
    """
    tree = ast.parse(source, file)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    awaited.difference_update(node.name for node in functions)
    # A function that calls a waiting function waits too: repeat until no more are found.
    while more := {f.name for f in functions if f.name not in awaited and _waits(f, awaited)}:
        awaited |= more
    awaits = _Awaits(awaited, file)
    tree = awaits.visit(tree)
    # Show the value of the last line, as a notebook does.
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = tree.body[-1]
        last.value = ast.Call(ast.Name("_show", ast.Load()), [last.value], [])
    ast.fix_missing_locations(tree)
    code = compile(tree, file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return code, tuple(sorted(awaits.lines))


def _name(function) -> str:
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _waits(function, awaited) -> bool:
    # Calls inside a nested function count for that function only.
    inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef) and node is not function]
    hidden = {id(part) for node in inner for part in ast.walk(node)}
    return any(
        isinstance(node, ast.Call) and id(node) not in hidden and _is_waiting_call(node.func, awaited)
        for node in ast.walk(function)
    )


def _is_waiting_call(function, awaited) -> bool:
    return (isinstance(function, ast.Attribute) and function.attr in WAITING_METHODS) or _name(function) in awaited


class _Awaits(ast.NodeTransformer):
    """Replaces calls of operations by ``await _await(call)``, and their functions by asynchronous ones."""

    def __init__(self, awaited: set, file: str):
        self.awaited, self.file = awaited, file
        self.lines: set = set()

    def visit_Call(self, node):
        self.generic_visit(node)
        if not _is_waiting_call(node.func, self.awaited):
            return node
        self.lines.add(node.lineno)
        return ast.copy_location(ast.Await(ast.Call(ast.Name("_await", ast.Load()), [node], [])), node)

    def visit_Await(self, node):
        """Keep an ``await`` that the learner wrote, and add no second one."""
        node.value = self.visit(node.value)
        return node.value if isinstance(node.value, ast.Await) else node

    def visit_FunctionDef(self, node):
        waits = node.name in self.awaited and _waits(node, self.awaited)
        if waits and any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node)):
            self._refuse(node, "a function with `yield`", "return a list")
        self.generic_visit(node)
        if not waits:
            return node
        return ast.copy_location(ast.AsyncFunctionDef(**{name: getattr(node, name) for name in node._fields}), node)

    def visit_Lambda(self, node):
        if any(isinstance(part, ast.Call) and _is_waiting_call(part.func, self.awaited) for part in ast.walk(node)):
            self._refuse(node, "a lambda", "write a def")
        return node

    def visit_GeneratorExp(self, node):
        self.generic_visit(node)
        waits = any(isinstance(part, ast.Await) for part in ast.walk(node))
        return ast.copy_location(ast.ListComp(node.elt, node.generators), node) if waits else node

    def _refuse(self, node, where: str, cure: str):
        said = f"an operation in {where} cannot take turns in this page: {cure}"
        raise SyntaxError(said, (self.file, node.lineno, 0, ""))
