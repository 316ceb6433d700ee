"""How much of a reference a summary says in the same order (ROUGE-L), and what it takes to be better than nothing.

C.-Y. Lin, "ROUGE: a package for automatic evaluation of summaries", 2004; computed by Google's ``rouge-score``.
"""

import re
from collections import Counter
from functools import cache

from dtlib.workloads.stories import Story, spread


@cache
def _scorer():
    from rouge_score.rouge_scorer import RougeScorer  # takes a second: only where something is scored

    return RougeScorer(["rougeL"], use_stemmer=True)


def rouge_l(reference: str, summary: str) -> float:
    """F of the longest common subsequence of words, from 0 to 1; words are stemmed."""
    return _scorer().score(reference, summary)["rougeL"].fmeasure


def mean_rouge_l(stories: list[Story], summaries: list[str]) -> float:
    pairs = zip(stories, summaries, strict=True)
    return sum(rouge_l(story.summary, summary) for story, summary in pairs) / len(stories)


def lead(article: str) -> str:
    """The first sentence: of what is below the heading, where there is one."""
    heading, _, rest = article.partition("\n\n")
    headed = rest and not heading.rstrip().endswith((".", "!", "?", '"'))
    return re.split(r"(?<=[.!?])\s", (rest if headed else article).strip(), maxsplit=1)[0]


def best_constant(train: list[Story], samples: int = 300, words: int = 12) -> str:
    """One text for all articles: as long as it helps, the word is added to it that helps most."""
    sample = spread(train, samples)
    common = Counter(word for story in train for word in story.summary.lower().split()).most_common(30)
    text: list[str] = []
    best = 0.0
    for _ in range(words):
        tried = [(mean_rouge_l(sample, [" ".join([*text, word])] * len(sample)), word) for word, _ in common]
        score, word = max(tried)
        if score <= best:
            break
        text, best = [*text, word], score
    return " ".join(text)


def nearest(train: list[Story], test: list[Story]) -> list[str]:
    """For each article the summary of the article to train on that is most like it, by weighted words (TF-IDF)."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors = TfidfVectorizer(sublinear_tf=True)
    known = vectors.fit_transform([story.article for story in train])
    alike = vectors.transform([story.article for story in test]) @ known.T
    return [train[place].summary for place in alike.argmax(1).A1]


def baselines(train: list[Story], test: list[Story]) -> dict[str, float]:
    """ROUGE-L on ``test`` of three ways to write a summary without a model."""
    return {
        "lead": mean_rouge_l(test, [lead(story.article) for story in test]),
        "first twelve words": mean_rouge_l(test, [" ".join(_below(story.article).split()[:12]) for story in test]),
        "constant": mean_rouge_l(test, [best_constant(train)] * len(test)),
        "nearest": mean_rouge_l(test, nearest(train, test)),
    }


def _below(article: str) -> str:
    return article.partition("\n\n")[2] or article
