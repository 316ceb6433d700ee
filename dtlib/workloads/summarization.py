"""Articles to summaries: what libraries say of their functions, or CNN/DailyMail from a folder.

The embedded corpus is documentation, and is called so: name, arguments and description of a function are the article,
the line that sums it up is the summary. Whole libraries are held out for the test.
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
VOCABULARY = 4096  # of the tokenizer that comes with dtlib
PRESETS = {
    "tiny": dict(width=32, heads=2, encoders=1, decoders=1),
    "small": dict(width=160, heads=5, encoders=2, decoders=3),  # 2.6 million parameters: that of the checkpoint
    "base": dict(width=512, heads=8, encoders=6, decoders=6),  # 46 million, and 0.5 million for 1,000 tokens more
    "large": dict(width=1024, heads=16, encoders=12, decoders=12),  # 360 million
    "xlarge": dict(width=1280, heads=20, encoders=16, decoders=16),  # 740 million
}
DEFAULTS = {
    "model": "small", "data": None, "seed": 0, "library": None, "start": "scratch", "vocabulary": VOCABULARY,
    "article_tokens": 96, "summary_tokens": 32, "dropout": 0.1, "test_articles": 200, "beams": 1,
}  # fmt: skip
CORPUS_SAMPLE = 20_000  # stories that a tokenizer is trained on


class Summaries(Dataset):
    """Pairs of an article's tokens and its summary's, between BEGIN and END.

    Args:
        article_tokens, summary_tokens: what is longer is cut off there.
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
        words = words[: 20 * self.article_tokens]  # a token has fewer letters; cutting a long text is dear
        return self.tokenizer.encode(words).ids[: self.article_tokens] or [text.UNKNOWN]


def collate(samples: Iterable[tuple[list[int], list[int]]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """``(source, prefix), target``: (batch, S), and twice (batch, T), int64; the target follows on the prefix."""
    articles, summaries = map(list, zip(*samples, strict=True))
    targets = text.padded(summaries)
    return (text.padded(articles), targets[:, :-1].contiguous()), targets[:, 1:].contiguous()


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over summaries of the mean over their tokens of -log p; nothing for padding."""
    lost = -outputs.gather(2, targets[..., None]).squeeze(2)
    counted = targets != text.PAD
    return ((lost * counted).sum(1) / counted.sum(1)).mean()


def workload(config: dict) -> Workload:
    """The summarisation workload.

    Args:
        config: ``model``, one of ``PRESETS``; ``data``, a folder with stories, or None for those that come with dtlib;
            ``library``, ``"networkx"`` for the library that the checkpoint has not seen; ``start``, ``"scratch"`` or
            ``"pretrained"`` for that checkpoint; ``vocabulary``, tokens at most; ``article_tokens``,
            ``summary_tokens``, where texts are cut off; ``dropout``; ``test_articles``, how many are evaluated, spread
            over all, 0 for all; ``beams``, 1 for greedy decoding; ``seed``.

    Raises:
        DtlibError: for an unknown key or preset, and for a folder without good stories.
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
    """Does it start from the checkpoint?

    Raises:
        DtlibError: for a start that there is not, or one that is of another model.
    """
    if config["start"] not in ("scratch", "pretrained"):
        raise DtlibError(f"start is {config['start']!r}: choose 'scratch' or 'pretrained'.")
    pretrained = config["start"] == "pretrained"
    if pretrained and (config["model"] != "small" or config["vocabulary"] != VOCABULARY):
        raise DtlibError(
            f"start is 'pretrained', model {config['model']!r} and vocabulary {config['vocabulary']}: the checkpoint "
            f"is that of model 'small' with {VOCABULARY} tokens."
        )
    return pretrained


def _stories(config: dict) -> tuple[list[stories.Story], list[stories.Story]]:
    folder, library = config["data"], config["library"]
    if folder is None:
        if library not in (None, "networkx"):
            raise DtlibError(f"library is {library!r}: choose 'networkx', or none for all the others.")
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
    """The parameters that come with dtlib, trained by ``python -m tools.pretrain``."""
    from safetensors.torch import load_file

    found = load_file(CHECKPOINT)  # in float16; a tied weight stands once
    for name, parameter in model.named_parameters():
        parameter.copy_(found[name])


def evaluate(model: nn.Module, comm: Communicator, data: Summaries, articles: int = 0, beams: int = 1) -> dict:
    """``rouge_l`` of the model's summaries and ``lead_rouge_l`` of the articles' first sentences, means of F."""
    mine = stories.spread(data.stories, articles)[comm.rank :: comm.size]
    written = summarize(model, data, [story.article for story in mine], beams)
    scores = [rouge_l(story.summary, guess) for story, guess in zip(mine, written, strict=True)]
    leads = [rouge_l(story.summary, lead(story.article)) for story in mine]
    return {"rouge_l": shared_mean(scores, comm), "lead_rouge_l": shared_mean(leads, comm)}
