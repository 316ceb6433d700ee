"""Beam search: generate a summary from a model's log-probabilities."""

from typing import Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from dtlib.measure.progress import print_line
from dtlib.workloads import text

BATCH = 32  # articles per batch
# A summary's score is its log-probability divided by its length to this power. 0 would favour short summaries.
LENGTH_POWER = 1.6


class Lengths(Protocol):
    """The part of ``Summaries`` that ``summarize`` needs."""

    tokenizer: Tokenizer
    summary_tokens: int

    def article(self, words: str) -> list[int]:
        """Return the tokens of an article."""


def summarize(model: nn.Module, data: Lengths, articles: list[str], beams: int = 4) -> list[str]:
    """Return summaries of articles, as text.

    Args:
        model: ``model((source, prefix))`` returns log-probabilities, (batch, T, vocabulary).
        data: ``Summaries``, for its tokenizer and lengths.
        articles: the texts.
        beams: the number of prefixes that the search keeps; 1 is greedy decoding.
    """
    device, was, found = next(model.parameters()).device, model.training, []
    model.eval()
    for start in range(0, len(articles), BATCH):
        print_line(f"summaries are written, {start} of {len(articles)}")
        source = text.padded([data.article(each) for each in articles[start : start + BATCH]]).to(device)
        with torch.no_grad():
            best = search(model, source, beams, data.summary_tokens)
        found += [text.as_text(data.tokenizer, tokens) for tokens in best.tolist()]
    print_line("")
    model.train(was)
    return found


def search(model: nn.Module, source: Tensor, beams: int, longest: int) -> Tensor:
    """Return the best summary, without BEGIN, of each source (batch, S): (batch, T), int64, with T at most ``longest``.

    Each step extends every prefix by every token, and keeps the ``beams`` best results. A prefix that has ended is
    extended by padding, which does not change its score.
    """
    batch, rows = len(source), torch.arange(len(source), device=source.device)[:, None]
    prefix = torch.full((batch, 1, 1), text.BEGIN, device=source.device)
    scores = torch.zeros(batch, 1, device=source.device)
    following = _following(model, source)
    never = torch.tensor([text.PAD, text.BEGIN, text.UNKNOWN], device=source.device)
    for _ in range(longest):
        steps = following(prefix).index_fill(2, never, -torch.inf)
        if prefix.shape[2] > 3:
            steps = _without_repetition(steps, prefix)
        vocabulary = steps.shape[2]
        ended = (prefix[..., -1:] == text.END) | (prefix[..., -1:] == text.PAD)
        only_padding = torch.full_like(steps, -torch.inf).index_fill(2, never[:1], 0.0)
        # Rank all pairs of prefix and token together: ``best // vocabulary`` is the prefix, ``best % vocabulary`` the
        # token.
        totals = (scores[..., None] + torch.where(ended, only_padding, steps)).flatten(1)
        scores, best = totals.topk(beams, dim=1)
        prefix = torch.cat([prefix[rows, best // vocabulary], (best % vocabulary)[..., None]], dim=2)
        if ((prefix[..., -1] == text.END) | (prefix[..., -1] == text.PAD)).all():
            break
    lengths = (prefix != text.PAD).sum(2)
    return prefix[rows[:, 0], (scores / lengths**LENGTH_POWER).argmax(1), 1:]


def _without_repetition(steps: Tensor, prefix: Tensor) -> Tensor:
    """Forbid a token if it would repeat three consecutive tokens of the prefix. R. Paulus et al., 2017."""
    before = (prefix[..., :-2] == prefix[..., -2:-1]) & (prefix[..., 1:-1] == prefix[..., -1:])
    ruled_out = torch.where(before, -torch.inf, torch.inf).to(steps.dtype)
    return steps.scatter_reduce(2, prefix[..., 2:], ruled_out, "amin")


def _following(model, source: Tensor):
    """Return a function from prefixes, (batch, beams, T), to log-probabilities of the next token.

    These are (batch, beams, vocabulary). If the model has a method ``encode``, each source is encoded only once.
    """
    if hasattr(model, "encode"):
        memory = model.encode(source)

        def last(prefix, beams):
            return model.next(memory.repeat_interleave(beams, 0), source.repeat_interleave(beams, 0), prefix)
    else:

        def last(prefix, beams):
            return model((source.repeat_interleave(beams, 0), prefix))[:, -1]

    return lambda prefix: last(prefix.flatten(0, 1), prefix.shape[1]).float().unflatten(0, prefix.shape[:2])
