"""What the workshop trains: data read and refused, models cut into stages, summaries and how they are judged."""

import csv
import gzip
import struct
import tarfile
import warnings
from collections import Counter

import numpy as np
import pytest
import torch

import dtlib
from dtlib.errors import DtlibError
from dtlib.parallel.pipeline.layers import PipelineModule
from dtlib.workloads import beam, digits, images, rouge, stories, summarization, text, transformer, vision
from tests.ranks import on_ranks
from tools import pretrain

TINY = {"model": "tiny", "dropout": 0.0, "test_articles": 6}


def refusal(function, *args) -> str:
    with pytest.raises(DtlibError) as error:
        function(*args)
    return str(error.value)


@on_ranks(2, 3, slow=(2,))
def test_a_pipeline_of_the_layers_learns_what_the_model_learns(world):
    torch.manual_seed(5)
    tokens = torch.randint(4, 4096, (4 * world.size, 12))
    tokens[0, 7:] = text.PAD
    summaries = torch.randint(4, 4096, (4 * world.size, 7))
    x = torch.rand(4 * world.size, 1, 28, 28, dtype=torch.float64)
    for one, inputs, targets in (
        (vision.workload({"model": "resnet", "seed": 3}), x, torch.arange(4 * world.size) % 10),
        (summarization.workload({**TINY, "seed": 3}), (tokens, summaries[:, :-1]), summaries[:, 1:]),
    ):
        alone = one.model.double()
        module = PipelineModule(one.layers, world.size, one.loss_fn, "uniform", world.comm, base_seed=one.seed).double()
        config = {
            "train_batch_size": 4 * world.size, "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": world.size,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        }  # fmt: skip
        engine, *_ = dtlib.initialize(model=module, config=config)
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        slices = [slice(4 * i, 4 * i + 4) for i in range(world.size)]
        for _ in range(2):
            both = isinstance(inputs, tuple)
            batches = [(tuple(i[s] for i in inputs) if both else inputs[s], targets[s]) for s in slices]
            loss = one.loss_fn(alone(inputs), targets)
            assert abs(engine.train_batch(iter(batches)).item() - loss.item()) < 1e-12, one.name
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        whole = dict(alone.named_parameters(remove_duplicate=False))
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter, whole[name], rtol=0, atol=1e-12)


@on_ranks(2)
def test_ranks_share_an_evaluation(world):
    one = vision.workload({})
    table = vision.confusion(one.model, one.test, world.comm)
    guesses = one.model(one.test.images).argmax(1)
    assert table.sum() == len(one.test) == 357 and table.trace() == (guesses == one.test.labels).sum()
    assert torch.equal(table.sum(1), torch.bincount(one.test.labels)) and one.model.training
    right = (guesses == one.test.labels).double().mean().item()
    assert abs(one.evaluate(one.model, world.comm)["accuracy"] - right) < 1e-12
    one = summarization.workload({**TINY, "test_articles": 3, "summary_tokens": 8})
    assert [stories.spread(range(count), 200)[-1] for count in (200, 201, 399, 400, 1744)] == [199, 199, 397, 398, 1735]
    assert all(len(stories.spread(range(count), 200)) == min(count, 200) for count in (7, 200, 399, 401))
    assert stories.spread([1, 2], 0) == [1, 2]
    shown = stories.spread(one.test.stories, 3)
    assert len({story.name.split("/")[0] for story in shown}) == 3
    written = beam.summarize(one.model, one.test, [each.article for each in shown], 1)
    figures = one.evaluate(one.model, world.comm)
    assert abs(figures["rouge_l"] - pretrain.mean_rouge_l(shown, written)) < 1e-12
    assert abs(figures["lead_rouge_l"] - pretrain.mean_rouge_l(shown, [rouge.lead(s.article) for s in shown])) < 1e-12


def test_digits_are_learnt():
    assert [len(x) for x, _ in digits.split()] == [1440, 357]
    one = vision.workload({})
    optimizer = torch.optim.AdamW(one.model.parameters(), 5e-3)
    for places in torch.randperm(1440 * 8, generator=torch.Generator().manual_seed(0)).split(32):
        images_, labels = one.train[places % 1440]
        optimizer.zero_grad()
        one.loss_fn(one.model(images_), labels).backward()
        optimizer.step()
    assert one.evaluate(one.model, dtlib.init().comm)["accuracy"] > 0.94
    assert vision.workload({"model": "resnet"}).model(images_).shape == (len(labels), 10)


