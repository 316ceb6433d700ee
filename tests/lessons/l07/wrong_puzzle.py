"""Right answers to the schedule puzzle, and plausible wrong ones with the mistake that the check must recognise."""

from dtlib.schedule import gpipe, one_f_one_b, zero_bubble_h1

ONE_BY_ONE = "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
GPIPE = "F0-7 B0-7\n" * 4
ONE_F_ONE_B = f"""
rank 0: F0-3 B0 F4 B1 F5 B2 F6 B3 F7 B4-7
rank 1: F0-2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5-7
rank 2: F0-1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
rank 3: {ONE_BY_ONE}
"""
THREE = f"""
F0-2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5-7
F0-2 B0 B1 F3 B2 F4 F5 B3 B4 F6 B5 F7 B6 B7
F0-2 B0-2 F3 F4 B3 F5 B4 B5 F6 F7 B6 B7
{ONE_BY_ONE}
"""
HALVES = """
F0-3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
F0-2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
F0-1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4-7
"""

RIGHT = {
    "schedule-puzzle": {
        "as a list": ["F0-7 B0-7"] * 4, "backward from the last": ["F0-7 B7-0"] * 4, "as text": GPIPE,
        "the library's": gpipe(4, 8), "less memory than allowed": ONE_F_ONE_B,
        "a dictionary": {rank: "f0-7, b0-7" for rank in range(4)},
        "with stages and comments": "".join(f"\n{r}: {r}F0-7 {r}B0-7  # rank {r}" for r in range(4)),
    },
    "schedule-puzzle-2": {
        "as text": ONE_F_ONE_B, "the library's": one_f_one_b(4, 8),
        "lists of words": [list(map(str, actions)) for actions in one_f_one_b(4, 8)],
    },
    "schedule-puzzle-3": {"as text": THREE},
    "schedule-puzzle-4": {"as text": HALVES, "the library's": zero_bubble_h1(4, 8)},
}  # fmt: skip


def changed(text: str, *replacements) -> str:
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new, 1)
    return text


PUZZLES = {
    "schedule-puzzle": {
        "the stub": ("F0\nF0\nF0\nF0", "missing-action"),
        "nothing": ("", "ranks"),
        "None": (None, "unreadable"),
        "no schedule": (["F0-7 B0-7", 8, 9, 10], "unreadable"),
        "three ranks": ("F0-7 B0-7\n" * 3, "ranks"),
        "a word": (changed(GPIPE, ("B0-7", "B0 to B7")), "unreadable"),
        "counted from one": ("F1-8 B1-8\n" * 4, "unknown-microbatch"),
        "a range without end": ("F0-999999999 B0-7\n" * 4, "unknown-microbatch"),
        "an action twice": (changed(GPIPE, ("B0-7", "B0 B0-7")), "twice"),
        "the last one missing": (changed(GPIPE, ("B0-7", "B0-6")), "missing-action"),
        "halves": ("F0-7 I0-7 W0-7\n" * 4, "other-kind"),
        "other stage": (changed(GPIPE, ("F0-7", "1F0-7")), "other-stage"),
        "backward first": (changed(GPIPE, ("F0-7 B0-7", "B0 F0-7 B1-7")), "before-its-forward"),
        # Rank 0 waits for B0 before F1; rank 1 for F1 before B0.
        "a circle": (f"{ONE_BY_ONE}\nF0-7 B0-7\nF0-7 B0-7\nF0-7 B0-7", "deadlock"),
        "reversed on one rank": ("F0-7 B0-7\nF7-0 B0-7\nF7-0 B0-7\nF7-0 B0-7", "over-par"),
        "one at a time": (f"{ONE_BY_ONE}\n" * 4, "over-par"),
        "two batches": ("F0-3 B0-3 F4-7 B4-7\n" * 4, "over-par"),
    },
    "schedule-puzzle-2": {
        "GPipe": (GPIPE, "too-many-activations"),
        "two batches": ("F0-3 B0-3 F4-7 B4-7\n" * 4, "over-par"),
        "one too early": (changed(ONE_F_ONE_B, ("F0-3 B0 F4 B1", "F0-4 B0 B1")), "too-many-activations"),
        "one too few in hand": (changed(ONE_F_ONE_B, ("F0-3 B0 F4", "F0-2 B0 F3 F4")), "over-par"),
    },
    "schedule-puzzle-3": {
        "1F1B": (ONE_F_ONE_B, "too-many-activations"),
        "waves of three": (f"{'F0-2 B0-2 F3-5 B3-5 F6-7 B6-7' + chr(10)}" * 3 + ONE_BY_ONE, "over-par"),
        "nearly": (
            changed(THREE, ("F0-2 B0-2 F3 F4 B3 F5 B4 B5 F6 F7 B6 B7", "F0-2 B0-2 F3-5 B3-5 F6-7 B6-7")), "over-par",
        ),
    },
    "schedule-puzzle-4": {
        "whole backward passes": (ONE_F_ONE_B, "other-kind"),
        "1F1B, and each W right after its I": (
            "\n".join(
                " ".join(f"{a}".replace("B", "I") + (f" W{a.microbatch}" if a.kind == "B" else "") for a in actions)
                for actions in one_f_one_b(4, 8)
            ), "over-par",
        ),
        "W first": (changed(HALVES, ("I0 W0 F4", "W0 I0 F4")), "before-its-half"),
        "I first": (changed(HALVES, ("F0-3 I0", "I0 F0-3")), "before-its-forward"),
        "1F1B, and all W at the end": (
            "\n".join(
                " ".join(str(a).replace("B", "I") for a in actions) + " W0-7" for actions in one_f_one_b(4, 8)
            ), "too-many-activations",
        ),
        "a W missing": (changed(HALVES, ("W7\nF0-2", "\nF0-2")), "missing-action"),
        "both halves missing": (changed(HALVES, ("I1 W1 ", "")), "missing-action"),
    },
}  # fmt: skip
