"""Summarisation of articles: documentation of libraries, which is part of dtlib, or CNN/DailyMail from a folder.

In dtlib's own corpus an article is the name, the arguments and the description of a function, and the summary is the
first line of its docstring. The test has other libraries than the training data.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import Dataset

from dtlib.errors import DtlibError, number
from dtlib.workloads import stories, text, transformer
from dtlib.workloads.beam import summarize
from dtlib.workloads.rouge import lead, rouge_l
from dtlib.workloads.workload import Workload, chosen, settings, shared_mean

if TYPE_CHECKING:
    from dtlib.comm import Communicator


TOKENIZER, CHECKPOINT = stories.DATA / "summarizer_tokenizer.json", stories.DATA / "summarizer.safetensors"
VOCABULARY = 4096  # of dtlib's own tokenizer
PRESETS = {
    "tiny": dict(width=32, heads=2, encoders=1, decoders=1),
    "small": dict(width=160, heads=5, encoders=2, decoders=3),  # 2.6 million parameters; the checkpoint's model
    "base": dict(width=512, heads=8, encoders=6, decoders=6),  # 46 million, plus 0.5 million per 1,000 more tokens
    "large": dict(width=1024, heads=16, encoders=12, decoders=12),  # 360 million
    "xlarge": dict(width=1280, heads=20, encoders=16, decoders=16),  # 740 million
}
DEFAULTS = {
    "model": "small", "data": None, "seed": 0, "library": None, "start": "scratch", "vocabulary": VOCABULARY,
    "article_tokens": 96, "summary_tokens": 32, "dropout": 0.1, "test_articles": 200, "beams": 1,
}  # fmt: skip
CORPUS_SAMPLE = 20_000  # the largest number of stories for training a tokenizer


class Summaries(Dataset):
    """Pairs of an article's tokens and its summary's tokens; the latter are between BEGIN and END.

    Articles longer than ``article_tokens``, and summaries longer than ``summary_tokens``, are truncated.
    """

    def __init__(self, found: list[stories.Story], tokenizer: Tokenizer, article_tokens: int, summary_tokens: int):
        self.stories, self.tokenizer = found, tokenizer
        self.article_tokens, self.summary_tokens = article_tokens, summary_tokens

    def __len__(self) -> int:
        return len(self.stories)

    def __getitem__(self, place: int) -> tuple[list[int], list[int]]:
        story = self.stories[place]
        summary = self.tokenizer.encode(story.summary).ids[: self.summary_tokens - 1]
        return self.article(story.article), [text.BEGIN, *summary, text.END]

    def article(self, words: str) -> list[int]:
        """Return the tokens of an article, truncated."""
        # Truncate the text first, because tokenizing a long text is slow. A token has fewer than 20 letters.
        words = words[: 20 * self.article_tokens]
        return self.tokenizer.encode(words).ids[: self.article_tokens] or [text.UNKNOWN]


def collate(samples: Iterable[tuple[list[int], list[int]]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return ``(source, prefix), target``, int64: (batch, S), and twice (batch, T).

    The target is the summary without BEGIN: at each position, the token that follows the prefix.
    """
    articles, summaries = map(list, zip(*samples, strict=True))
    targets = text.padded(summaries)
    return (text.padded(articles), targets[:, :-1].contiguous()), targets[:, 1:].contiguous()


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over summaries of their mean -log p per token, without padding."""
    lost = -outputs.gather(2, targets[..., None]).squeeze(2)
    counted = targets != text.PAD
    return ((lost * counted).sum(1) / counted.sum(1)).mean()


def workload(config: dict) -> Workload:
    """Return the summarisation workload.

    Args:
        config: ``model`` is one of ``PRESETS``. ``data`` is a folder with stories, or None for dtlib's own corpus.
            ``library="networkx"`` selects the library on which the checkpoint was not trained. ``start`` is
            ``"scratch"``, or ``"pretrained"`` for the checkpoint. ``vocabulary`` is the largest number of tokens.
            ``article_tokens`` and ``summary_tokens`` are the lengths at which texts are truncated. ``test_articles``
            is the number of articles in an evaluation, at equal distances in the test data; 0 means all. ``beams`` is
            the width of the beam search; 1 is greedy decoding. ``dropout`` and ``seed`` are for the model.

    Raises:
        DtlibError: for an unknown key, preset or value, and for a folder without usable stories.
    """
    config = settings(config, DEFAULTS, "summarization")
    preset = chosen(PRESETS, config["model"], "summarization")
    for key, least in (
        ("vocabulary", 50),
        ("article_tokens", 1),
        ("summary_tokens", 2),
        ("test_articles", 0),
        ("beams", 1),
    ):
        number(f"{key} of the summarization workload", config[key], least)
    if not 0 <= config["dropout"] < 1:
        raise DtlibError(f"dropout of the summarization workload is {config['dropout']}: set 0 or more, below 1.")
    pretrained = _pretrained(config)
    train, test = _stories(config)
    if config["vocabulary"] == VOCABULARY and (pretrained or config["data"] is None):
        tokenizer = text.load_tokenizer(TOKENIZER)
    else:
        sample = stories.spread(train, CORPUS_SAMPLE)
        tokenizer = text.train_tokenizer((each for s in sample for each in s[1:]), config["vocabulary"])
    sizes = config["article_tokens"], config["summary_tokens"]
    test_data = Summaries(test, tokenizer, *sizes)
    layers = transformer.layers(tokenizer.get_vocab_size(), **preset, dropout=config["dropout"])
    model = transformer.Summarizer(layers, config["seed"])
    if pretrained:
        load_checkpoint(model)
    return Workload(
        name="summarization", model=model, layers=layers, seed=config["seed"],
        train=Summaries(train, tokenizer, *sizes), test=test_data, collate=collate, loss_fn=loss_fn,
        evaluate=partial(evaluate, data=test_data, articles=config["test_articles"], beams=config["beams"]),
    )  # fmt: skip


def _pretrained(config: dict) -> bool:
    """Return whether the model starts from the checkpoint.

    Raises:
        DtlibError: for an unknown ``start``, or if the checkpoint is of another model.
    """
    if config["start"] not in ("scratch", "pretrained"):
        raise DtlibError(f"start is {config['start']!r}: choose 'scratch' or 'pretrained'.")
    pretrained = config["start"] == "pretrained"
    if pretrained and (config["model"] != "small" or config["vocabulary"] != VOCABULARY):
        raise DtlibError(
            f"start is 'pretrained', model {config['model']!r} and vocabulary {config['vocabulary']}, but the "
            f"checkpoint is for model 'small' with {VOCABULARY} tokens."
        )
    return pretrained


def _stories(config: dict) -> tuple[list[stories.Story], list[stories.Story]]:
    folder, library = config["data"], config["library"]
    if folder is None:
        if library not in (None, "networkx"):
            raise DtlibError(f"library is {library!r}: choose 'networkx', or leave it out for all others.")
        within = f"{library}/" if library else ""
        return stories.embedded(f"{within}train"), stories.embedded(f"{within}test")
    if library:
        raise DtlibError(f"library {library!r} belongs to the embedded data: set data or library, not both.")
    train, test, broken = stories.read_folder(folder)
    if broken:
        some = "; ".join(f"{each.where} {each.why}" for each in broken[:3])
        good = len(train) + len(test)
        warnings.warn(f"{len(broken)} broken stories beside {good} good ones were left out: {some}.", stacklevel=3)
    return train, test


@torch.no_grad()
def load_checkpoint(model: nn.Module) -> None:
    """Copy the parameters of dtlib's own checkpoint into the model; ``python -m tools.pretrain`` has trained them."""
    from safetensors.torch import load_file

    found = load_file(CHECKPOINT)  # float16; tied weights are stored once
    for name, parameter in model.named_parameters():
        parameter.copy_(found[name])


def evaluate(model: nn.Module, comm: Communicator, data: Summaries, articles: int = 0, beams: int = 1) -> dict:
    """Return the mean ROUGE-L of the model's summaries and, for comparison, of the articles' first sentences.

    The keys are ``rouge_l`` and ``lead_rouge_l``. All ranks call it, and each one summarises a part of the articles.
    """
    mine = stories.spread(data.stories, articles)[comm.rank :: comm.size]
    written = summarize(model, data, [story.article for story in mine], beams)
    scores = [rouge_l(story.summary, guess) for story, guess in zip(mine, written, strict=True)]
    leads = [rouge_l(story.summary, lead(story.article)) for story in mine]
    return {"rouge_l": shared_mean(scores, comm), "lead_rouge_l": shared_mean(leads, comm)}
