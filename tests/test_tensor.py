"""Tensor-parallel layers against unsplit ones, beside whole models (test_parity.py): bytes, memory and refusals."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import dtlib
from dtlib.errors import DtlibError
from dtlib.gradients.shard_info import info_of
from dtlib.measure.activations import Activations
from dtlib.measure.storages import storage_key
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.plain import DataParallelBuckets
from dtlib.parallel.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    clip_grad_norm_,
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    scatter_to_ranks,
    scatter_tokens,
    sum_over_ranks,
    vocab_parallel_cross_entropy,
)
from dtlib.parallel.tensor.functions import slice_of
from dtlib.parallel.tensor.plain import ParallelMLP as PlainParallelMLP
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.theory.collectives import chosen_all_reduce, elements_sent
from tests.cases import all_cases, refuses
from tests.models import EXACT, apart, seeded
from tests.ranks import on_ranks

WIDTH, HEADS, HIDDEN, WORDS, STEPS = 24, 12, 29, 11, 5  # heads divide by 2, 3 and 4; hidden features and words do not


class PlainMLP(nn.Module):
    def __init__(self, width=WIDTH, hidden=HIDDEN):
        super().__init__()
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, width)

    def forward(self, x):
        return self.linear2(functional.gelu(self.linear1(x)))


class PlainAttention(nn.Module):
    """Causal self-attention that computes one head after the other; ``in_proj`` is ordered head by head."""

    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 3 * WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        later = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1).to(x.device)
        mixed = []
        for one in self.in_proj(x).chunk(HEADS, -1):
            query, key, value = one.chunk(3, -1)
            scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
            mixed.append(scores.softmax(-1) @ value)
        return self.out_proj(torch.cat(mixed, -1))


class Language(nn.Module):
    """A small language model whose output layer is its embedding: unsplit, or with ``comm`` in shards."""

    def __init__(self, comm=None):
        super().__init__()
        self.comm = comm
        self.embedding = VocabParallelEmbedding(WORDS, WIDTH, comm) if comm else nn.Embedding(WORDS, WIDTH)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = ParallelAttention(WIDTH, HEADS, comm, causal=True) if comm else PlainAttention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = ParallelMLP(WIDTH, HIDDEN, comm) if comm else PlainMLP()
        if comm:
            self.output = ColumnParallelLinear(WIDTH, WORDS, comm, bias=False, gather_output=False)
        else:
            self.output = nn.Linear(WIDTH, WORDS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x) / WIDTH**0.5
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.output(x)

    def loss(self, logits, targets):
        if self.comm:
            return vocab_parallel_cross_entropy(logits, targets, self.comm, reduction="mean")
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def texts(steps=STEPS, count=8):
    torch.manual_seed(1)
    made = torch.randint(0, WORDS, (steps, count, 7))
    return [(text[:, :-1], text[:, 1:]) for text in made]


def train(model, optimizer, data, language=None, clip=None) -> list[float]:
    """What ``clip`` returned in each step."""
    language, clipped = language or model, []
    for x, y in data:
        language.loss(model(x), y).backward()
        if clip:
            clipped.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
    return clipped


def shard_of(whole, model, name):
    """What this rank has of a whole parameter of ``model``."""
    path, _, leaf = name.rpartition(".")
    layer = model.get_submodule(path)
    if leaf not in getattr(layer, "partition_dim", {}):
        return whole
    dim, size, rank = layer.partition_dim[leaf], layer.comm.size, layer.comm.rank
    return whole[(slice(None),) * dim + (slice_of(whole.shape[dim], rank, size),)]


def difference(model, reference, grad=False) -> float:
    """The largest difference between each parameter here, or its gradient, and the same shard of the reference's."""
    pairs = [(mine, reference.get_parameter(name), name) for name, mine in model.named_parameters()]
    if grad:
        pairs = [(mine.grad, whole.grad, name) for mine, whole, name in pairs]
    return max(apart(mine, shard_of(whole, model, name)) for mine, whole, name in pairs)


def check_step(ours, reference, x):
    """Outputs and all gradients of one forward and backward pass."""
    ours_x, reference_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = ours(ours_x), reference(reference_x)
    cotangent = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(5))
    y.backward(cotangent)
    expected.backward(cotangent)
    assert apart(y, expected) <= EXACT
    assert apart(ours_x.grad, reference_x.grad) <= EXACT
    assert difference(ours, reference, grad=True) <= EXACT


