"""Held-out articles with the best, a middling and the worst summary of a sample."""

import json
from pathlib import Path
from textwrap import shorten

from dtlib.training.run import CONFIGS

LONGEST = 300  # number of characters of an article that are shown


def best_and_worst(folder, comm, of: int = 24) -> str:
    """Return three of ``of`` held-out articles, ranked by ROUGE-L, as text.

    Each has its beginning, lead, reference, and the summary by the model of the last checkpoint in ``folder``. All
    ranks call this function, and each summarises its part.
    """
    from dtlib import checkpoint
    from dtlib.training.engine import LATEST
    from dtlib.workloads.beam import summarize
    from dtlib.workloads.rouge import lead, rouge_l
    from dtlib.workloads.stories import spread
    from dtlib.workloads.summarization import workload

    work = workload(json.loads((CONFIGS / "summarization.json").read_text())["workload"])
    checkpoint.load(Path(folder) / checkpoint.read_latest(Path(folder) / LATEST, comm), work.model, comm=comm)
    mine = spread(work.test.stories, of)[comm.rank :: comm.size]
    written = summarize(work.model, work.test, [story.article for story in mine])
    scored = [(rouge_l(story.summary, said), story, said) for story, said in zip(mine, written, strict=True)]
    every = sorted((one for some in comm.all_gather_object(scored) for one in some), key=lambda one: -one[0])
    return "\n\n".join(
        f"{which} of {len(every)}, ROUGE-L {score:.2f}\n"
        f"Article    {shorten(story.article, LONGEST)}\nLead       {shorten(lead(story.article), LONGEST)}\n"
        f"Reference  {story.summary}\nModel      {said}"
        for which, (score, story, said) in zip(
            ("Best", "Middle", "Worst"), (every[0], every[len(every) // 2], every[-1]), strict=True
        )
    )  # fmt: skip
