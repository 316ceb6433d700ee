"""Tokenizers: byte-pair encoding, trained on the corpus in use, with Hugging Face's ``tokenizers``."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ["[PAD]", "[BEGIN]", "[END]", "[UNK]"]


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a tokenizer of at most ``vocabulary`` tokens, in lower case.

    Words are split at punctuation, and a token that continues a word begins with ``##``. So ``rank`` is the same token
    in "the rank of a matrix" and in ``matrix_rank``, and the model can copy it from there.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNKNOWN], continuing_subword_prefix="##"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\W_]+|[^\w\s]|_"), "removed", invert=True)
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=2, special_tokens=SPECIAL, continuing_subword_prefix="##",
        limit_alphabet=200, show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return _of_text_alone(tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer from a JSON file."""
    return _of_text_alone(Tokenizer.from_file(str(path)))


def _of_text_alone(tokenizer: Tokenizer) -> Tokenizer:
    """Make the tokenizer treat text such as "[END]" as letters, and not as the token that ends a summary."""
    tokenizer.encode_special_tokens = True
    return tokenizer


def as_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Decode tokens up to the first END to text, with the spaces of a normal sentence."""
    tokens = [int(token) for token in tokens]
    if END in tokens:
        tokens = tokens[: tokens.index(END)]
    return tidy(tokenizer.decode(tokens))


def tidy(text: str) -> str:
    """Remove the spaces that decoding leaves around punctuation, and capitalise the first letter."""
    for spaced, close in ((r" ([_.-]) (?=\w)", r"\1"), (r"([(\['_]) (?=\w)", r"\1"), (r" ([.,;:!?)\]'])", r"\1")):
        text = re.sub(spaced, close, text)
    return text[:1].upper() + text[1:]


def padded(rows: list[list[int]], to: int = 1) -> torch.Tensor:
    """Return a tensor (rows, longest), int64, padded with PAD; the width is a multiple of ``to``."""
    longest = -(-max(map(len, rows)) // to) * to
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
