"""Every public function says what it takes and returns, and none of it is Any; mypy (`make lint`) looks whether it is
true."""

import ast
from pathlib import Path

import pytest

from tests.cases import for_each
from tests.test_repository import MODULES

pytestmark = pytest.mark.lint
ROOMS = {}
for module, path in MODULES.items():
    room = [*module.split("."), "dtlib"][1]
    if room != "lessons":
        ROOMS.setdefault(room, []).append(path)


def functions(body: list, prefix: str = "", in_class: bool = False):
    """Public functions, and methods of public classes, with what they have in front of their arguments."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from functions(node.body + getattr(node, "orelse", []), prefix, in_class)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions(node.body, f"{prefix}{node.name}.", True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            special = node.name.startswith("__") and node.name.endswith("__")
            if not node.name.startswith("_") or special:
                yield prefix + node.name, node, in_class


def gaps(text: str) -> list[str]:
    """What a module leaves open: name and argument, or ``return``."""
    found = []
    for name, node, in_class in functions(ast.parse(text).body):
        static = any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)
        given = node.args.posonlyargs + node.args.args
        given = given[in_class and not static :] + node.args.kwonlyargs
        parts = {each.arg: each.annotation for each in (*given, node.args.vararg, node.args.kwarg) if each}
        if node.name != "__init__":
            parts["return"] = node.returns
        for part, annotation in parts.items():
            if annotation is None or "Any" in {getattr(one, "id", "") for one in ast.walk(annotation)}:
                found.append(f"{name}: {part}")
    return found


@for_each(room=ROOMS)
def test_public_names_are_annotated(room):
    found = {str(path): gaps(path.read_text()) for path in ROOMS[room]}
    assert not {path: names for path, names in found.items() if names}


def test_a_gap_is_found():
    text = "def f(x, *y: int, z: Any = 0): ...\nclass A:\n    def g(self, x: int): ...\n    def _h(self, x): ..."
    assert gaps(text) == ["f: x", "f: z", "f: return", "A.g: return"]
    assert not gaps("def f(x: int, *, y: dict[str, int]) -> None: ...\ndef _g(x): ...")
    assert len(ROOMS) > 10 and all(isinstance(path, Path) for path in ROOMS["comm"])
