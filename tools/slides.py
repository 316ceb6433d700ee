"""One deck a lesson: ``make slides`` writes notebooks/slides/NN_*.html from its sources and the lectures' figures.

A deck is one file that needs no network: arrow keys, space, Home and End turn its slides, a click too; ``n`` shows what
to say; printed, each slide is a page. Its source, notebooks/source/decks/NN_*.md, is Markdown with a heading for each
slide. Text, lists, tables and code are shown as they stand there. Results of the lecture are taken from its outputs:

    {figure: words}     the lecture's first figure with these words in its alternative text; "words #2" is the second
    {table: words}      its first table with these words
    {asks: name}        the slide puts this prediction to the room: its answer may stand on later slides only, and what
                        the speaker says begins with PAUSE
    Say: ...            to the end of the slide: what the speaker says

git ignores the decks themselves, as they hold nothing that sources and stored notebooks do not hold.
"""

import re
import shutil
import sys
from dataclasses import dataclass, field
from functools import cache
from html import escape, unescape
from pathlib import Path

import mistune
import nbformat
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "notebooks" / "source" / "decks"
FOLDER = ROOT / "notebooks" / "slides"
SLIDES, WORDS, LINES = 12, 40, 12  # the most of a deck; the most of a slide, beside tables and code
PAUSE = "(Wait for three answers, then run the prediction.)"
_IMAGE = re.compile(r'<img alt="([^"]*)" src="data:image/svg[^>]*>')
_TABLE = re.compile(r"<table>.*?</table>", re.S)
_BLOCK = re.compile(r"^\{(figure|table|asks): ([^}\n]+)\}$|^```(\w+)\n(.*?)^```$|((?:^\|[^\n]*\n?)+)", re.M | re.S)
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body {{ margin: 0; background: #ddd; font: 32px/1.35 "DejaVu Sans", Verdana, sans-serif; color: #111 }}
section {{ box-sizing: border-box; width: 1280px; height: 720px; padding: 44px 60px 40px; margin: 0 auto 16px;
  background: white; overflow: hidden; position: relative; display: flex; flex-direction: column; gap: 18px }}
.turned section {{ display: none; position: absolute; left: 0; top: 0; margin: 0; transform-origin: 0 0 }}
.turned section.here {{ display: flex }}
h1, h2, p, ul, ol, pre, figure {{ margin: 0 }} p + p, ul + p, p + ul {{ margin-top: 0 }}
h1 {{ font-size: 60px; margin-top: 90px }} h2 {{ font-size: 42px; color: #0072B2 }}
section:not(:has(figure)) {{ font-size: 34px }} section:not(:has(figure, pre, .table)) {{ font-size: 42px }}
ul {{ padding-left: 1.1em }} ol {{ padding-left: 1.4em }} li {{ margin-bottom: 8px }}
code {{ font: 0.9em "DejaVu Sans Mono", Menlo, Consolas, monospace }}
pre {{ line-height: 1.35; font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; border-left: 6px solid #0072B2;
  padding-left: 18px }}
figure {{ flex: 1; min-height: 0; display: flex }}
figure img {{ flex: 1; min-width: 0; object-fit: contain }}
table {{ border-collapse: collapse; font-size: 1em }}
td, th {{ padding: 0.15em 0.7em; border-bottom: 1px solid #bbb; text-align: left; vertical-align: top; color: #111 }}
aside {{ display: none; position: absolute; left: 0; right: 0; bottom: 0; padding: 18px 60px 34px; background: #fff8e0;
  border-top: 4px solid #E69F00; font-size: 24px; line-height: 1.4 }}
.notes aside {{ display: block }}
footer {{ position: absolute; right: 30px; bottom: 10px; font-size: 18px; color: #555 }}
@page {{ size: 1280px 720px; margin: 0 }}
@media print {{ aside {{ display: none !important }}
  .turned section {{ display: flex; position: relative; transform: none !important; break-after: page }} }}
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
  if (event.key == "n") document.body.classList.toggle("notes");
  if (steps[event.key]) {{ event.preventDefault(); show(at + steps[event.key]); }}
}});
addEventListener("click", event => show(at + (event.clientX < innerWidth / 3 ? -1 : 1)));
addEventListener("resize", () => show(at));
document.body.classList.add("turned");
show(at);
</script></body></html>
"""


@dataclass
class Block:
    """``kind`` is "text", "figure", "table" or "code"; ``text`` is what one reads in it, ``html`` what is shown."""

    kind: str
    text: str
    html: str
    language: str = ""


@dataclass
class Slide:
    title: str
    blocks: list[Block] = field(default_factory=list)
    asks: list[str] = field(default_factory=list)  # names of predictions
    says: str = ""

    @property
    def text(self) -> str:
        return "\n\n".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def words(self) -> int:
        """What a room has to read beside figures, tables and code."""
        return len(re.findall(r"\w[\w'.,%-]*", f"{self.title} {self.text}"))

    @property
    def shown(self) -> list[Block]:
        return [block for block in self.blocks if block.kind != "text"]


@cache
def deck(source: Path) -> list[Slide]:
    """The slides of a deck's source, in its order, filled from the solved lecture of the same name."""
    outputs = _outputs(lecture(source))
    _, *parts = re.split(r"^##? ", source.read_text(encoding="utf-8"), flags=re.M)
    return [_slide(part, outputs, source.name) for part in parts]


@cache
def lecture(source: Path):
    return nbformat.read(ROOT / "notebooks" / "solutions" / f"{source.stem}.ipynb", as_version=4)


def sources() -> list[Path]:
    return sorted(SOURCES.glob("*.md"))


def _outputs(book) -> list[tuple[str, str]]:
    """(HTML, text) of each output that has both."""
    found = [output.get("data", {}) for cell in book.cells for output in cell.get("outputs", [])]
    return [(data["text/html"], data.get("text/plain", "")) for data in found if "text/html" in data]


def _slide(part: str, outputs: list, name: str) -> Slide:
    title, _, rest = part.partition("\n")
    rest, _, says = rest.partition("\nSay: ")
    slide, at = Slide(title.strip(), says=" ".join(says.split())), 0
    for match in _BLOCK.finditer(rest):
        _add_text(slide, rest[at : match.start()])
        at, (what, words, language, code, table) = match.end(), match.groups()
        if what == "asks":
            slide.asks += words.split(", ")
        elif what:
            slide.blocks.append(_of_lecture(what, words, outputs, f"{name}, {slide.title!r}"))
        elif code:
            slide.blocks.append(Block("code", code, _coloured(code, language), language))
        else:
            slide.blocks.append(Block("table", table, _sized(mistune.create_markdown(plugins=["table"])(table))))
    _add_text(slide, rest[at:])
    if slide.asks and "(Wait" not in slide.says:
        slide.says = f"{PAUSE} {slide.says}"
    return slide


def _add_text(slide: Slide, text: str) -> None:
    if text.strip():
        slide.blocks.append(Block("text", text.strip(), mistune.html(text)))


def _of_lecture(what: str, words: str, outputs: list, where: str) -> Block:
    words, _, number = words.partition(" #")
    left = int(number or 1)
    for html, text in outputs:
        image, table = _IMAGE.search(html), _TABLE.search(html)
        found = image and unescape(image[1]) if what == "figure" else table and unescape(re.sub(r"<[^>]+>", " ", html))
        left -= words in (found or "")
        if left:
            continue
        if what == "figure":
            return Block("figure", f"{image[1]} {text}", f"<figure>{image[0]}</figure>")
        return Block("table", text, _sized(table[0]))
    raise SystemExit(f"{where}: the lecture has no {what} with the words {words!r}.")


def _coloured(code: str, language: str) -> str:
    lines = code.splitlines()
    size = min(32, int(1120 / (0.61 * max(map(len, lines)))), int(360 / (1.35 * len(lines))))
    style = HtmlFormatter(noclasses=True, nowrap=True)
    return f'<pre style="font-size:{size}px">{highlight(code, get_lexer_by_name(language), style)}</pre>'


def _sized(table: str) -> str:
    """As large as it fits: by its widest cells (those of its head may fold), and by its rows."""
    rows = [re.findall(r"<(t[hd])[^>]*>(.*?)</t[hd]>", row, re.S) for row in table.split("</tr>")]
    rows = [
        [len(unescape(re.sub(r"<[^>]+>", "", cell))) // (1 + (kind == "th")) + 3 for kind, cell in row]
        for row in rows if row
    ]  # fmt: skip
    wide = sum(max(row[at] for row in rows if at < len(row)) for at in range(max(map(len, rows))))
    size = max(20, min(32, int(1160 / (0.6 * wide)), int(350 / (1.75 * (len(rows) + 1)))))
    return f'<div class="table" style="font-size:{size}px">{table}</div>'


def as_page(slides: list[Slide]) -> str:
    """A deck as HTML."""
    sections = []
    for number, slide in enumerate(slides, 1):
        heading = "h1" if number == 1 else "h2"
        shown = "".join(block.html for block in slide.blocks)
        notes = f"<aside>{escape(slide.says)}</aside>" if slide.says else ""
        sections.append(
            f"<section><{heading}>{mistune.html(slide.title)[3:-5]}</{heading}>{shown}{notes}"
            f"<footer>{number} / {len(slides)}</footer></section>"
        )
    return PAGE.format(title=escape(slides[0].title), slides="\n".join(sections))


def write(folder: Path) -> list[Path]:
    """All decks to ``folder``; what else was in it goes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    written = []
    for source in sources():
        written.append(folder / f"{source.stem}.html")
        written[-1].write_text(as_page(deck(source)), encoding="utf-8")
    return written


def main() -> None:
    written = write(Path(sys.argv[1]) if sys.argv[1:] else FOLDER)
    print(f"{len(written)} decks are in {written[0].parent}: open one in a browser.")


if __name__ == "__main__":
    main()
