"""The folder in which a learner works: laid out from the clone or from a wheel, kept, brought up to date."""

import errno
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dtlib.cli import main
from dtlib.lab import course, server
from tests.books import made
from tests.cases import for_each, in_processes, refuses
from tests.conftest import ROOT
from tools import navigation
from tools import notebooks as build
from tools.navigation import name_of

LECTURE = "notebooks/lectures/04_data_parallel.ipynb"


def test_a_course_laid_out_in_an_empty_folder_keeps_what_the_learner_did(tmp_path, monkeypatch):
    source, folder = tmp_path / "source", tmp_path / "empty"
    for name, path in course.sources().items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).symlink_to(path.resolve())
    monkeypatch.setattr(course, "SOURCE", source)
    (folder / ".venv").mkdir(parents=True)
    monkeypatch.chdir(folder)
    _, said = course.open_folder()
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {course.RECORD, *course.sources()} and "files are new" in said
    assert course.folder() == folder, "a notebook in it finds its engines' profile"
    for inside in (folder / "notebooks" / "lectures", folder):
        monkeypatch.chdir(inside)
        assert course.open_folder() == (folder, ""), "a second time there is nothing to do"

    # The learner works on 04 and loses 02; then the course gets new versions of 03 and 04.
    (folder / LECTURE).write_text("mine")
    (folder / "notebooks/lectures/02_pi.ipynb").unlink()
    assert "1 file is new" in course.open_folder()[1] and (folder / LECTURE).read_text() == "mine"
    for name in (LECTURE, "notebooks/lectures/03_collectives.ipynb"):
        (source / name).unlink()
        (source / name).write_text("new")
    said = course.open_folder()[1]
    assert (folder / "notebooks/lectures/03_collectives.ipynb").read_text() == "new"
    assert (folder / LECTURE).read_text() == "mine" and LECTURE in said and "dtlib fresh" in said

    assert [said for said in course.restore("4") if "your copy is" in said] == [
        f"{LECTURE} is restored; your copy is yours_04_data_parallel.ipynb, in the same folder."
    ]
    assert (folder / LECTURE).read_text() == "new" and course.open_folder()[1] == ""
    (folder / LECTURE).write_text("mine again")
    assert "your copy is yours2_04_data_parallel.ipynb" in " ".join(course.restore("04_data_parallel.ipynb"))
    assert (folder / LECTURE).with_stem("yours_04_data_parallel").read_text() == "mine"


def test_a_course_is_not_laid_out_between_other_things(tmp_path, monkeypatch):
    (tmp_path / "thesis.tex").write_text("")
    monkeypatch.chdir(tmp_path)
    refuses("contains other files", course.open_folder)
    (tmp_path / "thesis.tex").rename(tmp_path / "data")  # a file where a folder must go
    refuses("cannot be written", course.copy_files, tmp_path)


