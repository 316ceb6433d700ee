"""What must agree across files: pins, checksums, versions, the floors of the house, and nothing from one machine."""

import ast
import hashlib
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dtlib
from dtlib.lab.lesson_files import notebooks
from tests import device_faults, mutations
from tests.cases import for_each
from tools.code_lines import budgets, by_package, code_lines

pytestmark = pytest.mark.lint
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Where conda-forge has another name for what PyPI calls so.
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}

# The house from the bottom to the top. A name stands for a module of dtlib, or for a package with all that is in it.
FLOORS = (
    ("errors", "files", "theory", "schedule"),
    ("planner",),
    ("world.machine", "world.processes", "world.until_parent_ends", "world.compiled", "world.loopback"),
    ("world.allocation", "world.forked", "world.forking"),
    ("world.launch",),
    ("world.zygote",),
    ("comm",),
    ("world",),
    ("gradients",),
    ("measure",),
    ("pi", "parallel", "horovod", "backend"),
    ("checkpoint",),
    ("recovery",),
    ("training", "workloads", "storage"),
    ("deepspeed",),
    ("lab",),
    ("lessons",),
    ("tour", "browser", "wall"),
    ("cli", "__main__"),
)

# What is not named here stands beside the communicator.
FLOOR_IN_COMM = {"call": 0, "types": 0, "numbers": 0, "link_types": 0, "watch": 1, "communicator": 2, "torch": 3}

# These have names of modules for another reason than to use them.
BY_NAME_ALONE = (
    "dtlib.world.zygote",  # what ranks will need, imported before they are forked
)


def dotted_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NOTEBOOKS = set(notebooks().values())  # sources of notebooks, which nothing imports
MODULES = {dotted_name(path): path for path in sorted((ROOT / "dtlib").rglob("*.py")) if path not in NOTEBOOKS}

LOCKS = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "requirements.lock").read_text(), re.M)
LOCKED = {
    canonicalize_name(name): version for name, version in reversed(LOCKS)
}  # of several, that of the oldest Python
TESTED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]


def test_the_lock_has_what_the_project_asks_for():
    asked = [
        *TESTED,
        *(each for extra in ("browser", "book", "hub") for each in PROJECT["optional-dependencies"][extra]),
    ]
    for each in map(Requirement, asked):
        assert each.specifier, f"{each}: say which versions it may run beside"
        locked = [version for name, version in LOCKS if canonicalize_name(name) == canonicalize_name(each.name)]
        assert any(version in each.specifier for version in locked), f"{each} is not what is locked: make lock"
    loose = [each for extra in PROJECT["optional-dependencies"].values() for each in extra if "==" not in each]
    assert not loose, f"an extra pins with name==version; these do not: {loose}"


def test_conda_environment_has_the_versions_of_the_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python = f"python {PROJECT['requires-python']}"
    packages = [line for line in environment["dependencies"] if line not in (python, "pip")]
    names = [canonicalize_name(Requirement(each).name) for each in TESTED]

    assert environment["channels"] == ["conda-forge"]
    assert python in environment["dependencies"]
    assert all(isinstance(line, str) for line in packages), "a pip: section would install a second Open MPI"
    assert sorted(packages) == sorted(f"{CONDA_NAMES.get(name, name)}=={LOCKED[name]}" for name in names)


