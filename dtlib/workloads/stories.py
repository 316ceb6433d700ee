"""Read articles with summaries, in the file formats of CNN/DailyMail.

    *.story     the article, then for each highlight "@highlight" and a sentence
    *.parquet   rows with the columns article, highlights, id

Broken stories are left out and reported; the other stories are used.
"""

import tarfile
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dtlib.errors import DtlibError

DATA = Path(__file__).parents[1] / "course" / "data"
EMBEDDED = DATA / "docstrings.tar.xz"
ENDINGS = (".story", ".parquet")
COLUMNS = ("article", "highlights")
WHERE = (
    "CNN/DailyMail has .story files at https://cs.nyu.edu/~kcho/DMQA/ and Parquet files at "
    "https://huggingface.co/datasets/abisee/cnn_dailymail."
)
TEST_SLICE = 10  # if no file or folder is named test, one of this many stories is for the test


class Story(NamedTuple):
    """An article and its summary."""

    name: str
    article: str
    summary: str


class Broken(NamedTuple):
    """A report of a story, or a file of stories, that was left out, with the reason."""

    where: str
    why: str


def story(name: str, text: str) -> Story | Broken:
    """Parse the text of a ``.story`` file; each highlight becomes a sentence of the summary."""
    article, *highlights = (each.strip() for each in text.split("@highlight"))
    return _story(name, article, "\n".join(highlights))


def _story(name: str, article, highlights) -> Story | Broken:
    if not isinstance(article, str) or not isinstance(highlights, str):
        return Broken(name, "has no text in its columns article and highlights")
    lines = [line.strip() for line in highlights.split("\n") if line.strip()]
    if len(lines) > 1:
        lines = [line if line[-1] in ".!?" else f"{line}." for line in lines]
    if not lines or not article.strip():
        return Broken(name, "has no article" if lines else "has no @highlight")
    return Story(name, article.strip(), " ".join(lines))


def embedded(split: str) -> list[Story]:
    """Return the stories of dtlib's own corpus.

    ``split`` is ``train``, ``test``, ``networkx/train`` or ``networkx/test``.
    """
    return list(_embedded()[split])


@cache
def _embedded() -> dict[str, list[Story]]:
    """Return the stories by split; files of the archive are named SPLIT/LIBRARY/NAME.story."""
    found: dict = {}
    with tarfile.open(EMBEDDED) as archive:
        for member in archive:
            split, library, name = member.name.rsplit("/", 2)
            if split != "licences":
                opened = archive.extractfile(member)
                assert opened is not None  # None only for folders and links
                text = opened.read().decode()
                found.setdefault(split, []).append(story(f"{library}/{name}", text))
    return found


def spread(found: list[Story], count: int) -> list[Story]:
    """Return at most ``count`` stories, at equal distances in the list; 0 means all."""
    return [found[at * len(found) // count] for at in range(count)] if 0 < count < len(found) else found


def read_folder(folder: str) -> tuple[list[Story], list[Story], list[Broken]]:
    """Return training stories, test stories, and reports of broken stories.

    A file is for the test if its name, or the name of a folder above it, begins with ``test``. Files with ``val`` or
    ``dev`` are not used. If no name begins with ``test``, a hash of each story's name decides, so that all ranks and
    runs divide the stories in the same way.

    Raises:
        DtlibError: if the folder does not exist, or has no such files, no training stories or no test stories.
    """
    top = Path(folder).expanduser()
    if not top.is_dir():
        raise DtlibError(f"There is no folder {folder!r}. {WHERE}")
    paths = sorted(path for path in top.rglob("*") if path.suffix in ENDINGS and path.is_file())
    if not paths:
        raise DtlibError(f"The folder {folder!r} has no {', '.join(ENDINGS)} files in it. {WHERE}")
    train, test, broken = [], [], []
    labelled = any(_role(path, top) == "test" for path in paths)
    for path in paths:
        if (role := _role(path, top)) in ("val", "dev"):
            continue
        for one in _read(path):
            if isinstance(one, Broken):
                broken.append(one)
            elif role == "test" or (not labelled and zlib.crc32(one.name.encode()) % TEST_SLICE == 0):
                test.append(one)
            else:
                train.append(one)
    if not labelled and len(train) > 1 and not test:
        test.append(train.pop())
    if not train or not test:
        why = f"; {broken[0].where} {broken[0].why}" if broken else ""
        raise DtlibError(
            f"The folder {folder!r} has {len(train)} good stories to train on and {len(test)} to test with, and "
            f"{len(broken)} broken ones{why}. {WHERE}"
        )
    return train, test, broken


def _role(path: Path, top: Path) -> str | None:
    names = [name.lower() for name in path.relative_to(top).parts]
    return next((role for role in ("test", "val", "dev", "train") if any(n.startswith(role) for n in names)), None)


def _read(path: Path) -> Iterator[Story | Broken]:
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        else:
            yield story(str(path), path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        yield Broken(str(path), f"is not UTF-8 (byte {error.start})")
    except OSError as error:
        yield Broken(str(path), f"cannot be read ({error.strerror or error})")


def _row(where: str, row) -> Story | Broken:
    one = _story(where, *(row.get(column) for column in COLUMNS))
    return one._replace(name=str(row.get("id") or where)) if isinstance(one, Story) else one


def _parquet(path: Path) -> Iterator[Story | Broken]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DtlibError(f"{path} needs pyarrow to be read: pip install pyarrow.") from None
    try:
        file = parquet.ParquetFile(path)
        if missing := [column for column in COLUMNS if column not in file.schema_arrow.names]:
            yield Broken(str(path), f"has no column {' and no column '.join(missing)}")
            return
        columns = [name for name in (*COLUMNS, "id") if name in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield _row(f"{path} row {number}", row)
    except ArrowException as error:
        yield Broken(str(path), f"is not a complete Parquet file ({str(error)[:80]})")
