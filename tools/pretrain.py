"""Where ``data/summarizer.safetensors`` comes from: the small summariser, trained on all libraries but those held out.

    nice -n 19 python -m tools.pretrain --minutes 58

One process on one core; it goes on where it was stopped. The rate falls with the time that is left, so that whatever
time there is gets used. It writes the checkpoint in float16, and prints what it reaches on the libraries held out.
"""

import argparse
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtlib.workloads import summarization, text
from dtlib.workloads.beam import summarize
from dtlib.workloads.rouge import lead, rouge_l
from dtlib.workloads.stories import Story, spread
from dtlib.workloads.summarization import CHECKPOINT, TOKENIZER, VOCABULARY, collate
from dtlib.workloads.workload import Workload

BATCH, POOL = 32, 32  # samples in a batch; batches in a pool within which they are sorted by length
RATE, WARM_UP, LEAST = 1.5e-3, 150, 0.02  # of AdamW; steps; of the rate at the end
DROPOUT = 0.3  # the more, the later a small corpus is known by heart
SAVE_EVERY = 240  # seconds


def batches(samples: list, chance: random.Random) -> Iterator[list]:
    """An epoch: batches of articles of about the same length, in random order."""
    order = chance.sample(range(len(samples)), len(samples))
    for start in range(0, len(order), BATCH * POOL):
        pool = sorted(order[start : start + BATCH * POOL], key=lambda place: len(samples[place][0]))
        cut = [pool[place : place + BATCH] for place in range(0, len(pool), BATCH)]
        chance.shuffle(cut)
        yield from ([samples[place] for place in places] for places in cut)


def loss_of(model: nn.Module, batch: list) -> torch.Tensor:
    """The mean of -log p over the tokens of all summaries."""
    inputs, targets = collate(batch)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs)
    lost = -outputs.gather(2, targets[..., None]).squeeze(2)
    return lost[targets != text.PAD].mean()


def train(model: nn.Module, samples: list, seconds: float, saved: Path) -> None:
    """AdamW for so many seconds in all, those before an interruption included."""
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.05)
    done, step, epoch = 0.0, 0, 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, step, epoch = state["done"], state["step"], state["epoch"] + 1
    start = last = time.monotonic() - done
    while True:
        for batch in batches(samples, random.Random(epoch)):
            now = time.monotonic()
            done = (now - start) / seconds
            if done >= 1:
                return
            falling = LEAST + (1 - LEAST) * (1 + math.cos(math.pi * done)) / 2
            optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / WARM_UP) * falling
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if now - last > SAVE_EVERY:
                last = now
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "done": now - start, "step": step, "epoch": epoch}, f"{saved}.new")
                os.replace(f"{saved}.new", saved)
                print(f"{now - start:.0f} s, step {step}, epoch {epoch}, loss {loss.item():.2f}", flush=True)
        epoch += 1


def mean_rouge_l(stories: list[Story], summaries: list[str]) -> float:
    pairs = zip(stories, summaries, strict=True)
    return sum(rouge_l(story.summary, summary) for story, summary in pairs) / len(stories)


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


def report(workload: Workload, articles: int = 400) -> None:
    """ROUGE-L on articles spread over the libraries held out: the model's, and what it is compared with."""
    assert isinstance(workload.train, summarization.Summaries) and isinstance(workload.test, summarization.Summaries)
    known, held = workload.train.stories, spread(workload.test.stories, articles)
    for beams in (1, 4):
        written = summarize(workload.model, workload.test, [story.article for story in held], beams)
        print(f"model, {beams} beams: {mean_rouge_l(held, written):.3f}", flush=True)
    exchanged = written[1:] + written[:1]  # each story has the summary of its neighbour's article
    print(f"the same, articles exchanged: {mean_rouge_l(held, exchanged):.3f}")
    for name, figure in baselines(known, held).items():
        print(f"{name}: {figure:.3f}")
    print(
        f"{len(held)} articles",
        *(f"{s.summary} | {w}" for s, w in zip(held[::40], written[::40], strict=True)),
        sep="\n",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=58)
    parser.add_argument(
        "--resume", type=Path, default=Path("summarizer_training.pt"), help="state of an unfinished run"
    )
    parser.add_argument("--new-tokenizer", action="store_true", help="train the tokenizer too")
    parser.add_argument("--report", action="store_true", help="train nothing, and say what the checkpoint reaches")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.new_tokenizer:
        stories = summarization.stories.embedded("train")
        tokens = text.train_tokenizer((each for story in stories for each in story[1:]), VOCABULARY)
        tokens.save(str(TOKENIZER))
    workload = summarization.workload({"start": "pretrained"} if arguments.report else {"dropout": DROPOUT})
    if not arguments.report:
        assert isinstance(workload.train, summarization.Summaries)
        samples = [workload.train[place] for place in range(len(workload.train))]
        with sdpa_kernel(SDPBackend.MATH):  # of heads as small as these, the fused backward pass takes longer
            train(workload.model, samples, 60 * arguments.minutes, arguments.resume)
        save_file({name: value.detach().half() for name, value in workload.model.named_parameters()}, CHECKPOINT)
    report(workload)


if __name__ == "__main__":
    main()
