"""Samples in files, and loaders that lose none of them: each exactly once an epoch, whoever reads and resumes."""

import errno
import functools
import io
import json
import multiprocessing
import os
import signal
import sys
import tarfile
from contextlib import suppress
from itertools import chain, product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from dtlib.errors import DtlibError
from dtlib.storage import FORMATS, Cached, Loader, StorageError, cache, mlperf, open_samples, page_cache, stage, write
from dtlib.storage.formats import INDEX
from dtlib.storage.order import order, slice_of_rank
from dtlib.storage.preprocessing import RECORD, raw_samples, record_of
from dtlib.storage.utilisation import EmulatedAccelerator, Utilisation, measure
from tests.cases import for_each, in_processes, refuses
from tests.conftest import ROOT
from tests.ranks import on_ranks

NUMBERED = np.dtype([("number", "<i4"), ("data", "u1", (28,))])  # 32 bytes: few, and no multiple of tar's 512
SAMPLES, PER_SHARD = 103, 16


def numbered(count=SAMPLES):
    rows = np.zeros(count, NUMBERED)
    rows["number"], rows["data"] = np.arange(count), np.arange(count)[:, None] % 251
    return rows


@pytest.fixture
def folder_of(tmp_path):
    """A folder of numbered samples in a format."""

    def write_them(form, count=SAMPLES, name="samples"):
        return write(tmp_path / name / form, numbered(count), NUMBERED, form, per_shard=PER_SHARD, row_group=8)

    return write_them


class Numbers(torch.utils.data.Dataset):
    """A reader of nothing: a sample is its number."""

    block, window = 1, 1

    def __init__(self, count, block=1, window=1):
        self.count, self.block, self.window = count, block, window

    def __len__(self):
        return self.count

    def read(self, numbers):
        return {"number": torch.tensor(numbers)}, []

    def will_need(self, numbers):
        pass


def flat(lists):
    return list(chain.from_iterable(lists))


def numbers_in(batches):
    return [number for batch in batches for number in batch["number"].tolist()]


# --- formats and readers -------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_is_read(tmp_path, form):
    records = [record_of(*sample) for sample in raw_samples(37)]
    folder = write(tmp_path / form, records, RECORD, form, per_shard=16, row_group=8)
    reader = open_samples(folder)
    batch = reader[[5, 36, 17, 5]]
    for name in RECORD.names:
        expected = np.stack([records[number][name] for number in (5, 36, 17, 5)])
        assert batch[name].numpy().dtype == expected.dtype
        np.testing.assert_array_equal(batch[name].numpy(), expected)
        np.testing.assert_array_equal(reader[17][name].numpy(), records[17][name])
    assert len(reader) == 37 and [len(v) for v in reader[[]].values()] == [0, 0, 0]
    only = open_samples(folder, columns=["label"])
    assert list(only[[1, 2]]) == ["label"]
    if form == "parquet":  # of another row group: its images stay on the disk
        only.files.counters.reset()
        assert len(only[[9, 12]]["label"]) == 2 and 0 < only.files.counters.totals()["bytes"] < 200
    for number in (37, -1):
        with pytest.raises(IndexError):
            reader[[number]]
    for few in ([], [3]):  # of one row, or none, any stride will do
        for name in RECORD.names:
            np.testing.assert_array_equal(reader[few][name], np.stack(records)[few][name])
    with pytest.raises(TypeError):
        reader[[2.5]]
    for number in (np.int64(17), torch.tensor(17)):
        assert reader[number]["label"] == records[17]["label"] and reader[number]["image"].shape == (32, 32, 3)


def test_fields_at_places_where_numbers_do_not_begin(tmp_path):
    """As of MNIST: a record's length is no multiple of its number's; and with gaps, as C's compilers leave them."""
    for at, dtype in enumerate((
        np.dtype([("image", "u1", (7, 3)), ("label", "<i8"), ("half", "<f2"), ("yes", "?")]),
        np.dtype([("image", "u1", (7, 3)), ("label", "<i8")], align=True),
    )):  # fmt: skip
        rows = np.zeros(11, dtype)
        rows["label"], rows["image"] = np.arange(11) - 5, np.arange(11)[:, None, None]
        for form in FORMATS:
            reader = open_samples(write(tmp_path / f"{at}{form}", rows, dtype, form, 8, 4))
            for few in ([], [3], [10, 0, 7]):
                batch = Cached(reader)[few]
                assert list(batch) == list(dtype.names)
                for name in dtype.names:
                    np.testing.assert_array_equal(batch[name], rows[few][name])


def test_tar_files_are_those_that_others_read(folder_of):
    with tarfile.open(folder_of("tar") / "shard-00001.tar") as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == [f"{number:07}.bin" for number in range(16, 32)]
        assert tar.extractfile(members[3]).read() == numbered()[19].tobytes()


