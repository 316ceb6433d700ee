"""Three articles, and what is said of them."""

import json
from pathlib import Path
from textwrap import shorten

from dtlib.training.run import CONFIGS

LONGEST = 300  # letters of an article that are shown


def three_articles(folder, comm, count: int = 3) -> str:
    """Of held-out articles the beginning, the lead, the reference, and the summary by the model whose last checkpoint
    is in ``folder``. All ranks call it."""
    from dtlib import checkpoint
    from dtlib.training.checkpoints import LATEST
    from dtlib.workloads.beam import summarize
    from dtlib.workloads.rouge import lead
    from dtlib.workloads.summarization import workload

    work = workload(json.loads((CONFIGS / "summarization.json").read_text())["workload"])
    checkpoint.load(Path(folder) / checkpoint.pointed_to(Path(folder) / LATEST, comm), work.model, comm=comm)
    some = work.test.stories[:: max(1, len(work.test.stories) // count)][:count]
    written = summarize(work.model, work.test, [story.article for story in some])
    return "\n\n".join(
        f"Article    {shorten(story.article, LONGEST)}\nLead       {shorten(lead(story.article), LONGEST)}\n"
        f"Reference  {story.summary}\nModel      {summary}"
        for story, summary in zip(some, written, strict=True)
    )
