"""How much of a reference a summary says in the same order (ROUGE-L).

C.-Y. Lin, "ROUGE: a package for automatic evaluation of summaries", 2004; computed by Google's ``rouge-score``.
"""

import re
from functools import cache


@cache
def _scorer():
    from rouge_score.rouge_scorer import RougeScorer  # takes a second: only where something is scored

    return RougeScorer(["rougeL"], use_stemmer=True)


def rouge_l(reference: str, summary: str) -> float:
    """F of the longest common subsequence of words, from 0 to 1; words are stemmed."""
    return _scorer().score(reference, summary)["rougeL"].fmeasure


def lead(article: str) -> str:
    """The first sentence: of what is below the heading, where there is one."""
    heading, _, rest = article.partition("\n\n")
    headed = rest and not heading.rstrip().endswith((".", "!", "?", '"'))
    return re.split(r"(?<=[.!?])\s", (rest if headed else article).strip(), maxsplit=1)[0]