def test_what_cannot_be_written_is_refused(tmp_path):
    refuses("'zip': choose one of files", lambda: write(tmp_path / "a", numbered(), NUMBERED, "zip"))
    refuses("31 bytes, but the dtype 32", write, tmp_path / "b", [b"x" * 31], NUMBERED, "shards")
    with pytest.raises(DtlibError, match="per_shard=10 must be a multiple of row_group=8"):
        write(tmp_path / "c", numbered(), NUMBERED, "parquet", per_shard=10, row_group=8)
    for sizes in ({"per_shard": 0}, {"row_group": -1}):
        refuses("give a whole number from 1 to", write, tmp_path / "c", numbered(), NUMBERED, "shards", **sizes)
    for kind, form in ((">i4", "shards"), ("U3", "tar"), ("M8[s]", "files"), ("c8", "parquet"),
                       (("u1", (0,)), "shards"), ([("y", "u1")], "shards"), ("O", "shards")):  # fmt: skip
        refuses(f"Field 'x' is .* which readers of {form} do not", write, tmp_path / "c", [], [("x", kind)], form)
    for dtype, words in (
        ("<i4", "int32 has no fields"),
        ({"names": ["a", "b"], "formats": ["u1", "u1"], "offsets": [1, 0]}, "fields in order, without overlap"),
    ):
        refuses(words, write, tmp_path / "c", [], dtype, "shards")
    for record in (32, np.zeros((), [("data", "u1", (28,)), ("number", "<i4")])):
        refuses("convert it", write, tmp_path / "c", [record], NUMBERED, "shards")
    write(tmp_path / "d", numbered(), NUMBERED, "shards")
    index = (tmp_path / "d" / "index.json").read_text()
    (tmp_path / "e").mkdir()
    for text in ("", index[:40], "[]", "{}", index.replace("shards", "zip"), index.replace("<i4", "<q9")):
        (tmp_path / "e" / "index.json").write_text(text)
        for use in (open_samples, lambda folder: stage(folder, tmp_path / "f")):
            refuses(r"index\.json is cut off, or not made by", use, tmp_path / "e")
    refuses("already has samples", lambda: write(tmp_path / "d", numbered(), NUMBERED, "shards"))
    refuses(r"has no index\.json", open_samples, tmp_path)
    refuses("has no column 'colour': it has number, data", open_samples, tmp_path / "d", columns=["colour"])


# --- each sample once, and resuming --------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 200), seed=st.integers(0, 2**40), epoch=st.integers(0, 9),
       block=st.integers(1, 20), window=st.integers(1, 5))  # fmt: skip
