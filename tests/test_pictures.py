"""What all figures keep to: colours that belong to one rank, waits that look empty, letters for a projector."""

import re
from itertools import combinations
from unittest.mock import patch

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb

from dtlib.comm.watch.recorder import Event
from dtlib.lab import drawing, pictures, server
from dtlib.lab.colours import RANK_COLOURS, ink, rank_colour
from dtlib.lessons.l03 import figures as l03
from dtlib.lessons.l04 import figures as l04
from dtlib.lessons.l11 import figures as l11
from dtlib.lessons.l14 import figures as l14
from dtlib.measure.trace import Timeline, Trace


def oklab(colour):
    """Lightness and two hues, of which equal distances look equal (B. Ottosson, 2020)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    middle = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def test_sixteen_ranks_have_colours_that_can_be_told_apart():
    assert len({rank_colour(rank) for rank in range(16)}) == 16
    nearest = min(
        (sum((x - y) ** 2 for x, y in zip(oklab(one), oklab(other), strict=True)) ** 0.5, one, other)
        for one, other in combinations(RANK_COLOURS, 2)
    )
    assert nearest[0] > 0.15, nearest  # as far apart as the nearest two of Okabe and Ito's
    assert all(oklab(colour)[0] < 0.78 for colour in RANK_COLOURS), "readable on white"


def shown(draw, *arguments):
    """The picture that a figure's function would show."""
    with patch("IPython.display.display") as display:
        draw(*arguments)
    return display.call_args.args[0]


def test_a_projector_has_larger_letters_until_it_is_taken_back():
    def sizes(picture):
        found = re.findall(r"font(?:-size)?: (?:\w+ )?([\d.]+)px", picture.svg)
        return {float(size) for size in found}

    before = shown(l04.data_parallelism)
    drawing.projector()
    try:
        larger = shown(l04.data_parallelism)
    finally:
        drawing.projector(False)
    assert min(sizes(larger)) == drawing.LARGER * min(sizes(before)) and drawing.text_width("x") < 0.2
    assert shown(l04.data_parallelism).svg == before.svg


def test_in_a_timeline_computing_is_strong_and_a_wait_is_pale(monkeypatch):
    kinds = ("phase", "operation", "wait")
    events = [Event(0, kind, kind, float(at), at + 1.0) for at, kind in enumerate(kinds)]
    record = Timeline([Trace(0, 0.0, events)])
    picture = shown(pictures.timeline, record)
    monkeypatch.setattr(pictures, "_timeline_of", lambda trace, rank: record)
    named = shown(pictures.timeline, "inline")
    assert ">inline<" in named.svg and named.alt == f"inline: w{picture.alt[1:]}" and ">inline<" not in picture.svg
    drawn = {kind: to_hex(pictures._paler(rank_colour(0), pictures._STRENGTH[kind])) for kind in kinds}
    assert all(colour in picture.svg for colour in drawn.values()), drawn
    light = [oklab(drawn[kind])[0] for kind in kinds]
    assert light == sorted(light) and light[2] > 0.95 and drawn["phase"] == rank_colour(0).lower()


def test_in_a_timeline_what_is_under_way_at_once_is_seen_from_start_to_end():
    def queued(starts, ends):
        times = zip(starts, ends, strict=True)
        return [Event(0, "operation", "all_reduce", start, end, lane="background") for start, end in times]

    assert pictures._lanes(queued([0, 1, 2, 3, 9], [5, 6, None, 8, 10])) == [0, 1, 2, 3, 0]
    assert pictures._lanes(queued([0, 1, 2], [1, 2, 3])) == [0, 0, 0]
    assert max(pictures._lanes(queued(range(20), [99] * 20))) == pictures.MOST_LANES - 1
    heights, long = [], [9.0] * 6
    for starts in ([0, 1, 2], [0, 1, 2, 3, 4, 5]):
        record = Timeline([Trace(0, 0.0, queued(starts, long[: len(starts)]))])
        with patch.object(Axes, "broken_barh", autospec=True, side_effect=Axes.broken_barh) as drawn:
            picture = shown(pictures.timeline, record)
        assert len({call.args[2][0] for call in drawn.call_args_list}) == len(starts), "a lane for each"
        heights.append(float(re.search(r'height="([\d.]+)pt"', picture.svg)[1]))
        assert ">operation: all_reduce<" in picture.svg, "lanes can be too low for a name"
    assert heights[0] < heights[1]


