"""The conformance tables say what the code does, and the signatures in them are those of what is installed."""

import json

from tests.cases import for_each
from tools import conformance

STORED = json.loads((conformance.DATA / "conformance_signatures.json").read_text())


@for_each(surface=conformance.TITLES)
def test_each_row_is_the_same_or_says_how_it_differs(surface):
    rows = conformance.rows(surface)
    unexplained = [
        row[:3] for row in rows if row[3] not in ("same", "differs", "refused") or (row[3] != "same") != bool(row[4])
    ]
    assert not unexplained, "say why in tools/data/conformance_words.json"
    stored = (conformance.FOLDER / f"{surface}.md").read_text()
    assert stored == conformance.table(surface), "run `python -m tools.conformance`"
    here = {(name, argument) for name, argument, *_ in rows}
    said = {key for key in conformance.WORDS[surface] if not key.startswith("*")}
    strangers = [key for key in said if (key.partition("(")[0], key.partition("(")[2].rstrip(")")) not in here]
    assert not strangers, "words about rows that are not there"


@for_each(surface=conformance.TITLES)
def test_what_is_refused_is_not_there(surface):
    for name, argument, _, verdict, _words in conformance.rows(surface):
        ours = conformance.find(conformance.ours_of(surface, name))
        if verdict == "refused" and argument and ours is not None and not isinstance(ours, conformance.Refused):
            assert argument not in (conformance.signature(ours) or ()), (name, argument)
        if verdict == "refused" and not argument:
            assert ours is None or isinstance(ours, conformance.Refused), name


def test_signatures_of_torch_are_those_of_the_installed_one():
    installed = {surface: found for surface in conformance.TITLES if (found := conformance.signatures_of(surface))}
    assert "torch" in installed
    for surface, found in installed.items():
        assert found == STORED[surface], "python -m tools.conformance --signatures"
