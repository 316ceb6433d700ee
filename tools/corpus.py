"""Where ``data/docstrings.tar.xz`` comes from: what libraries say of their functions and classes, as stories.

    def matrix_rank(A, tol=None):                     numpy.linalg.matrix_rank(A, tol)
        \"\"\"Return matrix rank of array.
                                                      Rank of the array is the number of singular values
        Rank of the array is the number of     -->    of the array that are greater than tol.
        singular values of the array that
        are greater than `tol`.                       @highlight

        Parameters                                    Return matrix rank of array
        \"\"\"

The article is name, arguments and the prose below the summary; the highlight is the summary. Run as

    python -m tools.corpus FOLDER ...

with folders in which these libraries are installed (``pip install --no-deps --target FOLDER numpy sympy ...``).
"""

import ast
import csv
import inspect
import io
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.workloads.stories import DATA

# Whole libraries are held out, with those that repeat each other's texts on one side.
TEST = ("aiohttp", "celery", "flax", "geopandas", "more-itertools", "optax", "shapely", "statsmodels", "tornado")
FINETUNE = "networkx"  # in neither: what a class trains the checkpoint on
TRAIN = (
    "anyio", "astropy", "babel", "bokeh", "boltons", "dask", "Django", "Flask", "fsspec", "fonttools", "ipykernel",
    "ipyparallel", "ipython", "joblib", "jupyter_client", "jupyter_server", "jupyterlab_server", "keras", "mpmath",
    "narwhals", "nbconvert", "nltk", "numba", "numpy", "packaging", "pandas", "plotly", "prompt_toolkit",
    "pymatgen", "pytest", "pytorch-lightning", "qiskit", "requests", "scikit-learn", "scipy", "Scrapy", "seaborn",
    "setuptools", "Sphinx", "SQLAlchemy", "sympy", "torch", "traitlets", "transformers", "Twisted", "urllib3",
    "Werkzeug", "xarray",
)  # fmt: skip
FREE = {"BSD": "BSD-3-Clause", "MIT": "MIT", "Apache": "Apache-2.0"}  # as metadata that are no expression say it
MOST = 1500  # stories of a library
FOREIGN = re.compile(r"(^|/)(_?vendor\w*|_?externals?|extern|_distutils|tests?|testing/_internal|bundled\w*)/")
SECTION = re.compile(r"(\w+ ?\w*)(\n *[-=~^*]{3,}|:{1,2} *(\n|$))|[:@]\w|>>>|\.\. |[-=+|*]{3}|[*•-] ")
MARKUP = [  # roles of reStructuredText around a name, with an optional target; what is marked as code; Epytext
    (re.compile(r":[\w:]+:`~?\.?([^`<]*?)\s*(<[^`]*>)?`"), r"\1"),
    (re.compile(r"`+([^`]*)`+_*"), r"\1"),
    (re.compile(r"\b[A-Z]\{([^{}]*)\}"), r"\1"),
]


def plain(text: str) -> str:
    """On one line, without markup."""
    for pattern, by in MARKUP:
        text = pattern.sub(by, text)
    return " ".join(text.replace("*", "").split())


def pair(docstring: str) -> tuple[str, str] | None:
    """Summary and prose of a docstring, or None where one of them is missing or is none."""
    first, *others = re.split(r"\n\s*\n", inspect.cleandoc(docstring).strip())
    summary, prose = plain(first).rstrip("."), []
    for paragraph in others:
        if SECTION.match(paragraph) or paragraph.startswith("  "):
            break
        prose.append(plain(paragraph))
    article = "\n\n".join(prose)
    # A summary is a sentence: not a signature, not several sentences, not a heading.
    sentence = re.match(r"[A-Z][\w'-]* \w", summary) and not re.search(r"\w\(.*\)|->|[.:;] |[=|{}\\<>]|:$", summary)
    if not sentence or not 3 <= len(summary.split()) <= 20 or len(article.split()) < 10:
        return None
    return None if re.search(r"[{}\\|]|[^\x20-\x7e\n]|={2}", article) else (summary, article)


