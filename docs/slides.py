"""One deck a lesson: ``make slides`` writes notebooks/slides/NN_*.html from the solved lectures, with their figures.

A deck is one file that needs no network: arrow keys, space, Home and End turn its slides, a click too; printed, each is
a page. What becomes a slide is a rule, so that a lecture that changes changes its deck:

    title          the lecture's title and its questions
    ## heading     its first sentences, and the section's first figure, or else its first short code
                   (or, where it has neither, what it has predicted, or the first column of its table)
    more figures   of a section, each with the sentence before it, as long as there is room
    summary        its points

git ignores the decks, as they hold nothing that the stored notebooks do not hold: they cannot be old.
"""

import re
import shutil
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

import mistune
import nbformat
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks" / "slides"
SLIDES, WORDS, LINES = 12, 40, 12  # the most of a deck; the most of a slide
NOT_SHOWN = ("References", "Summary", "If something goes wrong")
_IMAGE = re.compile(r'<img alt="[^"]*" src="data:image/svg[^>]*>')
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
# What a room cannot learn from: imports, files, and cells that only ask for something to be shown.
_ADMINISTRATION = re.compile(r"\bimport\b|\bopen\(|\bpublished\(|\blab\.table\(|^(%%px\n)?(\w+ = )?[\w.]+\([^\n]*\)$")
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body {{ margin: 0; background: #ddd; font: 32px/1.35 "DejaVu Sans", Verdana, sans-serif; color: #111 }}
section {{ box-sizing: border-box; width: 1280px; height: 720px; padding: 44px 60px 40px; margin: 0 auto 16px;
  background: white; overflow: hidden; position: relative; display: flex; flex-direction: column; gap: 18px }}
.turned section {{ display: none; position: absolute; left: 0; top: 0; margin: 0; transform-origin: 0 0 }}
.turned section.here {{ display: flex }}
h1, h2, p, ul, pre, figure {{ margin: 0 }}
h1 {{ font-size: 60px; margin-top: 90px }} h2 {{ font-size: 42px; color: #0072B2 }}
section:not(:has(figure, pre)) {{ font-size: 40px }}
ul {{ padding-left: 1.1em }} li {{ margin-bottom: 8px }}
code {{ font: 0.9em "DejaVu Sans Mono", Menlo, Consolas, monospace }}
pre {{ line-height: 1.35; font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; border-left: 6px solid #0072B2;
  padding-left: 18px }}
figure {{ flex: 1; min-height: 0; display: flex }}
figure img {{ flex: 1; min-width: 0; object-fit: contain }}
footer {{ position: absolute; right: 30px; bottom: 10px; font-size: 18px; color: #555 }}
@page {{ size: 1280px 720px; margin: 0 }}
@media print {{ .turned section {{ display: flex; position: relative; transform: none !important;
  break-after: page }} }}
</style><body>
{slides}
<script>
const slides = [...document.querySelectorAll("section")];
let at = Math.min(Math.max(parseInt(location.hash.slice(1)) || 1, 1), slides.length) - 1;
function show(number) {{
  at = Math.min(Math.max(number, 0), slides.length - 1);
  const scale = Math.min(innerWidth / 1280, innerHeight / 720);
  slides.forEach((slide, n) => {{
    slide.classList.toggle("here", n == at);
    slide.style.transform = `translate(${{(innerWidth - 1280 * scale) / 2}}px, 0) scale(${{scale}})`;
  }});
  history.replaceState(null, "", "#" + (at + 1));
}}
const steps = {{ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1,
               Home: -slides.length, End: slides.length}};
addEventListener("keydown", event => {{
  if (steps[event.key]) {{ event.preventDefault(); show(at + steps[event.key]); }}
}});
addEventListener("click", event => show(at + (event.clientX < innerWidth / 3 ? -1 : 1)));
addEventListener("resize", () => show(at));
document.body.classList.add("turned");
show(at);
</script></body></html>
"""


@dataclass
class Slide:
    """``text`` is Markdown. ``rank`` says what goes first where a deck would be too long: the highest."""

    title: str
    text: str = ""
    code: str = ""
    language: str = "python"
    figure: str = ""  # an <img> with its own data
    rank: int = 0

    @property
    def words(self) -> int:
        """What a room has to read beside figure and code."""
        return len(re.findall(r"\w[\w'.,%-]*", f"{self.title} {self.text}"))


def deck(book) -> list[Slide]:
    """The slides of an executed lecture, in its order."""
    sections = _sections(book)
    opening = sections[0][1][0].source
    questions = re.search(r"\*\*Questions\.\*\*(.*?)(?:\n\n|\Z)", opening, re.S)
    asked = re.findall(r"[^?]+\?", " ".join(questions[1].split())) if questions else []
    first = _that_fit(re.search(r"^# (.+)$", opening, re.M)[1], [question.strip() for question in asked])[0]
    slides = [
        slide for title, cells in sections if title not in (None, *NOT_SHOWN) for slide in _of_section(title, cells)
    ]
    summary = next((_points(cells) for title, cells in sections if title == "Summary"), [])
    last = _that_fit("Summary", summary)
    kept = sorted(slides, key=lambda slide: slide.rank)[: SLIDES - 1 - len(last)]
    return [first, *(slide for slide in slides if any(slide is other for other in kept)), *last]


def _sections(book) -> list[tuple[str | None, list]]:
    """(heading, its cells); before the first one the heading is None. A cell with several headings is several."""
    found = [(None, [])]
    for cell in book.cells:
        if cell.cell_type != "markdown":
            found[-1][1].append(cell)
            continue
        begun, *others = re.split(r"^## ", cell.source, flags=re.M)
        if begun.strip():
            found[-1][1].append(nbformat.v4.new_markdown_cell(begun))
        for other in others:
            title, _, rest = other.partition("\n")
            found.append((title.strip(), [nbformat.v4.new_markdown_cell(rest)]))
    return found


def _of_section(title: str, cells: list) -> list[Slide]:
    prose, codes, figures, question, named = [], [], [], "", []
    for cell in cells:
        if cell.cell_type == "markdown":
            codes += [(code, language) for language, code in _FENCE.findall(cell.source) if _is_short(code)]
            for paragraph in re.split(r"\n\s*\n", _FENCE.sub("", cell.source).strip()):
                if "**Predict" in paragraph:
                    question = question or paragraph[paragraph.index("**Predict") :].replace("Replace `None`.", "")
                elif paragraph.startswith("|"):
                    named = named or re.findall(r"^\| ?(\w[^|:(]*\w)[^|]*\|", paragraph, re.M)[1:]
                elif re.match(r"[A-Za-z`*\"\d]", paragraph) and not paragraph.startswith(("**Your turn", "**Discuss")):
                    prose.append(paragraph)
        else:
            code = re.sub(r"^# ?(?=%)", "", cell.source)
            is_answer = "solution" in cell.metadata.get("tags", [])
            if _is_short(code) and not is_answer and not _ADMINISTRATION.search(code):
                codes.append((code, "python"))
            for output in cell.outputs:
                image = _IMAGE.search(output.get("data", {}).get("text/html", ""))
                if image:
                    figures.append((image[0], prose[-1] if prose else ""))
    text = _sentences(title, prose)
    if figures:
        (figure, _), *others = figures
        slide = Slide(title, text, figure=figure)
    elif codes:
        (code, language), others = codes[0], []
        slide = Slide(title, text, code.strip("\n"), language, rank=1)
    else:
        below = _sentences(f"{title} {text}", [question]) or _that_fit(f"{title} {text}", named)[:1]
        below = below if isinstance(below, str) else "".join(slide.text for slide in below)
        slide, others = Slide(title, "\n\n".join(filter(None, (text, below))), rank=2), []
    more = [Slide(title, _sentences(title, [before]), figure=figure, rank=3) for figure, before in others]
    for other in more:
        other.text = "" if other.text == text else other.text
    return [slide, *more] if slide.text or slide.figure or slide.code else more


def _is_short(code: str) -> bool:
    return len(code.strip("\n").splitlines()) <= LINES


def _sentences(title: str, paragraphs: list[str]) -> str:
    """The first whole sentences that fit beside a title; of the first paragraph that has one."""
    for paragraph in paragraphs:
        kept = ""
        for sentence in _split(paragraph):
            longer = f"{kept} {sentence}".strip()
            if Slide(title, longer).words > WORDS:
                break
            kept = longer
        if kept:
            return re.sub(r":$", ".", kept)
    return ""


def _split(paragraph: str) -> list[str]:
    """Its sentences, without links."""
    return re.split(r"(?<=[.?!])\s+(?=[\"`*A-Z\d])", " ".join(_LINK.sub(r"\1", paragraph).split()))


def _points(cells: list) -> list[str]:
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    found = re.findall(r"^- (.+(?:\n  .+)*)", text, re.M)
    return [_split(point)[0] for point in found]


def _that_fit(title: str, points: list[str]) -> list[Slide]:
    """A list over two slides at most."""
    slides = []
    for point in filter(None, points):
        if not slides or Slide(title, "\n".join([slides[-1].text, f"- {point}"])).words > WORDS:
            slides.append(Slide(title))
        slides[-1].text += f"- {point}\n"
    return slides[:2]


def as_page(slides: list[Slide]) -> str:
    """A deck as HTML."""
    sections = []
    for number, slide in enumerate(slides, 1):
        heading = "h1" if number == 1 else "h2"
        parts = [f"<{heading}>{escape(slide.title)}</{heading}>", mistune.html(slide.text), slide.figure]
        parts[2] = slide.figure and f"<figure>{slide.figure}</figure>"
        if slide.code:
            widest = max(map(len, slide.code.splitlines()))
            size = min(26, int(1120 / (0.61 * widest)))
            style = HtmlFormatter(noclasses=True, nowrap=True)
            coloured = highlight(slide.code, get_lexer_by_name(slide.language), style)
            parts.append(f'<pre style="font-size:{size}px">{coloured}</pre>')
        sections.append(f"<section>{''.join(parts)}<footer>{number} / {len(slides)}</footer></section>")
    return PAGE.format(title=escape(slides[0].title), slides="\n".join(sections))


def lectures() -> list[Path]:
    """The solved lectures."""
    found = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))
    return [path for path in found if not path.stem.endswith("_exercises")]


def write(folder: Path) -> list[Path]:
    """All decks to ``folder``; what else was in it goes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    written = []
    for path in lectures():
        written.append(folder / f"{path.stem}.html")
        written[-1].write_text(as_page(deck(nbformat.read(path, as_version=4))), encoding="utf-8")
    return written


def main() -> None:
    written = write(Path(sys.argv[1]) if sys.argv[1:] else FOLDER)
    print(f"{len(written)} decks are in {written[0].parent}: open one in a browser.")


if __name__ == "__main__":
    main()