@on_ranks(1, 2, 3, 4)
def test_the_four_functions_and_their_gradients(world):
    comm, r = world.comm, world.rank
    whole = torch.arange(2 * 7, dtype=torch.float64).view(2, 7)
    mine = slice_of(7, r, world.size)

    x = whole.clone().requires_grad_()
    y = copy_to_ranks(x, comm)
    assert torch.equal(y, whole)
    (y * (r + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, sum(range(1, world.size + 1))))

    x = (whole + r).requires_grad_()
    y = reduce_from_ranks(x, comm)
    assert torch.equal(y, whole * world.size + sum(range(world.size))) and torch.equal(x, whole + r)
    (y * whole).sum().backward()
    assert torch.equal(x.grad, whole)

    x = whole.clone().requires_grad_()
    y = scatter_to_ranks(x, comm)
    assert torch.equal(y, whole[:, mine])
    (y * whole[:, mine]).sum().backward()
    assert torch.equal(x.grad, whole)

    x = whole[:, mine].clone().requires_grad_()
    y = gather_from_ranks(x, comm, 7)
    assert torch.equal(y, whole)
    (y * whole).sum().backward()
    assert torch.equal(x.grad, whole[:, mine])


@on_ranks(2, 3, 4)
def test_linear_layers_equal_the_unsplit_one(world):
    with all_cases() as case:
        for features, bias in itertools.product((12, 13), (True, False)):
            with case(features, bias):
                linear_layers_equal_the_unsplit_one(world, features, bias)


def linear_layers_equal_the_unsplit_one(world, features, bias):
    torch.manual_seed(2)
    narrow, wide = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(3, 4, features, dtype=torch.float64)
    reference = seeded(lambda: nn.Linear(6, features, bias))
    whole = seeded(lambda: ColumnParallelLinear(6, features, world.comm, bias))
    assert difference(whole, reference) == 0  # the same initial values
    check_step(whole, reference, narrow)
    # Of another seed here: rank 0's values count.
    given = seeded(lambda: nn.Linear(6, features, bias), seed=world.rank)
    cut = ColumnParallelLinear.from_linear(given, world.comm, gather_output=False)
    assert difference(cut, reference) == 0 and cut.weight.untyped_storage().nbytes() == cut.weight.nbytes
    assert torch.equal(cut(narrow), functional.linear(narrow, cut.weight, cut.bias))

    reference = seeded(lambda: nn.Linear(features, 5, bias))
    whole = seeded(lambda: RowParallelLinear(features, 5, world.comm, bias), seed=world.rank)
    assert difference(whole, reference) == 0
    check_step(whole, reference, wide)
    given = seeded(lambda: nn.Linear(features, 5, bias), seed=world.rank)
    cut = RowParallelLinear.from_linear(given, world.comm, input_is_parallel=True)
    assert apart(cut(scatter_to_ranks(wide, world.comm)), reference(wide)) <= EXACT
    if bias:
        grads = world.comm.all_gather_object(whole.bias.grad)
        assert all(torch.equal(grads[0], grad) for grad in grads)


@on_ranks(2, 3, 4)
def test_embedding_and_cross_entropy_equal_the_unsplit_ones(world):
    words = torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(0))
    reference = seeded(lambda: nn.Embedding(WORDS, 5))
    ours = seeded(lambda: VocabParallelEmbedding(WORDS, 5, world.comm))
    other = VocabParallelEmbedding.from_embedding(seeded(lambda: nn.Embedding(WORDS, 5), seed=world.rank), world.comm)
    assert difference(ours, reference) == difference(other, reference) == 0
    assert torch.equal(ours(words), reference(words))
    for model in (ours, reference):
        model(words).square().sum().backward()
    assert difference(ours, reference, grad=True) <= EXACT

    logits = torch.randn(4, 6, WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = slice_of(WORDS, world.rank, world.size)
    for scale, reduction in ((1, "none"), (1e4, "mean"), (1, "sum")):  # exp(1e4) would overflow
        whole, targets = (logits * scale).requires_grad_(), words.clone()
        targets[0, :3] = -100
        ours = whole[..., mine].detach().clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(ours, targets, world.comm, reduction)
        expected = functional.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction=reduction)
        assert apart(loss, expected.view(loss.shape)) <= EXACT * scale
        for value in (loss, expected):
            (value.flatten() * torch.arange(1.0, value.numel() + 1)).sum().backward()
        assert apart(ours.grad, whole.grad[..., mine]) <= EXACT
    impossible = logits.clone()
    impossible[..., mine if world.rank == 0 else slice(0)] = -torch.inf  # rank 0's words, as padding of a vocabulary
    loss = vocab_parallel_cross_entropy(impossible[..., mine], torch.full_like(words, WORDS - 1), world.comm)
    assert torch.isfinite(loss).all()


