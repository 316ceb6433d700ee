"""ROUGE-L: the overlap of a summary with a reference, as their longest common subsequence of words.

C.-Y. Lin, "ROUGE: a package for automatic evaluation of summaries", 2004; computed by Google's ``rouge-score``.
"""

import re
from functools import cache


@cache
def _scorer():
    from rouge_score.rouge_scorer import RougeScorer  # imported here, because it takes a second

    return RougeScorer(["rougeL"], use_stemmer=True)


def rouge_l(reference: str, summary: str) -> float:
    """Return the F-measure of the longest common subsequence of stemmed words, from 0 to 1."""
    return _scorer().score(reference, summary)["rougeL"].fmeasure


def lead(article: str) -> str:
    """Return the first sentence of an article, without its heading."""
    heading, _, rest = article.partition("\n\n")
    headed = rest and not heading.rstrip().endswith((".", "!", "?", '"'))
    return re.split(r"(?<=[.!?])\s", (rest if headed else article).strip(), maxsplit=1)[0]
