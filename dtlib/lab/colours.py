"""The same colour for the same rank everywhere: in tables, outputs and figures."""

# Okabe and Ito's palette, which people with any colour vision can tell apart (jfly.uni-koeln.de/color, 2008); its
# yellow is left out, as it is too light for text. From the eighth on each is as far as possible from those before it.
RANK_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#660022",
    "#9900FF", "#220099", "#005500", "#FF22FF", "#AA1177", "#44CC00", "#0033FF", "#775544",
)  # fmt: skip


def rank_colour(rank: int) -> str:
    """The colour of a rank, as #RRGGBB; no other of ``len(RANK_COLOURS)`` ranks has it."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def rank_badge(rank: int) -> str:
    """A rank's number beside a square of its colour, as HTML."""
    return f'<span style="color:{rank_colour(rank)}">&#9632;</span> {rank}'


def rank_prefix(rank: int) -> str:
    """``rank 0 |`` in the rank's colour, for a terminal or a notebook's output."""
    return ranks_prefix([rank], f"rank {rank}")


def ranks_prefix(ranks: list[int], words: str) -> str:
    """The same for ranks that say the same: they share no colour."""
    if len(ranks) > 1:
        return f"\x1b[1m{words} |\x1b[0m"
    rank = ranks[0]
    red, green, blue = (int(rank_colour(rank)[i : i + 2], 16) for i in (1, 3, 5))
    return f"\x1b[1;38;2;{red};{green};{blue}m{words} |\x1b[0m"