class Norms(nn.Module):
    """Attention and perceptron, each behind a layer norm; with ``comm`` ranks have slices of tokens between them."""

    def __init__(self, comm=None):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = PlainAttention(), PlainMLP()
        if comm:
            torch.manual_seed(0)
            self.attention = ParallelAttention(WIDTH, HEADS, comm, causal=True, sequence_parallel=True)
            self.mlp = ParallelMLP(WIDTH, HIDDEN, comm, sequence_parallel=True)
            sum_over_ranks(self.norm1, comm), sum_over_ranks(self.norm2, comm)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@on_ranks(1, 2, 3, 4, slow=(1,))
def test_sequence_parallelism_has_the_values_and_the_bytes_of_two_all_reduces(world):
    comm, tokens = world.comm, 12
    torch.manual_seed(4)
    x, cotangent = torch.randn(2, 3, tokens, WIDTH, dtype=torch.float64)
    torch.manual_seed(0)
    reference = Norms().double()
    torch.manual_seed(0)
    ours = Norms(comm).double()
    for name, parameter in ours.named_parameters():
        parameter.data = shard_of(reference.get_parameter(name).detach(), ours, name).clone()
    here = slice_of(tokens, comm.rank, comm.size)
    mine, theirs = x[:, here].clone().requires_grad_(), x.clone().requires_grad_()
    expected = reference(theirs)
    expected.backward(cotangent)
    with dtlib.trace() as trace:
        out = ours(mine)
    assert apart(out, expected[:, here]) <= EXACT
    out.backward(cotangent[:, here])
    assert apart(mine.grad, theirs.grad[:, here]) <= EXACT
    assert difference(ours, reference, grad=True) <= EXACT
    # Forward: an all_gather and a reduce_scatter for each of the two blocks, which send what an all_reduce sends.
    assert not trace.sent("all_reduce")[1]
    of_all_reduce = elements_sent("all_reduce", "ring", comm.size, comm.rank, x.numel()) * 8
    assert trace.sent("all_gather")[1] + trace.sent("reduce_scatter")[1] == 2 * of_all_reduce
    with pytest.raises(DtlibError, match="equal slices of tokens"):
        scatter_tokens(torch.ones(2, comm.size + 1, 4) if comm.size > 1 else torch.ones(4), comm)


@on_ranks(2, 4)
def test_sequence_parallelism_keeps_1_nth_of_what_lies_between_the_blocks(world):
    comm, tokens = world.comm, 16
    held = {}
    for parallel in (False, True):
        torch.manual_seed(0)
        norm = nn.LayerNorm(WIDTH)
        mlp = ParallelMLP(WIDTH, HIDDEN, comm, sequence_parallel=parallel)
        x = torch.randn(2, tokens // comm.size if parallel else tokens, WIDTH, requires_grad=True)
        with Activations() as kept:
            kept.others = {storage_key(parameter) for parameter in [*norm.parameters(), *mlp.parameters()]}
            between = functional.dropout(norm(x), 0.5)
            held[parallel] = kept.now
            mlp(between)
            held[parallel, "in the block"] = kept.now - held[parallel]
    assert held[True] * comm.size == held[False] > 0
    assert held[True, "in the block"] == held[False, "in the block"]  # whole sequences, of this rank's features


def attention_of_torch(bias, seed):
    attention = seeded(lambda: nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True), seed=seed)
    if bias:  # torch begins with zeros, among which no order shows
        nn.init.normal_(attention.in_proj_bias)
        nn.init.normal_(attention.out_proj.bias)
    return attention


