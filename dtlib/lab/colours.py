"""One colour per rank, the same in tables, outputs and figures."""

# Okabe and Ito's palette, which people with any colour vision can distinguish (jfly.uni-koeln.de/color, 2008). Its
# yellow is left out, because it is too light for text. From the eighth on, each colour is as far as possible from the
# earlier ones.
RANK_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#660022",
    "#9900FF", "#220099", "#005500", "#FF22FF", "#AA1177", "#44CC00", "#0033FF", "#775544",
)  # fmt: skip


def rank_colour(rank: int) -> str:
    """Return the colour of a rank, as #RRGGBB; the first ``len(RANK_COLOURS)`` ranks have different colours."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def ink(red: float, green: float, blue: float) -> str:
    """Return black or white, whichever contrasts more with a colour (channels from 0 to 1).

    The contrast is at least 4.5 to 1 (WCAG).
    """
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
    light = 0.05 + sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "white" if 1.05 / light > light / 0.05 else "black"


def rank_badge(rank: int) -> str:
    """Return a rank's number beside a square of its colour, as HTML."""
    return f'<span style="color:{rank_colour(rank)}">&#9632;</span> {rank}'


def ranks_prefix(ranks: list[int], words: str) -> str:
    """Return ``words |`` for several ranks that print the same, in bold; for one rank, on its colour.

    It is readable in a terminal and in a notebook's output, light or dark.
    """
    if len(ranks) > 1:
        return f"\x1b[1m{words} |\x1b[0m"
    rank = ranks[0]
    red, green, blue = (int(rank_colour(rank)[i : i + 2], 16) for i in (1, 3, 5))
    letters = 255 if ink(red / 255, green / 255, blue / 255) == "white" else 0
    return f"\x1b[38;2;{letters};{letters};{letters};48;2;{red};{green};{blue}m{words}\x1b[0m\x1b[1m |\x1b[0m"
