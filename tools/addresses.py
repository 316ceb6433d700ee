"""Addresses of the repository and of its site. They stand in pyproject.toml, under [project.urls], and nowhere else.

    python -m tools.addresses        writes the links at the top of README.md

On GitHub's machines the repository's own address is used, whatever stands there.
"""

import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
LINKS = re.compile(r"(?<=<!-- links -->\n).*?(?=\n<!-- /links -->)", re.S)


def urls() -> dict[str, str]:
    """The table [project.urls]: ``Repository``, ``Documentation``; empty until the project has addresses."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})


def repository() -> str:
    """The address of the repository, without a slash at its end; empty if none is known."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
    return urls().get("Repository", "").rstrip("/")


def links(known: dict[str, str]) -> str:
    """The line of links for README.md: to the hosted site where there is one, else to files of the repository."""
    site = known.get("Documentation", "").rstrip("/")
    places = {
        "Course": f"{site}/course/start.html" if site else "notebooks/start.md",
        "Documentation": site or "docs/index.md",
        "Teach it": f"{site}/how-to/teach_a_class.html" if site else "docs/how-to/teach_a_class.md",
    }
    places |= (
        {"Try it in a web page": f"{site}/page/index.html"}
        if site
        else {"Try it in a browser": "docs/how-to/use_the_web_page.md"}
    )
    return " · ".join(f"[{words}]({place})" for words, place in places.items())


def readme(text: str, known: dict[str, str]) -> str:
    """README.md with these links."""
    return LINKS.sub(lambda _: links(known), text)


if __name__ == "__main__":
    README.write_text(readme(README.read_text(encoding="utf-8"), urls()), encoding="utf-8")
