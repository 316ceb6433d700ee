"""What the cells of a track need, found without running them: names, on the side on which a cell runs.

A name that a cell uses must be defined by an earlier cell of the same side (a function's body: by any cell); a name
that is handed to ``lab`` as text, and the answer to an exercise, must be defined on the ranks.
"""

import ast
import builtins
import re
import symtable

from dtlib.lab.checks.exercise import EXERCISES

GIVEN = {*dir(builtins), "get_ipython", "display", "__name__"}
BOTH = ("notebook", "ranks")


def pieces(source: str):
    """(sides, code) of a cell: ``%%px`` and the line magic ``%px`` run on the ranks, ``%%px --local`` on both."""
    first, _, rest = source.partition("\n")
    if first.startswith("%%px"):
        yield BOTH if "--local" in first else BOTH[1:], rest
        return
    lines = source.splitlines()
    for line in lines:
        if line.startswith("%px "):
            yield BOTH[1:], line.removeprefix("%px ")
    yield BOTH[:1], "\n".join("" if line.startswith("%") else line for line in lines)


def names_in(statement: ast.stmt) -> tuple[set, set, set]:
    """Names that a statement needs at once, that its functions need when they are called, and that it defines."""
    at_once, later, defined = set(), set(), set()
    top = symtable.symtable(ast.unparse(statement), "cell", "exec")
    compound = hasattr(statement, "body")  # its own names may be bound before they are used
    own = names_outside_comprehensions(statement)
    for symbol in top.get_symbols():
        if symbol.get_name() not in own:  # from Python 3.12 on, a comprehension's names are listed here too
            continue
        bound = symbol.is_assigned() or symbol.is_imported()
        if bound:
            defined.add(symbol.get_name())
        if (symbol.is_referenced() and not (bound and compound)) or isinstance(statement, ast.AugAssign):
            at_once.add(symbol.get_name())

    def inside(table, deferred):
        for child in table.get_children():
            waits = deferred or (child.get_type() == "function" and not child.get_name().endswith(("comp", "genexpr")))
            used = {s.get_name() for s in child.get_symbols() if s.is_global() and s.is_referenced()}
            (later if waits else at_once).update(used - defined if compound else used)
            inside(child, waits)

    inside(top, False)
    return at_once, later, defined


def names_outside_comprehensions(statement: ast.stmt) -> set[str]:
    """All names of a statement, without those that only its comprehensions bind."""
    inner = {
        name.id
        for node in ast.walk(statement) if isinstance(node, ast.comprehension)
        for name in ast.walk(node.target) if isinstance(name, ast.Name)
    }  # fmt: skip
    found, left = set(), [statement]
    while left:
        node = left.pop()
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} - inner
            continue
        found |= {value for value in (getattr(node, key, None) for key in ("id", "name", "asname")) if value}
        if isinstance(node, ast.alias):
            found.add(node.name.partition(".")[0])
        left += ast.iter_child_nodes(node)
    return found


def texts_for_lab(statement: ast.stmt):
    """Texts that a call of ``lab`` gets, and names that ``lab.push`` defines on the ranks."""
    for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        if called.startswith("lab.") and called != "lab.predict":  # whose texts are names and answers
            pushed = {argument.arg for argument in call.keywords} if called == "lab.push" else set()
            texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield called, texts, pushed


def missing(cells: list[str], whole: list[str]) -> list[str]:
    """What these cells, a track of the notebook ``whole``, need and do not have: empty where the track is complete."""
    on_ranks = set()  # names that the whole notebook has there
    for source in whole:
        for sides, code in pieces(source):
            for statement in ast.parse(code).body:
                on_ranks |= names_in(statement)[2] if "ranks" in sides else set()
    found, deferred = [], []
    defined = {side: set(GIVEN) for side in BOTH}
    for number, source in enumerate(cells):
        for sides, code in pieces(source):
            for statement in ast.parse(code).body:
                at_once, later, new = names_in(statement)
                for side in sides:
                    found += [f"cell {number}: {name} in the {side}" for name in sorted(at_once - defined[side])]
                    deferred += [(number, name, side) for name in sorted(later)]
                    defined[side] |= new
                for called, texts, pushed in texts_for_lab(statement):
                    defined["ranks"] |= pushed
                    if called == "lab.check":
                        exercise = EXERCISES[texts[0]]
                        side = "ranks" if exercise.needs_ranks else "notebook"
                        wanted = {exercise.name}
                    else:
                        side, wanted = "ranks", {text for text in texts if re.fullmatch(r"\w+", text)} & on_ranks
                    found += [f"cell {number}: {name} in the {side}" for name in sorted(wanted - defined[side])]
    return found + [f"cell {n}: {name} in the {side}" for n, name, side in deferred if name not in defined[side]]