@on_ranks(2, 3, 4)
def test_attention_equals_that_of_torch(world):
    torch.manual_seed(3)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    for bias, causal in ((True, False), (False, True)):
        reference = attention_of_torch(bias, seed=0)
        ours = ParallelAttention.from_attention(attention_of_torch(bias, seed=world.rank), world.comm, causal)
        mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64) if causal else None
        ours_x, reference_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = ours(ours_x), reference(reference_x, reference_x, reference_x, attn_mask=mask)[0]
        assert apart(y, expected) <= EXACT
        for value in (y, expected):
            value.square().sum().backward()
        assert apart(ours_x.grad, reference_x.grad) <= EXACT
        rows = reference.in_proj_weight.grad.view(3, HEADS, -1, WIDTH).transpose(0, 1).reshape(3 * WIDTH, WIDTH)
        assert apart(ours.in_proj.weight.grad, rows[ours.in_proj.slice]) <= EXACT
        assert apart(ours.out_proj.weight.grad, reference.out_proj.weight.grad[:, ours.out_proj.slice]) <= EXACT


def sent(world, run) -> dict[str, list[int]]:
    """The bytes of every operation that ``run()`` calls, by operation."""
    with dtlib.trace() as trace:
        run()
    operations = {}
    for event in trace.events:
        operations.setdefault(event.name, []).append(event.bytes)
    return operations