def stories_of(module: str, source: str) -> Iterator[tuple[str, str, str]]:
    """Name, article and summary of everything in a module that has both."""

    def within(node, path):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{path}.{child.name}"
                if (docstring := ast.get_docstring(child)) and (found := pair(docstring)):
                    known = getattr(child, "args", None)
                    names = [a.arg for a in known.args if a.arg not in ("self", "cls")] if known else []
                    heading = f"{name}({', '.join(names)})" if known else name
                    yield name, f"{heading}\n\n{found[1]}", found[0]
                yield from within(child, name)

    yield from within(ast.parse(source), module)


def library(name: str, folders: list[str]) -> tuple[str, str, dict[str, str], list]:
    """Version, licence, texts of the licence, and the stories of an installed library.

    Raises:
        DtlibError: for one that is not there, or is under no licence that lets its texts be handed on.
    """
    found = next(iter(distributions(name=name, path=folders)), None)
    if found is None:
        raise DtlibError(f"{name} is not installed in {', '.join(folders)}.")
    told = [found.metadata[key] or "" for key in ("License-Expression", "License")]
    told += [line for line in found.metadata.get_all("Classifier", []) if line.startswith("License")]
    told = [line for line in told if line]
    licence = told[0] if len(told[0]) < 40 and found.metadata["License-Expression"] else None
    licence = licence or next((free for word, free in FREE.items() if any(word in line[:99] for line in told)), None)
    if licence is None or re.search(r"GPL|MPL", licence):
        raise DtlibError(f"{name} has the licence {told[0][:60]!r}: its texts cannot be handed on.")
    stories, licences = [], {}
    seen: Counter[str] = Counter()
    for file in sorted(found.files or (), key=str):
        path, place = str(file), Path(file.locate())
        if ".dist-info/" in path and re.search(r"licen[cs]e|copying|notice|authors", file.name, re.I):
            licences[file.name] = place.read_text(errors="replace")
        if not path.endswith(".py") or FOREIGN.search(path) or path.startswith(".."):
            continue
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        try:
            each = list(stories_of(module, place.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError):
            continue  # templates and samples of other encodings
        for story in each:
            seen[story[2]] += 1
            if seen[story[2]] <= 2:
                stories.append(story)
    step = max(1, len(stories) / MOST)
    stories = [stories[int(step * i)] for i in range(min(MOST, len(stories)))]
    return found.version, licence, licences, stories


def main(folders: list[str]) -> None:
    rows: list[tuple] = []
    files: dict[str, str] = {}
    known: set[str] = set()
    held = [(name, "test") for name in TEST] + [(FINETUNE, FINETUNE)]
    for name, split in [*held, *((name, "train") for name in TRAIN)]:
        version, licence, licences, stories = library(name, folders)
        files |= {f"licences/{name}/{file}": text for file, text in licences.items()}
        count = 0
        for path, article, summary in stories:
            text = re.sub(r"\W+", " ", article.split("\n\n", 1)[1]).lower()
            if summary.lower() + text[:60] in known or text[:120] in known:
                continue  # the same text again, also of a library on the other side
            known |= {summary.lower() + text[:60], text[:120]}
            where = split
            if split == FINETUNE:  # by module: what stands in one file is alike
                where += "/test" if path.split(".")[-2][-1] in "aehm" else "/train"
            file = f"{where}/{name}/{path}.story"
            count += file not in files  # a property's getter and setter have one name
            files[file] = f"{article}\n\n@highlight\n\n{summary}\n"
        rows.append((name, version, licence, split, count, f"https://pypi.org/project/{name}/{version}/"))
        print(*rows[-1])
    with tarfile.open(DATA / "docstrings.tar.xz", "w:xz", preset=9) as archive:
        for path, text in sorted(files.items(), key=lambda item: (item[0].startswith("l"), item[0])):
            entry, content = tarfile.TarInfo(path), text.encode()
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    with open(DATA / "docstrings.csv", "w", newline="") as table:
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(("library", "version", "licence", "split", "stories", "source"))
        rows.sort(key=lambda row: row[0].lower())
        writer.writerows(rows)
    print(Counter(path.split("/")[0] for path in files))


if __name__ == "__main__":
    main(sys.argv[1:])