def test_timelines_of_one_rank_share_an_axis_and_have_a_line_where_a_phase_ends():
    def step(rank, name, end):
        return Trace(
            rank, 0.0, [Event(rank, "phase", "forward", 0.0, end), Event(rank, "operation", name, end, end + 1)]
        )

    steps = ("all_gather", 2.0), ("reduce_scatter", 5.0)
    records = [Timeline([step(rank, *each) for rank in (0, 1)]) for each in steps]
    with (
        patch.object(Axes, "broken_barh", autospec=True, side_effect=Axes.broken_barh) as bars,
        patch.object(Axes, "axvline", autospec=True, side_effect=Axes.axvline) as line,
    ):
        picture = shown(lambda *both: pictures.timeline(*both, rank=1, ends={"forward": "backward"}), *records)
    assert [call.args[1] for call in line.call_args_list] == [2.0, 5.0] and picture.svg.count(">backward<") == 2
    panels = {call.args[0] for call in bars.call_args_list}
    assert len(panels) == 2 and len({panel.get_xlim() for panel in panels}) == 1
    colours = {to_hex(call.kwargs["facecolor"]) for call in bars.call_args_list}
    assert len(colours) == 3 and rank_colour(0).lower() not in colours, "rank 1's, and one for each operation"
    assert picture.alt == "What rank 1 did over 3 s. What rank 1 did over 6 s."


def test_in_a_timeline_of_a_hang_a_rank_has_finished_and_others_say_how_long_they_waited():
    waits = Trace(0, 0.0, [Event(0, "operation", "broadcast", 10.0)], until=12.0)
    done = Trace(1, 0.0, [Event(1, "phase", "short", 10.0, 10.5)], until=10.5)
    svg = shown(pictures.timeline, Timeline([waits, done, Trace(2, 0.0, [], until=10.0)])).svg
    assert ">broadcast had not ended after 2.0 s<" in svg and svg.count(">finished<") == 2
    assert ">finished<" not in shown(pictures.timeline, Timeline([done])).svg


def test_a_timeline_says_once_that_it_is_emulated():
    record = Timeline([Trace(0, 0.0, [Event(0, "operation", "barrier", 0.0, 1.0, emulated=True)])])
    text = str(shown(pictures.timeline, record))
    assert text.count("EMULATED") == 1 and "barrier" in text


def luminance(colour, dimmed=1.0):
    parts = [dimmed * channel for channel in to_rgb(colour)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.05 + sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_on_a_dark_page_a_figure_is_a_card_on_which_letters_stand_out():
    assert '<figure class="dtlib-figure"' in shown(l04.data_parallelism)._repr_html_()
    style = (server.SETTINGS / "custom" / "custom.css").read_text()
    card = re.search(r'data-jp-theme-light="false"\] \.dtlib-figure > img \{([^}]*)\}', style)[1]
    assert "background: white" in card and "border-radius" in card
    dimmed = float(re.search(r"brightness\(([\d.]+)\)", card)[1])
    for colour in RANK_COLOURS:
        of_letters = luminance(ink(*to_rgb(colour)), dimmed), luminance(colour, dimmed)
        assert max(of_letters) / min(of_letters) >= 4.5, colour


def test_without_its_bubble_a_pipeline_alone_is_predicted_faster():
    measured = {name: {"seconds": 1.0} for name in l14.fitting()}
    picture = shown(lambda: l14.ratios(0.01, measured, without_bubble=True))
    for name, plan in l14.fitting().items():
        ratio, eager = map(float, re.search(rf"^{name}  .*?([\d.]+) +([\d.]+)$", str(picture), re.M).groups())
        assert (eager > ratio) == (plan.pipe > 1), name


def test_new_figures_have_a_sentence_and_a_text():
    for draw, words in ((l03.collectives, "reduce_scatter"), (l11.machine, "NVLink"), (l04.data_parallelism, "mean")):
        picture = shown(draw)
        assert len(picture.alt) > 20 and words in str(picture)
    for name, (before, after) in l03.COLLECTIVES.items():
        assert len(before) == len(after) == 4, name