@on_ranks(2, 3, 4)
def test_cost_is_that_of_the_docstrings(world):
    n, tokens, words = world.size, 12 * 240, 24
    x = torch.randn(12, 240, WIDTH, dtype=torch.float64)
    assert chosen_all_reduce(n, x.nbytes) == "ring" and (tokens * WIDTH) % n == 0
    whole = 2 * x.nbytes * (n - 1) // n  # what a ring sends from each rank
    for block in (
        ParallelMLP(WIDTH, 48, world.comm).double(),
        ParallelAttention(WIDTH, HEADS, world.comm).double(),
        ColumnParallelLinear(WIDTH, 2 * WIDTH, world.comm, gather_output=False).double(),
        RowParallelLinear(WIDTH, WIDTH, world.comm).double(),
        ColumnParallelLinear(WIDTH, WIDTH, world.comm).double(),
    ):
        forward, backward = {"all_reduce": [whole]}, {"all_reduce": [whole]}
        if isinstance(block, RowParallelLinear):
            backward = {"all_gather": [whole // 2]}
        if isinstance(block, ColumnParallelLinear):
            forward = {"all_gather": [whole // 2]} if block.gather_output else {}
        y = []
        assert sent(world, lambda block=block, y=y: y.append(block(x.requires_grad_()))) == forward, block
        assert sent(world, lambda y=y: y[0].sum().backward()) == backward, block
        # An input without gradients costs nothing on the way back, and evaluation leaves nothing behind.
        y = block(x.detach())
        assert sent(world, lambda y=y: y.sum().backward()) == {}, block
        with torch.no_grad():
            y = []
            assert sent(world, lambda block=block, y=y: y.append(block(x))) == forward, block
            assert not y[0].requires_grad

    embedding = VocabParallelEmbedding(words, WIDTH, world.comm).double()
    y = []
    assert sent(world, lambda: y.append(embedding(torch.zeros(12, 240, dtype=torch.int64)))) == {"all_reduce": [whole]}
    assert sent(world, lambda: y[0].sum().backward()) == {}

    logits = torch.randn(12, 240, words // n, requires_grad=True)
    y = []
    first, second = (
        4 * elements_sent("all_reduce", chosen_all_reduce(n, 4 * count), n, world.rank, count)
        for count in (tokens + n, 2 * tokens)
    )
    targets = torch.zeros(12, 240, dtype=torch.int64)
    operations = sent(world, lambda: y.append(vocab_parallel_cross_entropy(logits, targets, world.comm, "mean")))
    assert operations == {"all_reduce": [first, second]}
    assert sent(world, lambda: y[0].backward()) == {}


@on_ranks(2, 3)
def test_bfloat16_is_as_near_as_the_unsplit_model(world):
    (x, y), *_ = texts()

    def step(comm, dtype):
        model = seeded(lambda: Language(comm), torch.bfloat16).to(dtype)
        loss = model.loss(model(x), y)
        loss.backward()
        assert all(parameter.grad.dtype == dtype for parameter in model.parameters())
        return model, float(loss)

    (exact, loss), (plain, plain_loss), (ours, our_loss) = (
        step(comm, dtype)
        for comm, dtype in ((None, torch.float64), (None, torch.bfloat16), (world.comm, torch.bfloat16))
    )
    # Sums of slices are rounded to 8 bits before they are added: about as far off as the unsplit model's own rounding.
    assert abs(our_loss - loss) <= max(2 * abs(plain_loss - loss), 0.02)
    assert difference(ours, exact, grad=True) <= max(2 * difference(plain, exact, grad=True), 0.01)


@on_ranks(2, 3)
def test_gradients_of_gradients_and_checkpointed_activations(world):
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reference, ours = seeded(PlainMLP), seeded(lambda: ParallelMLP(WIDTH, HIDDEN, world.comm))
    for model in (ours, reference):
        at = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(at).square().sum(), at, create_graph=True)
        slope.square().sum().backward()
    assert difference(ours.linear1, reference.linear1, grad=True) <= EXACT
    ours.zero_grad(), reference.zero_grad()
    reference(x).square().sum().backward()
    torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=False).square().sum().backward()
    assert difference(ours, reference, grad=True) <= EXACT


@on_ranks(4)
@pytest.mark.parametrize("data_axis", ["DataParallel", "ZeroOptimizer 1", "ZeroOptimizer 2"])
def test_data_times_tensor(world, data_axis):
    mesh = world.mesh(data=2, tensor=2)
    data, comm, settings = texts(), mesh["data"], {"lr": 0.1, "momentum": 0.9}
    clipped = data_axis == "DataParallel"
    reference = seeded(Language)
    clip = (lambda: nn.utils.clip_grad_norm_(reference.parameters(), 0.5)) if clipped else None
    train(reference, torch.optim.SGD(reference.parameters(), **settings), data, clip=clip)
    # Shards differ along the tensor axis and have to be equal along the data axis, whatever the seeds.
    language = seeded(lambda: Language(mesh["tensor"]), seed=mesh.coordinates["data"])
    half = slice_of(len(data[0][0]), comm.rank, comm.size)
    mine = [(x[half], y[half]) for x, y in data]
    if clipped:
        model = DataParallel(language, comm, bucket_cap_mb=0.002)
        assert len(model.buckets) > 1
        optimizer = torch.optim.SGD(model.parameters(), **settings)
        refuses("have the other shards", clip_grad_norm_, model, 0.5, mesh["data"])
        train(model, optimizer, mine, language, lambda: clip_grad_norm_(model, 0.5, mesh["tensor"]))
    else:
        stage = int(data_axis[-1])
        train(language, ZeroOptimizer(language.parameters(), torch.optim.SGD, comm, stage, **settings), mine)
    assert difference(language, reference) <= EXACT


@on_ranks(2, 3)
def test_what_it_cannot_do_is_refused_on_every_rank(world):
    comm, n = world.comm, world.size
    few = n - 1
    shared = {"linear": nn.Linear(2 + world.rank, 8), "padded": nn.Embedding(8, 2, padding_idx=0)}
    with_dropout = nn.MultiheadAttention(12, 6, dropout=0.1, batch_first=True)
    for make, words in (
        (lambda: ColumnParallelLinear(4, few, comm), f"{n} ranks cannot divide out_features={few}"),
        (lambda: RowParallelLinear(few, 4, comm), f"{n} ranks cannot divide in_features={few}"),
        (lambda: VocabParallelEmbedding(few, 4, comm), f"{n} ranks cannot divide num_embeddings={few}"),
        (lambda: ParallelAttention(20, 5, comm), f"5 heads cannot be divided equally among {n} ranks"),
        (lambda: ParallelAttention(20, 6 + world.rank, comm), "heads is 6 on rank 0 and 7 on rank 1"),
        (lambda: ParallelAttention(20, 6, comm), "width=20 is not a multiple of 6 heads"),
        (lambda: ColumnParallelLinear.from_linear(shared["linear"], comm), r"shapes is .*\(8, 2\).* \(8, 3\)"),
        (lambda: RowParallelLinear(8, 2, comm, bias=world.rank == 0), "RowParallelLinear differs between ranks"),
        (lambda: VocabParallelEmbedding.from_embedding(shared["padded"], comm), "has no padding_idx"),
        (lambda: ParallelAttention.from_attention(with_dropout, comm), "dropout=0"),
        (lambda: ParallelAttention.from_attention(nn.MultiheadAttention(12, 6), comm), "with batch_first=True"),
        (lambda: ColumnParallelLinear(4, 8, "gloo"), "comm='gloo' is not a communicator"),
        (lambda: copy_to_ranks(torch.ones(1), comm.mpi), r"dtlib\.comm\.as_communicator"),
    ):
        refuses(words, make)
    refuses(r"shape \(1, 5\).* 4: in_features=4", ColumnParallelLinear(4, 8, comm), torch.ones(1, 5))
    refuses("this rank's slice", RowParallelLinear(12, 8, comm, input_is_parallel=True), torch.ones(1, 12))
    refuses("has words 0 to 7, but got 3 to 8", VocabParallelEmbedding(8, 2, comm), torch.tensor([3, 8]))
    logits, targets, entropy = torch.zeros(2, 6), torch.tensor([0, 6 * n]), vocab_parallel_cross_entropy
    refuses(f"words 0 to {6 * n - 1}, but they are 0 to {6 * n}", entropy, logits, targets, comm)
    refuses("reduction='average'", entropy, logits, targets, comm, reduction="average")
    refuses(r"got \(2, 6\) and \(3,\)", entropy, logits, torch.zeros(3, dtype=torch.int64), comm)
    comm.barrier()  # nobody is left behind


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@on_ranks(2)
def test_parts_of_more_than_a_plain_layer_are_refused(world):
    hooked = nn.Embedding(4, 2)
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 4))
    for make, words in (
        (lambda: ColumnParallelLinear.from_linear(Twice(2, 4), world.comm), "it is a Twice, which computes something"),
        (
            lambda: RowParallelLinear.from_linear(normed, world.comm),
            r"its parameters are bias, parametrizations\.weight",
        ),
        (
            lambda: VocabParallelEmbedding.from_embedding(hooked, world.comm),
            "only a plain nn.Embedding, but it has hooks",
        ),
    ):
        refuses(words, make)
    with pytest.raises(DtlibError, match=r"gather_from_ranks\(count=5\): rank \d of 2 has \d elements"):
        gather_from_ranks(torch.zeros(1, 3 - world.rank), world.comm, 5)  # the second has the longer slice


@on_ranks(1, 2)
def test_what_comes_out_may_be_changed_in_place(world):
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    scatter_to_ranks(x, world.comm).mul_(2)
    assert torch.equal(x, before)
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    ours = ColumnParallelLinear.from_linear(plain, world.comm)
    outputs = [nn.functional.relu(layer(x), inplace=True) for layer in (plain, ours)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.sum().backward()
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad[ours.slice])


@on_ranks(2)
def test_a_part_that_was_loaded_is_still_known_as_one(world):
    """Or a norm of shards would be taken for that of the whole."""
    layer = ColumnParallelLinear(4, 4, world.comm)
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    assert info_of(layer.weight).tensor == info_of(layer.bias).tensor == world.comm.members
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    assert info_of(layer.weight).tensor == world.comm.members


@on_ranks(2, 4, slow=(4,))
def test_torchs_clipping_of_shards_is_refused_also_of_averages(world):
    """Each rank would compute the norm of its shards, and layers that all ranks have whole would part."""
    mesh = world.mesh(data=world.size // 2, tensor=2)
    model = nn.Sequential(ParallelMLP(4, 8, mesh["tensor"]), nn.Linear(4, 4))
    ways = {
        "alone": model, "DataParallel": DataParallel(model, mesh["data"]),
        "buckets": DataParallelBuckets(PlainParallelMLP(4, 8, mesh["tensor"]), mesh["data"]),
    }  # fmt: skip
    for name, way in ways.items():
        way(torch.ones(3, 4)).sum().backward()
        for _ in range(2):  # the gradient stays a shard's where a second pass is added
            refuses(r"of this rank's shards.*dtlib\.parallel\.tensor", nn.utils.clip_grad_norm_, way.parameters(), 1.0)
            if name != "buckets":
                way(torch.ones(3, 4)).sum().backward()
        nn.utils.clip_grad_value_(way.parameters(), 0.01)  # value by value nothing of other ranks is needed
        assert max(float(p.grad.abs().max()) for p in way.parameters()) == pytest.approx(0.01)
        way.zero_grad()
    with pytest.raises(DtlibError, match=r"is a shard of a tensor-parallel layer, and ranks .* average over the data"):
        DataParallel(model, world.comm)