def test_an_order_has_every_number_once(samples, seed, epoch, block, window):
    numbers = order(samples, seed, epoch, block, window)
    assert sorted(numbers.tolist()) == list(range(samples))
    for at in range(0, samples - samples % (block * window), block * window):
        assert len(set(numbers[at : at + block * window] // block)) <= 2 * window, "it is read from a few blocks"


def test_orders_differ_by_epoch_and_seed_and_stay_as_they_are():
    assert order(8, 3, 0).tolist() == [0, 4, 7, 1, 5, 6, 3, 2], "in every version: a state is worth nothing otherwise"
    several = {tuple(order(50, seed, epoch, block)) for seed in (0, 1) for epoch in (0, 1) for block in (1, 4)}
    assert len(several) == 8


def loop(reader, position, ranks, batch_size, steps, **settings):
    """What ``ranks`` ranks take in ``steps`` steps, and their states; each rank's loader is a new one."""
    loaders = [Loader(reader, batch_size, rank, ranks, prefetch=0, **settings) for rank in range(ranks)]
    got, states = [], []
    for loader in loaders:
        if position:
            loader.load_state_dict(position)
        batches = [batch for _, batch in zip(range(steps), loader, strict=False)]
        got.append([batch["number"].tolist() for batch in batches])
        states.append(loader.state_dict())
    return got, states


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_sample_once_an_epoch_however_often_it_is_resumed(data):
    """Save, resume, save, resume within one epoch, each time on other numbers of ranks and with another batch size."""
    samples = data.draw(st.integers(1, 120), "samples")
    reader = Numbers(samples, data.draw(st.integers(1, 9), "block"), data.draw(st.integers(1, 3), "window"))
    epoch, position, seen = data.draw(st.integers(0, 3), "epoch"), None, []
    position = {**Loader(reader, 1).state_dict(), "epoch": epoch}
    while position["epoch"] == epoch:
        ranks, batch_size = data.draw(st.integers(1, 4), "ranks"), data.draw(st.integers(1, 13), "batch size")
        got, states = loop(reader, position, ranks, batch_size, steps=data.draw(st.integers(1, 4), "steps"))
        assert len({len(batches) for batches in got}) == 1, "all ranks get the same number of batches"
        assert all(state == states[0] for state in states)
        position = json.loads(json.dumps(states[0]))
        seen += [number for batches in got for batch in batches for number in batch]
    assert sorted(seen) == list(range(samples))
    assert (position["epoch"], position["samples"]) == (epoch + 1, 0)


@pytest.mark.parametrize("form", FORMATS)
def test_workers_may_change_in_the_middle_too(folder_of, form):
    """With real files and real workers; and the samples of a step are the same for any number of ranks and workers."""
    reader, state, seen = open_samples(folder_of(form)), None, []
    alone = Loader(open_samples(folder_of(form, name="alone")), 12)
    steps = [sorted(batch["number"].tolist()) for batch in alone]
    for ranks, workers, batch_size, count in ((2, 2, 6, 2), (3, 0, 4, 2), (1, 1, 12, 1), (4, 0, 3, 99)):
        together = []
        for rank in range(ranks):
            loader = Loader(reader, batch_size, rank, ranks, workers=workers)
            if state:
                loader.load_state_dict(state)
            got = [batch["number"].tolist() for _, batch in zip(range(count), loader, strict=False)]
            together.append(got)
            ended = loader.state_dict()
        state = ended
        seen += [sorted(flat(batches)) for batches in zip(*together, strict=True)]
    assert seen == steps
    assert sorted(flat(steps)) == list(range(SAMPLES))
    assert state["epoch"] == 1 and len(Loader(reader, 3, 1, 4)) == 9


def test_what_was_read_ahead_does_not_count(folder_of):
    loader = Loader(open_samples(folder_of("shards")), 5, workers=2, prefetch=4)
    batches = iter(loader)
    next(batches), next(batches)
    assert loader.state_dict()["samples"] == 10
    del batches
    rest = numbers_in(loader)  # whoever left early goes on
    assert len(rest) == SAMPLES - 10 and loader.epoch == 1
    assert numbers_in(loader) != numbers_in(loader)  # another order
    assert loader.epoch == 3


@pytest.mark.parametrize("form", ["shards", "parquet"])
def test_large_batches_in_shared_memory_keep_their_values(folder_of, monkeypatch, form):
    """Workers pass large batches in shared memory. To see that, small ones count as large here."""
    monkeypatch.setattr("dtlib.storage.loader.SHARED", 1)
    held = list(Loader(open_samples(folder_of(form)), 8, workers=2))
    assert all(batch["data"].is_shared() and (batch["data"] == batch["number"][:, None] % 251).all() for batch in held)
    assert sorted(flat(batch["number"].tolist() for batch in held)) == list(range(SAMPLES))
    skips = Loader(open_samples(folder_of(form, name="gone"), damaged="skip"), 8, workers=1)
    next(iter(skips.reader.files.folder.glob("shard-00002*"))).unlink()
    assert sorted(numbers_in(skips)) == [number for number in range(SAMPLES) if number not in THIRD]


def test_drop_last_and_orders():
    loaders = [Loader(Numbers(50), 8, rank, 3, drop_last=True, prefetch=0) for rank in range(3)]
    assert [len(numbers_in(loader)) for loader in loaders] == [16, 16, 16]
    assert [loader.state_dict()["epoch"] for loader in loaders] == [1, 1, 1] and len(loaders[0]) == 2
    assert numbers_in(Loader(Numbers(7), 3, shuffle=False, prefetch=0)) == list(range(7))
    assert slice_of_rank(np.arange(10), 8, 4, 2, 3).tolist() == []
    state = loop(Numbers(50), None, 1, 5, 2, drop_last=True)[1][0]
    for ranks, batch_size, full in ((3, 8, 1), (1, 7, 5), (2, 20, 1), (1, 41, 0)):  # of the 40 that are left
        got, states = loop(Numbers(50), state, ranks, batch_size, full or 1, drop_last=True)
        assert all(len(batch) == batch_size for batches in got for batch in batches), "none is short"
        assert states[0]["epoch"] == 1 + (not full) and len(got[0]) == max(full, 1)
    loader = Loader(Numbers(50), 8, 0, 3, drop_last=True, prefetch=0)
    loader.load_state_dict(state)
    assert len(loader) == 2 and [len(numbers_in(loader)) for _ in range(2)] == [8, 16], "later epochs are whole"


@pytest.mark.parametrize("arguments", [
    {"batch_size": 0}, {"batch_size": 1, "rank": 2, "ranks": 2}, {"batch_size": 1, "workers": -1},
    {"batch_size": 1, "workers": 1, "prefetch": 0}, {"batch_size": 6, "ranks": 2, "drop_last": True},
])  # fmt: skip
def test_a_loader_with_nothing_to_do_is_refused(arguments):
    with pytest.raises(DtlibError):
        Loader(Numbers(10), **arguments)


def test_states_that_do_not_fit_are_refused():
    state = Loader(Numbers(10), 2, seed=1).state_dict()
    for loader in (Loader(Numbers(10), 2, seed=2), Loader(Numbers(11), 2, seed=1), Loader(Numbers(10, 4), 2, seed=1)):
        refuses("make a loader with the state's", loader.load_state_dict, state)
    ahead = {**state, "samples": 4}
    with pytest.raises(DtlibError, match="0 samples of epoch 0, another 4 of epoch 0"):
        Loader(Numbers(10), 2, seed=1).load_state_dict([state, ahead])


@on_ranks(3)
def test_ranks_share_an_epoch(world, tmp_path):
    """Real ranks with workers, which fork processes that speak MPI: saved on all, resumed on fewer."""
    folder = tmp_path / "samples"
    if world.rank == 0:
        write(folder, numbered(), NUMBERED, "shards", per_shard=PER_SHARD)
    world.comm.barrier()
    reader = open_samples(folder)
    loader = Loader(reader, 4, world.rank, world.size, workers=1, seed=3)
    mine = numbers_in(batch for _, batch in zip(range(3), loader, strict=False))
    states = world.comm.all_gather_object(loader.state_dict())
    seen = flat(world.comm.all_gather_object(mine))
    fewer = world.size - 1
    if world.rank < fewer:
        loader = Loader(reader, 5, world.rank, fewer, seed=3)
        loader.load_state_dict(states)
        mine = numbers_in(loader)
    else:
        mine = []
    seen += flat(world.comm.all_gather_object(mine))
    assert sorted(seen) == list(range(SAMPLES))


def reads_until_killed(reader, position, rank, ranks, batch_size, say, may_go):
    """A rank, in a process of its own: a batch and the state behind it, and on as soon as it may."""
    loader = Loader(reader, batch_size, rank, ranks)
    loader.load_state_dict(position)
    for batch in loader:
        os.write(say, json.dumps([batch["number"].tolist(), loader.state_dict()]).encode() + b"\n")
        os.read(may_go, 1)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_each_sample_once_after_kills(tmp_path_factory, data):
    """Ranks are killed while they read on; what they took since the last state that was saved is taken again."""
    samples, form = data.draw(st.integers(1, 90), "samples"), data.draw(st.sampled_from(FORMATS), "format")
    folder = write(tmp_path_factory.mktemp("samples") / form, numbered(samples), NUMBERED, form, 16, 8)
    reader, seen = open_samples(folder), []
    position = Loader(reader, 1).state_dict()
    for _ in range(data.draw(st.integers(1, 2), "kills")):
        if position["epoch"]:
            break
        ranks, batch_size = data.draw(st.integers(1, 4), "ranks"), data.draw(st.integers(1, 9), "batch size")
        saved, killed = sorted(data.draw(st.integers(1, 5), word) for word in ("saved", "killed"))
        children = []
        for rank in range(ranks):
            (hear, say), (may_go, go) = os.pipe(), os.pipe()
            child = os.fork()
            if not child:
                with suppress(BaseException):
                    reads_until_killed(reader, position, rank, ranks, batch_size, say, may_go)
                os._exit(0)
            os.close(say), os.close(may_go)
            children.append((child, open(hear), go))  # noqa: SIM115
        for step in range(1, killed + 1):
            lines = [hear.readline() for _, hear, _ in children]
            if not all(lines):
                assert not any(lines), "all ranks get the same number of batches"
                break
            got = [json.loads(line) for line in lines]
            if step <= saved:
                seen += flat(numbers for numbers, _ in got)
                assert all(state == got[0][1] for _, state in got)
                position = got[0][1]
            with suppress(BrokenPipeError):
                [os.write(go, b".") for _, _, go in children]
        for child, hear, go in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            hear.close(), os.close(go)
    ranks = data.draw(st.integers(1, 4), "ranks at last")
    if not position["epoch"]:
        got, _ = loop(reader, position, ranks, batch_size=5, steps=99)
        seen += flat(flat(got))
    assert sorted(seen) == list(range(samples))


# --- what is damaged -----------------------------------------------------------------------------


def truncated(path):
    os.truncate(path, 5 * path.stat().st_size // 8)


def longer_inside(path):
    """A record in the middle has three bytes more."""
    data = path.read_bytes()
    path.write_bytes(data[:70] + b"xyz" + data[70:])


def shorter_inside(path):
    data = path.read_bytes()
    path.write_bytes(data[:70] + data[73:])


def longer_number(path):
    """Three bytes more within sample 33, at its number."""
    data = path.read_bytes()
    at = data.index(np.int32(33).tobytes())
    path.write_bytes(data[:at] + b"xyz" + data[at:])


def rewrites(change):
    """A damage: ``change(table)`` in place of a Parquet file's table."""

    @functools.wraps(change)
    def damage(path):
        parquet.write_table(change(parquet.read_table(path)), path, row_group_size=8)

    return damage


@rewrites
def another_column(table):
    return table.rename_columns(["nr", "data"])


@rewrites
def fewer_rows(table):
    return table.slice(0, 9)


@rewrites
def other_width(table):
    wider = pa.array([value + b"x" for value in table["data"].to_pylist()], pa.binary(29))
    return table.set_column(1, "data", wider)


def other_groups(path):
    parquet.write_table(parquet.read_table(path), path, row_group_size=4)


@rewrites
def null_number(table):
    return _null(table, "number", 3)


@rewrites
def null_array(table):
    return _null(table, "data", 11)


def _null(table, name, row):
    values = [None if at == row else value for at, value in enumerate(table[name].to_pylist())]
    at = table.schema.get_field_index(name)
    return table.set_column(at, name, pa.array(values, table.schema.field(name).type))


def shorter_member(path):
    """A tar file that is in order, with a record that is not."""
    with tarfile.open(path) as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar.getmembers()]
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for at, (name, data) in enumerate(members):
            member = tarfile.TarInfo(name)
            member.size = len(data) - 5 * (at == 2)
            tar.addfile(member, io.BytesIO(data))


THIRD = range(32, 48)  # the samples of shard-00002
DAMAGED = [  # format, file, damage, lost samples, the byte at which it is noticed, words of the sentence
    ("files", "sample-0000040.bin", truncated, [40], 0, "ends at byte 20"),
    ("files", "sample-0000040.bin", Path.unlink, [40], 0, "No such file"),
    ("files", "sample-0000040.bin", lambda path: path.write_bytes(path.read_bytes() + b"x"), [40], 32, "has 33 bytes"),
    ("one-file", "samples.bin", truncated, range(64, SAMPLES), None, "ends at byte 2065"),
    ("shards", "shard-00002.bin", truncated, range(42, 48), None, "ends at byte 325"),
    ("shards", "shard-00002.bin", Path.unlink, THIRD, 0, "No such file"),
    ("shards", "shard-00002.bin", longer_inside, THIRD, 520, "523 bytes, but 16 records of 32 need 520"),
    ("shards", "shard-00002.bin", shorter_inside, THIRD, 517, "517 bytes, but 16 records of 32 need 520"),
    ("tar", "shard-00002.tar", truncated, range(44, 48), None, "ends at byte 12800"),
    ("tar", "shard-00002.tar", Path.unlink, THIRD, 0, "No such file"),
    ("tar", "shard-00002.tar", longer_number, range(33, 48), None, "this or an earlier record has another length"),
    ("tar", "shard-00002.tar", shorter_member, [34], 2048, "no record 0000034 of 32 bytes"),
    ("parquet", "shard-00002.parquet", truncated, THIRD, None, "cannot be read as Parquet"),
    ("parquet", "shard-00002.parquet", Path.unlink, THIRD, 0, "No such file"),
    ("parquet", "shard-00002.parquet", another_column, THIRD, None, "no column 'number', only nr, data"),
    ("parquet", "shard-00002.parquet", longer_number, THIRD, None, "bytes instead of"),
    ("parquet", "shard-00002.parquet", fewer_rows, THIRD, 0, "9 rows instead of 16"),
    ("parquet", "shard-00002.parquet", other_groups, THIRD, 0, "row groups of up to 4 rows instead of 8"),
    ("parquet", "shard-00002.parquet", null_number, range(32, 40), None, "column 'number' has rows without a value"),
    ("parquet", "shard-00002.parquet", null_array, range(40, 48), None, "column 'data' has rows without a value"),
    ("parquet", "shard-00002.parquet", other_width, THIRD, None, "binary[29]"),
]


@pytest.mark.parametrize(
    "form,name,damage,lost,offset,words,workers",
    [
        pytest.param(*row, workers, marks=[pytest.mark.slow] * (workers and row[2] is not truncated))
        for workers, row in product((0, 1), DAMAGED)
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_damage_is_told_with_file_and_offset_or_skipped_and_counted(
    folder_of, form, name, damage, lost, offset, words, workers
):
    folder = folder_of(form)
    damage(folder / name)
    with pytest.raises(StorageError) as raised:
        numbers_in(Loader(open_samples(folder), 8, workers=workers))
    assert raised.value.file == str(folder / name) and raised.value.sample in lost
    assert words in str(raised.value) and name in str(raised.value) and "Traceback" not in str(raised.value)
    assert raised.value.offset == offset if offset is not None else raised.value.offset > 0
    assert "damaged='skip'" in str(raised.value)

    loaders = [Loader(open_samples(folder, damaged="skip"), 8, rank, 2, workers=workers) for rank in range(2)]
    got = [numbers_in(loader) for loader in loaders]
    assert sorted(flat(got)) == [number for number in range(SAMPLES) if number not in lost]
    skipped = [error for loader in loaders for error in loader.skipped]
    assert sorted(error.sample for error in skipped) == list(lost)
    assert all(error.file == str(folder / name) for error in skipped)
    assert all(loader.state_dict()["epoch"] == 1 for loader in loaders), "ranks stay in step"
    if workers == 0:
        goes_on_behind_what_is_damaged(folder, lost, workers=2 * (lost == [34]))


def goes_on_behind_what_is_damaged(folder, lost, workers):
    """A loop over samples, and torch's DataLoader: an IndexError would end the one and miscount the other."""
    reader, kept = open_samples(folder, damaged="skip"), [number for number in range(SAMPLES) if number not in lost]
    for samples in (reader, Cached(reader)):
        assert [int(sample["number"]) for sample in samples] == kept
        with pytest.raises(StorageError):
            samples[lost[-1]]
    assert numbers_in(torch.utils.data.DataLoader(reader, SAMPLES, num_workers=workers)) == kept
    with pytest.raises(StorageError):  # it knows no batch without samples
        list(torch.utils.data.DataLoader(reader, 1))


def test_a_worker_that_is_killed_is_said_in_a_sentence(folder_of, monkeypatch):
    takes = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(takes, "__defaults__", (0.2,))  # seconds, of 5, until it looks at its workers
    loader = Loader(open_samples(folder_of("shards")), 2, workers=1, prefetch=1)
    with pytest.raises(DtlibError, match=r"worker.*(killed by signal|exited unexpectedly).*fewer workers"):
        for _ in loader:
            for worker in multiprocessing.active_children():
                worker.kill()
                worker.join()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_failed_is_read_again(folder_of, workers):
    """A shard is away for a moment: no sample is passed over, and the state does not count what never came."""
    folder = folder_of("shards")
    loader = Loader(open_samples(folder), batch_size=5, workers=workers)
    away = folder / "shard-00001.bin"
    away.rename(folder / "away")
    got = []
    with pytest.raises(StorageError):
        for batch in loader:
            got += batch["number"].tolist()
    assert loader.state_dict()["samples"] == len(got)
    (folder / "away").rename(away)
    for batch in loader:
        got += batch["number"].tolist()
    assert sorted(got) == list(range(SAMPLES))


def test_what_is_no_ordinary_file_is_refused_at_once(folder_of, tmp_path):
    folder = folder_of("one-file")
    for make in (os.mkfifo, Path.mkdir):
        (folder / "samples.bin").unlink()
        make(folder / "samples.bin")
        for use in (lambda: open_samples(folder).read([0]), lambda: stage(folder, tmp_path / "local")):
            refuses("no ordinary file", use, error=StorageError)
    (folder / INDEX).unlink()
    os.mkfifo(folder / INDEX)
    refuses(r"not made by dtlib\.storage\.write", open_samples, folder)


def test_files_of_others_stay(folder_of, tmp_path):
    """Neither staging nor writing puts samples in the place of a file that it did not make."""
    (tmp_path / "mine").mkdir()
    (mine := tmp_path / "mine" / "samples.bin").write_text("mine")
    folder = folder_of("one-file")
    refuses(r"samples\.bin is not a staged copy", stage, folder, mine.parent)
    refuses("File exists", lambda: write(mine.parent, numbered(), NUMBERED, "one-file"))
    assert [path.name for path in mine.parent.iterdir()] == ["samples.bin"] and mine.read_text() == "mine"


def test_what_could_not_be_written_to_its_end_does_not_stay(tmp_path):
    refuses("must have this length", write, tmp_path, [*numbered(20), b"short"], NUMBERED, "shards", per_shard=8)
    assert not list(tmp_path.iterdir())
    assert len(open_samples(write(tmp_path, numbered(20), NUMBERED, "shards", per_shard=8))) == 20


@for_each(change=[
    {"counts": {"a" * 300: 1}}, {"counts": {"\ud800": 1}}, {"counts": {"samples.bin": 10**30}},
    {"row_group": 1e400}, {"row_group": True},
    *({"counts": {name: 1}} for name in ("../thesis.txt", "/etc/hosts", "..", "a/b", "")),
])  # fmt: skip
def test_an_index_with_what_makes_no_sense_or_lies_elsewhere_is_refused(folder_of, tmp_path, change):
    folder = tmp_path / "samples" / "files"
    folder = folder if folder.exists() else folder_of("files")
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, **change}))
    for use in (open_samples, lambda folder: stage(folder, tmp_path / "local")):
        refuses(r"not made by dtlib\.storage\.write", use, folder)
    (folder / INDEX).write_text(json.dumps(index))


def test_numbers_that_make_no_sense_are_refused(folder_of, tmp_path):
    reader = open_samples(folder_of("shards"))
    for wrong in (float("nan"), float("inf"), -1, 2.5, "3", [], True):
        for name in ("batch_size", "rank", "ranks", "seed", "workers", "prefetch"):
            refuses(f"^{name} is ", Loader, reader, **{"batch_size": 4, "ranks": 2, name: wrong})
        for name in ("epoch", "samples"):
            loader = Loader(reader, 4)
            refuses(f"^{name} is ", loader.load_state_dict, {**loader.state_dict(), name: wrong})
            assert loader.state_dict() == Loader(reader, 4).state_dict()
        for name in ("per_shard", "row_group"):
            refuses(f"^{name} is ", write, tmp_path / "new", numbered(), NUMBERED, "shards", **{name: wrong})
    for name, wrong in {"workers": 65, "rank": 2, "prefetch": 0}.items():
        refuses(f"^{name} is ", Loader, reader, **{"batch_size": 4, "ranks": 2, "workers": 1, name: wrong})
    refuses(r"^samples is ", lambda: loader.load_state_dict({**loader.state_dict(), "samples": SAMPLES + 1}))


def test_two_that_write_to_one_folder_do_not_mix(tmp_path):
    """The second waits for the first, and is refused."""

    def write_one(value):
        records = (np.array([value], [("number", "i8")])[0] for _ in range(3000))
        try:
            write(tmp_path / "samples", records, [("number", "i8")], "shards", per_shard=10)
        except DtlibError as problem:
            return 2 if "already has samples" in str(problem) else 1

    assert sorted(in_processes([1, 2], write_one)) == [0, 2]
    samples, _ = open_samples(tmp_path / "samples").read(range(3000))
    assert len(set(samples["number"].tolist())) == 1


def test_a_full_disk_while_staging(folder_of, tmp_path, monkeypatch):
    """Injected, as only root could make a small disk: the third write finds no room."""
    folder, real_open, room = folder_of("shards"), open, [3 * 520]

    class Full:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            part = data[: min(room[0], 500)]
            room[0] -= len(part)
            return self._file.write(part)

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

    def opened(path, mode, **settings):
        file = real_open(path, mode, **settings)
        return Full(file) if "w" in mode else file

    monkeypatch.setattr(cache, "open", opened, raising=False)
    room[0] = 3 * 520 + 100
    with pytest.raises(StorageError, match=r"shard-00003\.bin cannot be written at byte 100 \(No space left") as raised:
        stage(folder, tmp_path / "local")
    assert (raised.value.offset, raised.value.file) == (100, str(tmp_path / "local" / "shard-00003.bin"))
    assert not (tmp_path / "local" / "index.json").exists(), "half of it is not taken for the whole"
    assert not list((tmp_path / "local").glob("*.partial"))

    room[0] = 7 * 520  # what was copied whole is not copied again
    staged = stage(folder, tmp_path / "local")
    assert 3 * 520 < staged.bytes <= 4 * 520
    assert sorted(numbers_in(Loader(open_samples(staged.folder), 8, workers=1))) == list(range(SAMPLES))


def test_a_file_that_is_missing_while_staging_is_told_as_the_source(folder_of, tmp_path):
    folder = folder_of("shards")
    (folder / "shard-00001.bin").unlink()
    with pytest.raises(StorageError, match="cannot be read at byte 0") as raised:
        stage(folder, tmp_path / "local")
    assert raised.value.file == str(folder / "shard-00001.bin")


def written_anew(folder, value):
    """Samples of the same folder, as many as the old ones and with other values, which are returned."""
    rows = numbered(40)
    rows["number"] += value
    for path in folder.iterdir():
        path.unlink()
    write(folder, rows, NUMBERED, "shards", per_shard=PER_SHARD)
    return list(range(value, value + 40))


def test_staging_where_there_is_an_older_staging(folder_of, tmp_path, monkeypatch):
    """What finds no room leaves nothing that is taken for samples, and never what an older staging has left."""
    folder, local = folder_of("shards", 40), tmp_path / "local"
    assert stage(folder, local).bytes == sum(path.stat().st_size for path in folder.glob("*.bin"))
    assert stage(folder, local).bytes == 0, "it is there already"

    def no_room(source, target):
        if full and target.name != "shard-00000.bin":
            raise StorageError(target, 0, "no room")
        return copy_file(source, target)

    copy_file = cache._copy_file
    monkeypatch.setattr(cache, "_copy_file", no_room)
    for value, full in ((1000, True), (2000, True), (3000, False), (4000, True), (5000, False)):
        expected = written_anew(folder, value)
        if full:
            refuses("no room", stage, folder, local, error=StorageError)
            refuses(r"has no index\.json", open_samples, local)
        else:
            stage(folder, local)
            assert open_samples(local)[range(40)]["number"].tolist() == expected
            names = ["index.json", *(f"shard-0000{at}.bin" for at in range(3))]
            assert sorted(path.name for path in local.iterdir()) == names
    again = stage(local, tmp_path / "again")  # from a folder that was staged itself
    assert open_samples(again.folder)[range(40)]["number"].tolist() == expected
    others = folder_of("files")
    for where in (folder, folder_of("tar"), tmp_path / "again"):
        refuses("already has samples, but not of", stage, others, where)
    (tmp_path / "a file").write_text("")
    refuses("a file cannot be written", stage, folder, tmp_path / "a file", error=StorageError)


def test_a_staged_folder_never_mixes_two_versions(folder_of, tmp_path, monkeypatch):
    """Samples that are written anew in the middle of a staging."""
    folder, copy_file = folder_of("shards", 40), cache._copy_file

    def then_anew(source, target):
        count = copy_file(source, target)
        if target.name == "shard-00000.bin":
            written_anew(folder, 1000)
        return count

    monkeypatch.setattr(cache, "_copy_file", then_anew)
    with pytest.raises(StorageError, match=r"shard-00000.bin was written again while it was staged: stage it again"):
        stage(folder, tmp_path / "local")
    assert not (tmp_path / "local" / "index.json").exists()
    monkeypatch.undo()
    stage(folder, tmp_path / "local")
    assert open_samples(tmp_path / "local")[range(40)]["number"].tolist() == list(range(1000, 1040))


def test_staging_to_a_disk_that_keeps_coarse_times(folder_of, tmp_path, monkeypatch):
    """exFAT and vfat keep whole or even seconds."""
    folder, local, utime = folder_of("shards", 40), tmp_path / "local", os.utime

    def coarse(path, times=None, ns=None):
        utime(path, times if ns is None else tuple(each // 2_000_000_000 * 2 for each in ns))

    monkeypatch.setattr(os, "utime", coarse)
    for path in folder.iterdir():
        utime(path, ns=(10**18 + 1_999_999_999,) * 2)
    assert stage(folder, local).bytes > 0
    assert stage(folder, local).bytes == 0, "it is there already"
    expected = written_anew(folder, 1000)
    assert stage(folder, local).bytes > 0
    assert open_samples(local)[range(40)]["number"].tolist() == expected


def test_processes_that_stage_at_once(folder_of, tmp_path):
    """Four of them, to one place: each finds whole files there, and its own samples."""
    folder = folder_of("shards", 4000)

    def stage_it(_):
        staged = stage(folder, tmp_path / "local")
        return open_samples(staged.folder)[range(4000)]["number"].tolist() != list(range(4000))

    assert in_processes(range(4), stage_it) == [0] * 4
    assert not list((tmp_path / "local").glob("*.partial"))


@on_ranks(3)
def test_all_ranks_learn_that_staging_failed(world, tmp_path):
    refuses(r"has no index\.json", stage, tmp_path / "nothing", tmp_path / "local", comm=world.comm)
    source = tmp_path / "samples"
    if world.rank == 0:
        write(source, numbered(), NUMBERED, "shards", per_shard=PER_SHARD)
    world.comm.barrier()
    staged = stage(source, tmp_path / "local", comm=world.comm)
    assert staged.bytes == sum(path.stat().st_size for path in source.glob("*.bin"))
    assert open_samples(staged.folder)[[50]]["number"].tolist() == [50]


# --- counters, caches, utilisation ---------------------------------------------------------------


def test_opens_reads_and_jumps_are_counted(folder_of):
    reader = open_samples(folder_of("shards"))
    numbers_in(Loader(reader, 8, shuffle=False, prefetch=0))
    totals = reader.files.counters.totals()
    assert (totals["opens"], totals["reads"], totals["bytes"]) == (7, SAMPLES, 32 * SAMPLES)
    assert totals["jumps"] == 0
    reader.files.counters.reset()
    reader.block = 1
    numbers_in(Loader(reader, 8))
    assert reader.files.counters.randomness > 0.8
    one_each = open_samples(folder_of("files"))
    numbers_in(Loader(one_each, 8, prefetch=0))
    assert one_each.files.counters.totals()["opens"] == SAMPLES


def test_the_cache_in_memory_is_read_once_and_shared_by_workers(folder_of):
    folder = folder_of("parquet")
    (folder / "shard-00002.parquet").unlink()
    reader = Cached(open_samples(folder, damaged="skip"))
    for workers in (2, 0, 1):
        loader = Loader(reader, 8, workers=workers)
        assert sorted(numbers_in(loader)) == [n for n in range(SAMPLES) if n not in THIRD]
        assert len(loader.skipped) == 16
    assert reader.files.counters.totals()["hits"] == 2 * (SAMPLES - 16)
    assert reader[5]["number"] == 5 and reader[[5, 6]]["data"].shape == (2, 28)
    for number in (-1, SAMPLES):  # kept or not
        with pytest.raises(IndexError):
            reader[number]
    refuses("3,296 bytes, but the cache may keep 100", lambda: Cached(open_samples(folder), most_bytes=100))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is cached")
def test_the_systems_cache_is_emptied_and_looked_at(folder_of):
    folder = folder_of("one-file", 20_000)
    [path.read_bytes() for path in folder.iterdir()]
    assert page_cache.cached(folder) == 1.0
    left = page_cache.drop(folder)
    if left:  # a file system in memory has no other place for its files
        assert "ALL THE SAME" in page_cache.in_words(left)
    else:
        assert page_cache.in_words(left) == "cold: 0% of the bytes were cached"
        reader = open_samples(folder)
        reader[list(range(100))]
        assert 0 < page_cache.cached(folder) < 1
    assert "could not be emptied" in page_cache.in_words(None)


def test_an_injected_delay_says_so(folder_of):
    reader = open_samples(folder_of("files"), open_delay=0.001)
    used = measure(Loader(reader, 8, prefetch=0), EmulatedAccelerator(0.0), steps=2)
    assert used.injected == "INJECTED: every open waits 1 ms" and "INJECTED" in str(used)
    assert open_samples(folder_of("shards")).injected == ""


def test_utilisation_is_compute_time_over_all_time_without_the_first_step(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("dtlib.storage.utilisation.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(
        "dtlib.storage.utilisation.time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    )

    def batches():
        for read in (100, 2, 3, 1):
            clock[0] += read
            yield torch.zeros(5, 3)

    used = measure(batches(), EmulatedAccelerator(4.0))
    assert (used.steps, used.samples, used.seconds) == (3, 15, 18.0)
    assert used.au == 12 / 18 and used.samples_a_second == 15 / 18
    assert Utilisation(0, 0, 1.0, 0.0).au == 0


def test_published_workloads_and_their_demand():
    file = ROOT / "data" / "mlperf_storage_workloads.csv"
    rows = mlperf.published(file)
    unet, bert = mlperf.named(file, "unet3d", "a100"), mlperf.named(file, "bert", "v100")
    assert len(rows) == 11 and 13_000 < unet.bytes_a_second / bert.bytes_a_second < 13_100
    small = bert.scaled(samples=100, record_bytes=2500, batch=48, compute_seconds=0.006)
    assert len(list(small.records())) == 100 and small.scale.startswith("SCALED: samples / 1,570,000, ")
    assert np.isclose(small.bytes_a_second, 48 * 2500 / 0.006)


# --- beside others -------------------------------------------------------------------------------


def test_resuming_with_other_workers_beside_torchdata(folder_of):
    """Its state has an entry for each worker, and as many have to come back. Ours is one number."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    reader = open_samples(folder_of("shards"))

    def theirs(workers):
        return StatefulDataLoader(reader, 8, num_workers=workers)

    def ours(workers):
        return Loader(reader, 8, workers=workers, shuffle=False)

    def resumed(loader, workers, others):
        first, second = loader(workers), loader(others)
        batches = iter(first)
        taken = numbers_in([next(batches) for _ in range(3)])
        second.load_state_dict(first.state_dict())
        del batches, first
        return taken + numbers_in(second)

    assert resumed(theirs, 1, 1) == resumed(ours, 1, 1) == resumed(ours, 1, 2) == list(range(SAMPLES))
    with pytest.raises(AssertionError):
        resumed(theirs, 1, 2)
