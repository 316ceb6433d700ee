"""Notebooks as their sources make them and as they are stored, each read once a session: for tests that only look."""

import json
from functools import cache

import nbformat
from nbformat.v4.rwbase import rejoin_lines

from tools import notebooks as build


@cache
def made(source, version, claims=False):
    """What ``build.notebook`` makes."""
    return build.notebook(source, version, claims)


@cache
def stored(source, version):
    """The notebook of a source, read without validation, which takes seconds."""
    return rejoin_lines(nbformat.from_dict(json.loads(build.target(source, version).read_text(encoding="utf-8"))))