def test_what_checks_a_commit_is_what_the_lock_has():
    of_ruff, of_this_clone = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert of_ruff["rev"] == f"v{LOCKED['ruff']}"
    assert [hook["entry"] for hook in of_this_clone["hooks"]] == [".venv/bin/mypy"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        (job,) = yaml.safe_load(workflow.read_text())["jobs"].values()
        commands = [step["run"].split() for step in job["steps"] if "run" in step]
        made = {name for command in commands if command[0] == "make" for name in command[1:]}
        assert commands and made <= targets, workflow


def test_table_of_data_has_every_file_and_its_checksum():
    folder = ROOT / "data"
    rows = [line.strip("| \n").split("|") for line in (folder / "README.md").open() if line.startswith("| `")]
    listed = {row[0].strip(" `"): row[-1].strip(" `") for row in rows}
    files = [path for path in folder.rglob("*") if path.is_file() and path != folder / "README.md"]
    present = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert listed == present
    assert len(rows) == len(listed), "a file is listed twice"


def test_citation_has_the_version_of_the_package():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == dtlib.__version__


def inside(package, module):
    return f"{module}.".startswith(f"{package}.")


def floor_of(module):
    for floor, names in enumerate(FLOORS):
        if any(inside(f"dtlib.{name}", module) for name in names):
            return floor
    pytest.fail(f"{module} has no floor: add it to FLOORS in tests/test_repository.py, above all that it imports.")


def module_of(name):
    """Where a dotted name is at home: dtlib.comm.types.as_array in dtlib.comm.types, dtlib.init in dtlib.world."""
    if name in MODULES:
        return name
    parent, _, attribute = name.rpartition(".")
    return dtlib._LAZY.get(attribute, parent) if parent == "dtlib" else module_of(parent)


@cache
def imports_of(module):
    """The modules of dtlib that a module imports anywhere, inside functions too."""
    path = MODULES[module]
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                names.update(alias.name for alias in node.names)
            case ast.ImportFrom():
                origin = resolve_name("." * node.level + (node.module or ""), package)
                full = {f"{origin}.{alias.name}" for alias in node.names}
                names.update(full & set(MODULES) or {origin}, full)
            case ast.Attribute(value=ast.Name(id="dtlib")):
                names.add(f"dtlib.{node.attr}")
    return frozenset(module_of(name) for name in names if name.startswith("dtlib.")) - {"dtlib", module}


@for_each(module=[name for name in MODULES if name != "dtlib"])
def test_imports_go_downward_only(module):
    imports = imports_of(module)
    upward = [other for other in imports if floor_of(other) > floor_of(module)]
    assert not upward, f"{module} imports what stands above it: {upward}"

    if inside("dtlib.parallel", module) and module != "dtlib.parallel":
        strategy = ".".join(module.split(".")[:3])  # dtlib.parallel.pipeline for all that is in it
        others = [other for other in imports if inside("dtlib.parallel", other) and not inside(strategy, other)]
        assert not others, f"{module} imports {others}: what strategies share belongs on the floor below"
    if inside("dtlib.horovod", module):
        others = [other for other in imports if inside("dtlib.parallel", other)]
        assert not others, f"{module} imports {others}: Horovod's API stands on the operations alone"


def file_imports():
    """Of each module of dtlib the modules that it imports anywhere, inside functions and by name in a string too.

    foreign.py has aliases of types for annotations alone, and imports none of them when it runs.
    """
    graph = {}
    for module, path in MODULES.items():
        strings = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MODULES
        }
        graph[module] = (imports_of(module) | {name for name in strings if "." in name}) & set(MODULES) - {module}
    graph["dtlib.lab.foreign"] = set()
    return graph


def test_no_import_circle_between_files():
    circle = left_in_circles(file_imports())
    assert not circle, f"these files import each other in a circle: {circle}"


def test_no_import_circle_between_packages():
    """Nor, in each package, between its files and its sub-packages, of which each counts as one."""
    graph, found = file_imports(), {}
    for name in BY_NAME_ALONE:
        graph[name] = imports_of(name)
    for package in [name for name, path in MODULES.items() if path.stem == "__init__"]:
        parts = {}
        for module in graph:
            if module.startswith(f"{package}."):
                others = {part_of(package, other) for other in graph[module] if other.startswith(f"{package}.")}
                part = part_of(package, module)
                parts.setdefault(part, set()).update(others - {part})
        found |= left_in_circles(parts)
    assert not found, f"these import each other in a circle: {found}"


def part_of(package, module):
    """``dtlib.comm.watch`` for ``dtlib.comm`` and all that is in ``dtlib.comm.watch``."""
    return ".".join(module.split(".")[: package.count(".") + 2])


def left_in_circles(graph):
    """Of a graph of imports what stands in a circle, or between two."""
    while ends := {each for each in graph if not graph[each] & set(graph)} or set(graph).difference(*graph.values()):
        graph = {each: imports for each, imports in graph.items() if each not in ends}
    return {each: sorted(imports & set(graph)) for each, imports in graph.items()}


def test_in_comm_words_stand_below_watchers_below_operations_below_torch():
    graph = {name: imports_of(name) for name in MODULES if name.startswith("dtlib.comm.")}
    # It asks for these where a tensor is on a GPU, and for torch's group.
    graph["dtlib.comm.communicator"] -= {"dtlib.comm.torch.nccl", "dtlib.comm.torch.group_on_communicator"}
    floor = {name: FLOOR_IN_COMM.get(name.split(".")[2], FLOOR_IN_COMM["communicator"]) for name in graph}
    upward = {name: sorted(other for other in graph[name] & set(graph) if floor[other] > floor[name]) for name in graph}
    assert not any(upward.values()), {name: others for name, others in upward.items() if others}


def test_files_are_short_enough_to_read():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES.values()}
    long = {name: lines for name, lines in lengths.items() if lines > 500}
    assert not long, f"a file of over 500 lines is too long to be read at once: {long}"
    del lengths["dtlib/deepspeed/utils.py"]  # DeepSpeed's name, as scripts import from there
    unclear = [name for name in lengths if Path(name).stem in ("helpers", "utils", "helper", "util", "misc", "common")]
    assert not unclear, f"these names do not say what is inside: {unclear}"