def idx(array) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def test_mnist_and_cifar_from_a_folder(tmp_path):
    chance = np.random.default_rng(0)
    pixels, labels = chance.integers(0, 256, (6, 28, 28), np.uint8), np.arange(6, dtype=np.uint8)
    for which in ("train", "t10k"):
        (tmp_path / f"{which}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
        (tmp_path / f"{which}-labels-idx1-ubyte").write_bytes(idx(labels))
    one = vision.workload({"data": str(tmp_path)})
    image, label = one.train[4]
    assert image.shape == (1, 28, 28) and label == 4 and torch.equal(image[0], torch.from_numpy(pixels[4]) / 255)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    for wrong, their in ((pixels[:, :27], labels), (pixels, labels + 5)):
        path.write_bytes(gzip.compress(idx(wrong)))
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(their))
        assert "MNIST has 28 x 28 and ten classes" in refusal(images.read_folder, str(tmp_path))
    negative = idx(pixels).replace(struct.pack(">2i", 6, 28), struct.pack(">2i", -6, -28), 1)
    for wrong, promise in ((negative, "-6 x -28 x 28"), (idx(pixels[:0]), "0 x 28 x 28")):
        path.write_bytes(gzip.compress(wrong))
        assert f"should have {promise}" in refusal(images.read_folder, str(tmp_path))
    path.write_bytes(gzip.compress(idx(pixels)[:-5]))
    assert f"{path} should have 6 x 28 x 28 = 4704 bytes, but has 4699" in refusal(images.read_folder, str(tmp_path))
    path.write_bytes(gzip.compress(idx(pixels))[:-5])
    assert f"{path} is a broken gzip file" in refusal(images.read_folder, str(tmp_path))

    cifar = tmp_path / "cifar" / "cifar-10-batches-bin"
    rows = chance.integers(0, 256, (4, 3072), np.uint8)
    path.unlink()
    cifar.mkdir(parents=True)

    def batch(*labels):
        return b"".join(bytes([label]) + row.tobytes() for label, row in zip(labels, rows, strict=True))

    for name in (*images.CIFAR_TRAIN, "test_batch.bin"):
        (cifar / name).write_bytes(batch(0, 1, 9, 3))
    (x, y), (x_test, _), classes = images.read_folder(str(cifar.parent))
    assert x.shape == (20, 3, 32, 32) and y[:4].tolist() == [0, 1, 9, 3] and classes[9] == "truck"
    assert torch.equal(x[4:8], x_test) and (x_test[2].flatten().numpy() == rows[2]).all()
    (cifar / "data_batch_2.bin").write_bytes(batch(0, 10, 9, 3))
    assert "data_batch_2.bin has labels up to 10" in refusal(images.read_folder, str(cifar))
    (cifar / "data_batch_2.bin").write_bytes(b"short")
    assert "data_batch_2.bin has 5 bytes" in refusal(images.read_folder, str(cifar))
    (cifar / "data_batch_2.bin").unlink()
    assert "data_batch_2.bin is missing" in refusal(images.read_folder, str(cifar))
    (tmp_path / "empty").mkdir()
    assert "contains neither MNIST nor CIFAR-10. MNIST is four" in refusal(images.read_folder, str(tmp_path / "empty"))


def test_unknown_keys_and_values_are_refused():
    assert "'modle': did you mean 'model'?" in refusal(vision.workload, {"modle": "mlp"})
    assert "choose one of mlp" in refusal(vision.workload, {"model": "vgg"})
    assert "give a whole number" in refusal(vision.workload, {"seed": "3"})
    assert "There is no folder" in refusal(vision.workload, {"data": "/nowhere"})
    assert "choose 'scratch' or 'pretrained'" in refusal(summarization.workload, {"start": "warm"})
    assert "for model 'small'" in refusal(summarization.workload, {"start": "pretrained", "model": "tiny"})
    assert "beams of the summarization workload is 0: give a whole number from 1" in refusal(
        summarization.workload, {"beams": 0}
    )
    assert "dropout of the summarization workload is 1.5" in refusal(summarization.workload, {"dropout": 1.5})
    assert "choose 'networkx'" in refusal(summarization.workload, {"library": "numpy"})