@pytest.mark.parametrize("laid_out", [False, True], ids=["new", "laid out"])
def test_dtlib_lab_on_a_disk_that_is_read_only_says_so(tmp_path, monkeypatch, capsys, laid_out):
    monkeypatch.chdir(tmp_path)
    if laid_out:
        course.copy_files(tmp_path)

    def closed(before):
        def opens(path, how="r", *rest, **options):
            writes = how & (os.O_WRONLY | os.O_RDWR) if isinstance(how, int) else set(how) & set("wax+")
            if writes and str(path).startswith(str(tmp_path)):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return before(path, how, *rest, **options)

        return opens

    monkeypatch.setattr(server, "_keep_private", lambda: None)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("JupyterLab is started"))
    monkeypatch.setattr("builtins.open", closed(open))
    monkeypatch.setattr(os, "open", closed(os.open))
    assert main(["lab", "--no-browser"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and said.err.startswith("dtlib lab: ") and "(Read-only file system)" in said.err
    assert str(tmp_path) in said.err and "writable" in said.err and not said.out


def test_in_a_clone_learners_work_where_git_does_not_look(monkeypatch):
    for folder in (ROOT, ROOT / "notebooks" / "lectures"):
        monkeypatch.chdir(folder)
        assert course.working_folder() == ROOT / "work"
    ignored = subprocess.run(["git", "check-ignore", "-q", "work/" + LECTURE], cwd=ROOT)
    if ignored.returncode == 128:
        pytest.skip("not in a git checkout")
    assert ignored.returncode == 0


def test_the_map_of_the_course_leads_to_every_notebook():
    page = "notebooks/start.md"
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert not missing, f"{page} has links that lead nowhere: {missing}"
    found = {(ROOT / page).parent.joinpath(link).resolve() for link in links}
    notebooks = {path for kind in ("lectures", "exercises") for path in (ROOT / "notebooks" / kind).glob("*.ipynb")}
    assert notebooks <= found, f"{page} does not name {sorted(path.name for path in notebooks - found)}"


def test_the_start_page_has_the_minutes_that_the_lessons_say():
    assert (ROOT / course.START_PAGE).read_text() == build.start_page(ROOT), "run `make notebooks`"
    found = {name_of(source): navigation.minutes(source) for source in build.sources(ROOT)}
    assert found["04_data_parallel"] == 90 and found["05_large_batches"] == 45 and found["02_pi"] == 60
    assert found["03_collectives_exercises"] == 60 and found["08_tensor_and_hybrid_exercises"] == 60
    assert found["09_data_input_exercises"] == 50, "those of `five minutes each: ten minutes` count"
    lectures = sum(minutes for name, minutes in found.items() if not name.endswith("_exercises"))
    given, worked = (round(minutes / 30) / 2 for minutes in (lectures, sum(found.values()) - lectures))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"takes {given + worked:g} hours: {given:g} hours of lectures and {worked:g} hours of exercises" in readme
    rows = re.findall(r"\| (\d\d)(?:(?: to|,) (\d\d)) \| [^|]+ \| ([\d.]+) \|", readme)
    assert len(rows) == 5 and rows[0][0] == "00" and rows[-1][1] == "14"
    for (first, last, said), following in zip(rows, [*rows[1:], ("15",)], strict=True):
        assert int(last) + 1 == int(following[0]), "each lesson is in one row"
        total = sum(minutes for name, minutes in found.items() if first <= name[:2] <= last)
        assert abs(total / 60 - float(said)) < 0.3, f"{first} to {last} take {total} minutes"


@pytest.mark.lint
def test_every_notebook_leads_on_and_back():
    reached, books = set(), set()
    for source in build.sources(ROOT):
        for version in ("learner", "solved"):
            book, file = made(source, version), build.target(source, version)
            books.add(file)
            head, foot = book.cells[0].source.splitlines()[2], book.cells[-1].source
            assert head.startswith("[Start page](../start.md) · ")
            assert head.removesuffix(f" · {navigation.TUTOR}") in foot
            assert ("lab.fresh()" in foot) == ("AGENTS.md" in head) == (version == "learner")
            for link in re.findall(r"\]\(([^)]+)\)", head):
                assert (file.parent / link).exists(), f"{file.name}: {link} leads nowhere"
                reached.add((file.parent / link).resolve())
    assert reached >= {
        build.target(source, version) for source in build.sources(ROOT) for version in ("learner", "solved")
    }


def test_the_start_page_of_a_learner_counts_what_is_done(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    course.open_folder()
    page = tmp_path / course.START_PAGE
    course.write_start_page(tmp_path)
    assert "| lesson | minutes |" in page.read_text(), "no empty column"
    assert course.open_folder() == (tmp_path, ""), "ticks are no work of the learner's"
    for name in ("pi-streams", "pi-streams", "sum-for-eight", "first-sum"):
        course.done(name)
    assert "| lesson | done | minutes |" in page.read_text()
    assert row(page, "00 Start").split(" | ")[1] == "lecture 2 of 3"
    course.done("quiz 00", [4, 5])
    assert row(page, "00 Start").split(" | ")[1] == "lecture ✓"
    assert re.fullmatch(r"exercises 1 of \d", row(page, "02 MPI").split(" | ")[1])
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert all((page.parent / link).exists() for link in links)
    monkeypatch.chdir(ROOT)
    course.done("ring-build")
    assert not (ROOT / course.DONE).exists(), "a clone is no learner's folder"

    # A new version of the page comes in place of the old one, ticks and all.
    record = tmp_path / course.RECORD
    record.write_text(record.read_text().replace('"notebooks/start.md": "', '"notebooks/start.md": "0'))
    assert course.copy_files(tmp_path).endswith("1 file is new.") and "done" not in page.read_text().split("minutes")[0]


FULL_DISK = """
import resource, signal, sys
from dtlib.lab import course
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # bytes of a file: where a disk that is full would stop
for number in range(300):
    course.done(f"exercise-{number}")
"""


def test_a_disk_that_is_full_takes_no_progress(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    course.open_folder()
    (tmp_path / course.START_PAGE).write_text("")  # which alone would be too large
    ran = subprocess.run([sys.executable, "-c", FULL_DISK], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0 and "Your progress cannot be saved: " in ran.stdout, ran
    done = course.read_record()["done"]
    assert len(done) > 100 and done.keys() == {f"exercise-{number}" for number in range(len(done))}
    course.done("the-next")
    assert len(course.read_record()["done"]) == len(done) + 1


def test_notebooks_that_note_at_once_lose_nothing(tmp_path, monkeypatch):
    """Three processes note fifty exercises each; each of them sees what the others have noted."""
    monkeypatch.chdir(tmp_path)
    course.open_folder()
    noted = in_processes("abc", lambda name: [course.done(f"{name}-{i}") for i in range(50)] and 0)
    assert noted == [0] * 3 and len(course.read_record()["done"]) == 150
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))


OF_ONE_ENTRY = (
    '{"done": {"a": []}}', '{"done": {"a": 1}}', '{"scores": {"a": 3}}', '{"scores": {"a": {"value": 1}}}', "[1]",
    '{"scores": {"a": {"value": null, "par": 1, "unit": "B", "ranks": 4}}}',
    '{"scores": {"a": {"value": 1, "par": 0, "unit": "B", "ranks": 4}}}',
)  # fmt: skip


@for_each(
    text=[
        "3", "null", '{"done": null}', '{"done": 1}', "[[1]]", "[" * 100_000, "not json", "\x00\xff", *OF_ONE_ENTRY,
    ]
)  # fmt: skip
def test_a_damaged_record_is_kept_and_begun_again(text):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.chdir(folder)
        course.open_folder()
        (folder / course.RECORD).write_text(text)
        (folder / course.DONE).write_text(text, encoding="latin-1")
        course.open_folder()
        course.done("first-sum")
        assert course.read_record()["done"] == {"first-sum": True}
        (kept,) = folder.glob(f"{course.DONE}.damaged*")
        assert kept.read_text(encoding="latin-1") == text


def test_a_record_that_is_deep_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    course.open_folder()
    deep = "[" * 450 + "]" * 450
    (tmp_path / course.DONE).write_text(f'{{"done": {{}}, "other": {deep}}}')
    course.done("first-sum")
    assert course.read_record()["done"] == {"first-sum": True} and deep in (tmp_path / course.DONE).read_text()


def row(page, title):
    return next(line for line in page.read_text().splitlines() if line.startswith(f"| [{title}"))


def test_a_notebook_gives_itself_anew(tmp_path, monkeypatch, capsys):
    from dtlib import lab

    monkeypatch.chdir(tmp_path)
    course.open_folder()
    (tmp_path / LECTURE).write_text("mine")
    solved = tmp_path / LECTURE.replace("lectures", "solutions")
    solved.write_text("mine too")
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / LECTURE))
    lab.fresh()
    said = capsys.readouterr().out
    assert "your copy is yours_04_data_parallel.ipynb, in" in said and "Reload Notebook from Disk" in said
    assert (tmp_path / LECTURE).with_stem("yours_04_data_parallel").read_text() == "mine"
    assert (tmp_path / LECTURE).read_bytes() == (ROOT / LECTURE).read_bytes() and solved.read_text() == "mine too"
    for name, words in (("", "belongs in a notebook"), ("my.ipynb", "There is no lesson 'my")):
        monkeypatch.setenv("JPY_SESSION_NAME", name)
        refuses(words, lab.fresh)
