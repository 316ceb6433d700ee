"""tools/prose.py: which phrases are found, and where."""

import subprocess

import pytest

from tools import prose

pytestmark = pytest.mark.lint


@pytest.mark.parametrize(
    ("sentence", "kind"),
    [
        ("Return what a rank has.", "free relative"),
        ("For whoever reads it.", "who/whoever"),
        ("Draw it once more.", "anew"),
        ("Two files, of which one is empty.", "of which"),
        ("Lay out the tensors.", "lay/share out"),
        ("This comes before the others.", "come/go"),
        ("The rank is told its number.", "tell/meet"),
        ("A buffer that is to be freed.", "let go/hold to"),
        ("Both receive first.", "opens with a pronoun"),
        ("Ranks wait where there are none.", "where-clause"),
        ("Call the one that is newest.", "one after the other"),
        ("All-reduce the gradients of each bucket.", ""),
    ],
)
def test_phrases(sentence, kind):
    assert prose.phrases(sentence) == ([kind] if kind else [])


def test_a_changed_comment_is_refused_and_an_old_one_is_not(tmp_path, monkeypatch, capsys):
    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    code = tmp_path / "dtlib" / "code.py"
    code.parent.mkdir()
    code.write_text("number = 1  # Whoever calls it knows what it has.\n")
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "Begin")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "parts", lambda: {"code": [code]})
    monkeypatch.setattr(prose, "LIMITS", {"code": 1000.0})
    assert prose.main() == 0
    with code.open("a") as file:
        file.write("other = 2  # Whoever calls this one is wrong.\nthird = 3  # Whoever calls it.  prose: ok\n")
    assert list(prose.in_changes()) == ["dtlib/code.py:2: who/whoever: Whoever calls this one is wrong."]
    assert prose.main() == 1
    capsys.readouterr()
    monkeypatch.setattr(prose, "LIMITS", {"code": 1.0})
    assert prose.main() == 1 and "1.0 are allowed" in capsys.readouterr().out
