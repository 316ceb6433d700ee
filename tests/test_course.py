"""The folder in which a learner works: laid out from the clone or from a wheel, kept, brought up to date."""

import re
import subprocess

import pytest

from dtlib.errors import DtlibError
from dtlib.lab import course
from dtlib.lab.engines import workshop
from tests.conftest import ROOT

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
    assert workshop.folder() == folder, "a notebook in it finds its engines' profile"
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

    assert [said for said in course.fresh("4") if "yours is" in said] == [
        f"{LECTURE} is new; yours is 04_data_parallel_yours.ipynb beside it."
    ]
    assert (folder / LECTURE).read_text() == "new" and course.open_folder()[1] == ""
    (folder / LECTURE).write_text("mine again")
    assert "yours is 04_data_parallel_yours2.ipynb" in " ".join(course.fresh("04_data_parallel.ipynb"))
    assert (folder / LECTURE).with_stem("04_data_parallel_yours").read_text() == "mine"


def test_a_course_is_not_laid_out_between_other_things(tmp_path, monkeypatch):
    (tmp_path / "thesis.tex").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DtlibError, match="has other things in it"):
        course.open_folder()
    (tmp_path / "thesis.tex").rename(tmp_path / "data")  # a file where a folder must go
    with pytest.raises(DtlibError, match="cannot be written"):
        course.lay_out(tmp_path)


def test_in_a_clone_learners_work_where_git_does_not_look(monkeypatch):
    for folder in (ROOT, ROOT / "notebooks" / "lectures"):
        monkeypatch.chdir(folder)
        assert course.working_folder() == ROOT / "work"
    ignored = subprocess.run(["git", "check-ignore", "-q", "work/" + LECTURE], cwd=ROOT)
    if ignored.returncode == 128:
        pytest.skip("not in a git checkout")
    assert ignored.returncode == 0


@pytest.mark.parametrize("page", ["notebooks/start.md", "README.md"])
def test_the_map_of_the_course_leads_to_every_notebook(page):
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert not missing, f"{page} has links that lead nowhere: {missing}"
    found = {(ROOT / page).parent.joinpath(link).resolve() for link in links}
    notebooks = {path for kind in ("lectures", "exercises") for path in (ROOT / "notebooks" / kind).glob("*.ipynb")}
    assert notebooks <= found, f"{page} does not name {sorted(path.name for path in notebooks - found)}"