def test_stories_from_a_folder_the_good_ones_around_the_broken(tmp_path):
    from pyarrow import parquet, table

    def row(i):
        return {"article": f"Number {i} is here. It stays.", "highlights": f"one {i}\ntwo", "id": f"a{i}"}

    assert "has no .story, .parquet files" in refusal(stories.read_folder, str(tmp_path))
    train, test = tmp_path / "train", tmp_path / "test"
    train.mkdir()
    test.mkdir()
    (train / "bare.story").write_text("An article without an end.")
    assert f"{train / 'bare.story'} has no @highlight" in refusal(stories.read_folder, str(tmp_path))
    (train / "good.story").write_text("The article.\n\n@highlight\n\nFirst said\n\n@highlight\n\nThen this.\n")
    (train / "latin.story").write_bytes("Café\n\n@highlight\n\nCoffee".encode("latin-1"))
    rows = {k: [row(i)[k] for i in (1, 2)] for k in row(0)}
    parquet.write_table(table({**rows, "article": [rows["article"][0], None]}), train / "rows.parquet")
    parquet.write_table(table({k: [row(i)[k] for i in (3, 4)] for k in row(0)}), test / "rows.parquet")
    (test / "cut.parquet").write_bytes((test / "rows.parquet").read_bytes()[:-20])
    parquet.write_table(table({"text": ["a"]}), test / "other.parquet")
    learn, held, broken = stories.read_folder(str(tmp_path))
    assert [s.name.rsplit("/", 1)[-1] for s in learn] == ["good.story", "a1"]
    assert learn[0].summary == "First said. Then this." and learn[1].summary == "one 1. two."
    assert [s.name for s in held] == ["a3", "a4"]
    assert Counter(each.where.replace(str(tmp_path), "") for each in broken) == Counter(
        ["/train/bare.story", "/train/latin.story", "/train/rows.parquet row 2", "/test/cut.parquet",
         "/test/other.parquet"]
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        one = summarization.workload({**TINY, "data": str(tmp_path), "vocabulary": 60})
    assert "5 broken stories beside 4 good ones were left out" in str(told[0].message)
    assert len(one.train) == 2 and one.model(one.collate([one.train[0]])[0]).shape[2] <= 60


def test_without_names_that_say_so_one_story_in_ten_is_for_the_test(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.story").write_text(f"Article {i}.\n\n@highlight\n\nNumber {i}\n")
    train, test, _ = stories.read_folder(str(tmp_path))
    assert len(train) + len(test) == 40 and 1 <= len(test) <= 10
    assert stories.read_folder(str(tmp_path))[1] == test


def test_the_embedded_stories_are_those_of_the_table():
    with tarfile.open(stories.EMBEDDED) as archive:
        names = [member.name for member in archive]
    licensed = {name.split("/")[1] for name in names if name.startswith("licences/")}
    with open(stories.DATA / "docstrings.csv") as file:
        rows = {row["library"]: row for row in csv.DictReader(file)}
    found = Counter(name.removeprefix("networkx/").split("/")[1] for name in names if not name.startswith("licences/"))
    assert found == {name: int(row["stories"]) for name, row in rows.items()}
    assert licensed == set(rows) and all(row["licence"] for row in rows.values())
    train = {name.split("/")[1] for name in names if name.startswith("train/")}
    test = {name.split("/")[1] for name in names if name.startswith("test/")}
    assert not train & test and "networkx" not in train | test and len(train) > 40


def test_the_last_layer_begins_by_copying_what_came_after_the_last_word():
    torch.manual_seed(0)
    model = transformer.Summarizer(transformer.layers(200, 160, 5, 2, 2, 0.1), 0).eval()
    source = torch.arange(10, 30)[None]
    prefix = torch.tensor([[14, 25, 17]])
    others = model((source, prefix)).scatter(
        2, prefix[..., None], -torch.inf
    )  # the embedding is tied: itself is likely
    assert others[0].argmax(1).tolist() == [15, 26, 18]
    padding = torch.cat([source, torch.zeros(1, 9, dtype=torch.int64)], 1)
    both = [model((each, torch.tensor([[text.BEGIN, 14, 25]]))) for each in (source, padding)]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(
        model.next(model.encode(source), source, torch.tensor([[text.BEGIN, 14]])), both[0][:, 1]
    )
    assert torch.allclose(both[0].exp().sum(2), torch.ones(1, 3), atol=1e-4)


class Table(torch.nn.Module):
    """Six tokens; the likeliest first one, 4, leads to nothing good."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((6, 6), 0.01))
        with torch.no_grad():
            self.weight[text.BEGIN, 4], self.weight[text.BEGIN, 5] = 0.6, 0.4
            self.weight[4, 4], self.weight[4, text.END], self.weight[5, text.END] = 0.3, 0.2, 1.0

    def forward(self, inputs):
        return self.weight.log()[inputs[1]]


def test_beams_find_what_the_likeliest_token_misses():
    source = torch.tensor([[4, 5], [5, 4]])
    greedy, wide = (beam.search(Table(), source, beams, 5) for beams in (1, 2))
    assert greedy[0].tolist()[:2] == [4, 4] and wide[:, :2].tolist() == [[5, text.END]] * 2
    assert (wide[:, 2:] == text.PAD).all()
    assert greedy[0].tolist() == [4, 4, 4, text.END], "4, 4, 4 would stand there a second time"


def test_each_summary_counts_alike_and_padding_nothing():
    outputs = torch.randn(2, 4, 9, dtype=torch.float64).log_softmax(2)
    targets = torch.tensor([[5, 6, 7, 2], [5, 2, 0, 0]])
    each = [summarization.loss_fn(outputs[i : i + 1, :n], targets[i : i + 1, :n]) for i, n in ((0, 4), (1, 2))]
    torch.testing.assert_close(summarization.loss_fn(outputs, targets), sum(each) / 2, rtol=0, atol=1e-12)


def test_a_word_is_the_same_token_wherever_it_stands():
    tokenizer = text.load_tokenizer(summarization.TOKENIZER)
    inside, outside = (tokenizer.encode(words).tokens for words in ("numpy.matrix_rank(A)", "the rank of a matrix"))
    assert {"matrix", "rank"} <= set(inside) & set(outside)
    words = "Return the (i, j) entries of nx.Graph's edge_list."
    assert text.as_text(tokenizer, [*tokenizer.encode(words).ids, text.END, 9]).lower() == words.lower()
    trained = text.train_tokenizer(["a [END] of the list", "the [END] of a"], 60)
    for one in (tokenizer, trained):
        for special in text.SPECIAL:
            assert min(one.encode(f"the {special} of a list").ids) >= text.UNKNOWN, "letters are no control token"
    found = [stories.Story("a", "An article of the list.", "The [END] of it, and more")] * 2
    of_tokens = summarization.Summaries(found, tokenizer, 8, 32)[0][1]
    assert of_tokens.count(text.END) == 1 and "end] of it" in text.as_text(tokenizer, of_tokens[1:])


def test_rouge_and_what_it_is_compared_with():
    found = [
        stories.Story(w, f"pkg.f(x)\n\nGives {w} back. More.", f"Return {w}")
        for w in ["one", "two", "six", "one", "two"]
    ]
    assert rouge.lead(found[0].article) == "Gives one back." and rouge.lead("One. Two.\n\nThree.") == "One."
    assert rouge.rouge_l("Return the rank", "the ranks") == pytest.approx(0.8)
    figures = pretrain.baselines(found[:3], found[3:])
    assert (
        figures["nearest"] == 1 and 0 < figures["constant"] < 1 and pretrain.best_constant(found).startswith("return")
    )


def test_the_checkpoint_writes_what_the_articles_are_about():
    one = summarization.workload({"start": "pretrained"})
    held = one.test.stories[::80]
    written = beam.summarize(one.model, one.test, [story.article for story in held], 2)
    reached = pretrain.mean_rouge_l(held, written)
    assert reached > 0.2 and reached > pretrain.mean_rouge_l(held, written[1:] + written[:1]) + 0.03
    assert (
        summarization.workload({"start": "pretrained", "library": "networkx"}).train.stories[0].name[:8] == "networkx"
    )
    again = dict(summarization.workload({"start": "pretrained", "seed": 7}).model.named_parameters())
    assert all(torch.equal(again[name], parameter) for name, parameter in one.model.named_parameters())