def test_no_package_is_larger_than_its_budget():
    """Lines of code; the table in CONTRIBUTING.md has the budgets, which only fall."""
    sizes, most = by_package(), budgets()
    assert sizes.keys() == most.keys()
    over = {name: (lines, most[name]) for name, lines in sizes.items() if lines > most[name]}
    assert not over, f"lines of code, and how many are allowed: {over}"
    assert code_lines('"""Words."""\n\n# A comment.\nx = """\nnot\na docstring"""  # y\n') == 3


@for_each(page=("how_a_gradient_travels", "how_a_hang_is_explained", "how_exercises_are_judged"))
def test_walks_of_the_docs_lead_where_they_say(page):
    """A step is written as `dtlib/file.py` `name`: that file has the name."""
    path = ROOT / "docs" / "explanation" / f"{page}.md"
    steps = re.findall(r"`(dtlib/[\w/]+\.py)`\s+`(\w+)`", path.read_text())
    assert steps, "the page has no walk"
    wrong = [(file, word) for file, word in steps if not re.search(rf"\b{word}\b", (ROOT / file).read_text())]
    assert not wrong, wrong


SPEAK_OF_FILES = ("add_a_lesson", "add_a_strategy", "how_ranks_live", "how_a_hang", "how_exercises", "how_a_gradient")


@for_each(page=("CONTRIBUTING.md", "README.md", *SPEAK_OF_FILES))
def test_files_and_names_that_are_spoken_of_exist(page):
    """A file by its path from the root, or by the end of its path in dtlib/; a folder; `dtlib.name`."""
    (path,) = [ROOT / page] if page.endswith(".md") else ROOT.glob(f"docs/*/{page}*.md")
    text = path.read_text()
    files = set(re.findall(r"(?<![\w./*:-])(?:[\w*]+/)*[\w*]+\.(?:py|c)\b", text))
    folders = set(re.findall(r"`((?:\w+/)+)`", text)) | set(re.findall(r"\bdtlib/(?:\w+/)*", text))
    made = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}  # by a command
    missing = [
        path for path in sorted(files | folders)
        if path.split("/")[0] not in made
        and not any(ROOT.glob(path.replace("lNN", "l03")))
        and not any(any((ROOT / folder).rglob(path)) for folder in ("dtlib", "tests/lessons", "tools"))
    ]  # fmt: skip
    for name in sorted(set(re.findall(r"`(dtlib(?:\.\w+)+)", text))):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    assert files and not missing, f"{page} speaks of what is not there: {missing}"


def test_import_of_dtlib_loads_neither_torch_nor_mpi():
    """Nor do the commands that start ranks: whoever waits for these waits for one import of torch, and not for two."""
    commands = "import dtlib.cli, dtlib.training.command, dtlib.tour, dtlib.planner.command"
    program = f"{commands}, sys; print(*{{'torch', 'mpi4py'}} & set(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert not loaded.strip(), f"import dtlib and its commands have to be lazy, but they load {loaded}"


def tracked_texts():
    """Path and text of every file that git tracks here, without those that hold no text."""
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        listing = ""
    if not listing:
        pytest.skip("not in a git checkout")
    for name in listing.split("\0"):
        path = ROOT / name
        if path.is_file() and b"\0" not in path.read_bytes():
            yield name, path.read_text(encoding="utf-8", errors="replace")


def test_no_file_names_a_path_of_one_machine():
    somewhere = re.compile(
        r"""(?:^|[\s"'`=:,(\[<>]|file://)(/(?:root|work)/|/(?:home|Users)/\w+/|/tmp/\w)\S*""", re.MULTILINE
    )
    found = []
    for name, text in tracked_texts():
        text = re.sub(r"\\n|\\u001b\[[\d;]*m", " ", text)  # line ends and colours as notebooks store them
        found += [f"{name}: {match[0].strip()}" for match in somewhere.finditer(text)]
    assert not found, f"paths that exist on one machine only: {found}"


def test_no_notebook_shows_a_warning():
    found = []
    for name, text in tracked_texts():
        for number, cell in enumerate(json.loads(text)["cells"] if name.endswith(".ipynb") else [], start=1):
            for output in cell.get("outputs", []):
                if output.get("name") == "stderr" or "Warning" in json.dumps(output):
                    found.append(f"{name}, cell {number}: {json.dumps(output)[:200]}")
    assert not found, f"outputs on stderr or with a warning: {found}"


@for_each(faults=(mutations.MUTATIONS, device_faults.FAULTS))
def test_each_planted_mistake_has_its_place(faults):
    """A mistake whose line has changed would be planted nowhere, and so be noticed by nobody."""
    lost = [row for row in faults if (ROOT / "dtlib" / row[0]).read_text(encoding="utf-8").count(row[1]) != 1]
    assert not lost, lost
