"""From a model's log-probabilities to a summary: beam search."""

from typing import Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from dtlib.measure.progress import tell
from dtlib.workloads import text

BATCH = 32  # articles at a time
LENGTH_POWER = 1.6  # of a summary's length, by which its log-probability is divided: 0 favours short ones


class Lengths(Protocol):
    """Of ``Summaries`` what writing takes."""

    tokenizer: Tokenizer
    summary_tokens: int

    def article(self, words: str) -> list[int]: ...


def summarize(model: nn.Module, data: Lengths, articles: list[str], beams: int = 4) -> list[str]:
    """Summaries of articles, as text.

    Args:
        model: ``model((source, prefix))`` gives log-probabilities (batch, T, vocabulary).
        data: ``Summaries``, for its tokenizer and lengths.
        beams: beginnings that are kept at a time; 1 takes the likeliest token each time.
    """
    device, was, found = next(model.parameters()).device, model.training, []
    model.eval()
    for start in range(0, len(articles), BATCH):
        tell(f"summaries are written, {start} of {len(articles)}")
        source = text.padded([data.article(each) for each in articles[start : start + BATCH]]).to(device)
        with torch.no_grad():
            best = search(model, source, beams, data.summary_tokens)
        found += [text.as_text(data.tokenizer, tokens) for tokens in best.tolist()]
    tell("")
    model.train(was)
    return found


def search(model: nn.Module, source: Tensor, beams: int, longest: int) -> Tensor:
    """The best summary of each source (batch, S), without BEGIN, cut off at ``longest``: (batch, T), int64.

    In each step every beginning is continued by every token, and the ``beams`` best of the continuations stay. One that
    has ended goes on with padding, at no cost.
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
        totals = (scores[..., None] + torch.where(ended, only_padding, steps)).flatten(1)
        scores, best = totals.topk(beams, dim=1)
        prefix = torch.cat([prefix[rows, best // vocabulary], (best % vocabulary)[..., None]], dim=2)
        if ((prefix[..., -1] == text.END) | (prefix[..., -1] == text.PAD)).all():
            break
    lengths = (prefix != text.PAD).sum(2)
    return prefix[rows[:, 0], (scores / lengths**LENGTH_POWER).argmax(1), 1:]


def _without_repetition(steps: Tensor, prefix: Tensor) -> Tensor:
    """No three tokens a second time: what followed the last two before is ruled out. R. Paulus et al., 2017."""
    before = (prefix[..., :-2] == prefix[..., -2:-1]) & (prefix[..., 1:-1] == prefix[..., -1:])
    ruled_out = torch.where(before, -torch.inf, torch.inf).to(steps.dtype)
    return steps.scatter_reduce(2, prefix[..., 2:], ruled_out, "amin")


def _following(model, source: Tensor):
    """A function of beginnings (batch, beams, T) that gives log-probabilities of what follows, (batch, beams,
    vocabulary). A source is encoded once, if the model can do that by itself."""
    if hasattr(model, "encode"):
        memory = model.encode(source)

        def last(prefix, beams):
            return model.next(memory.repeat_interleave(beams, 0), source.repeat_interleave(beams, 0), prefix)
    else:

        def last(prefix, beams):
            return model((source.repeat_interleave(beams, 0), prefix))[:, -1]

    return lambda prefix: last(prefix.flatten(0, 1), prefix.shape[1]).float().unflatten(0, prefix.shape[:2])
