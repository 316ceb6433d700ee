"""ContextParallel beside its values (test_parity.py): orders, memory, other axes and refusals."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointError, checkpoint

from dtlib.comm import solo
from dtlib.gradients.tokens import mean_over_tokens
from dtlib.measure.activations import Activations
from dtlib.parallel.context import ContextParallel, attention
from dtlib.parallel.context.attention import Sequence, ring_attention
from dtlib.parallel.context.order import ORDERS, positions_of
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelNaive
from dtlib.parallel.pipeline import PipelineStage, Schedule1F1B
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3
from dtlib.parallel.zero.sharded import fully_shard
from tests.cases import refuses
from tests.models import EXACT, full_values
from tests.ranks import on_ranks
from tests.test_context import alone, apart

WORDS, WIDTH, HEADS = 11, 24, 12


def rotated(x, positions):
    """Rotary positions: pairs of features turn by an angle that grows with the position."""
    angles = positions[:, None] * 0.3 ** torch.arange(x.shape[-1] // 2, device=x.device)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class Block(nn.Module):
    """Causal attention with rotary positions and half as many heads of keys, by torch's attention or its bare name."""

    def __init__(self, by_name=False):
        super().__init__()
        self.norm, self.by_name = nn.LayerNorm(WIDTH), by_name
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, positions):
        here = self.norm(x)
        q = self.q(here).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(here).unflatten(-1, (2, HEADS // 2, -1)).movedim(2, 0).transpose(2, 3)
        q, k = rotated(q, positions), rotated(k, positions)
        attention = scaled_dot_product_attention if self.by_name else functional.scaled_dot_product_attention
        mixed = attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.embedding, self.recompute = nn.Embedding(WORDS, WIDTH), recompute
        self.blocks, self.head = nn.ModuleList([Block(), Block(by_name=True)]), nn.Linear(WIDTH, WORDS)

    def forward(self, x, positions):
        x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, positions, use_reentrant=False) if self.recompute else block(x, positions)
        return self.head(x)


def language(recompute=False):
    torch.manual_seed(0)
    return Language(recompute).double()


def texts(batch, tokens=13):
    """Words, next words, and which of these count: of every text another number."""
    torch.manual_seed(1)
    words = torch.randint(0, WORDS, (batch, tokens + 1))
    mask = torch.arange(tokens) < torch.randint(3, tokens, (batch, 1))
    return words[:, :-1], words[:, 1:], mask


def losses_of(model, x, target, positions):
    return functional.cross_entropy(model(x, positions).transpose(1, 2), target, reduction="none")


def gradients_alone(batch, masked=True):
    model, (x, target, mask) = language(), texts(batch)
    losses = losses_of(model, x, target, torch.arange(x.shape[1]))
    (losses[mask].mean() if masked else losses.mean()).backward()
    return model


def gradients_apart(model, reference) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(apart(mine.grad, theirs.grad) for mine, theirs in pairs)


@on_ranks(1, 2, 3, 4, slow=(1, 4))
def test_any_order_length_and_group_of_heads(world):
    for short in (2, attention.SHORT):
        with patch.object(attention, "SHORT", short):  # queries at a time where a block is masked
            _any_order_length_and_group_of_heads(world.comm)


def _any_order_length_and_group_of_heads(comm):
    for order in ORDERS:
        for causal, tokens, groups in ((True, 13, 1), (False, 13, 2), (True, 4 * comm.size, 4), (True, 2, 1)):
            torch.manual_seed(3)
            q, cotangent = torch.randn(2, 2, 4, tokens, 6, dtype=torch.float64)
            k, v = torch.randn(2, 2, 4 // groups, tokens, 6, dtype=torch.float64)
            expected = alone(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), cotangent, causal)
            here = positions_of(comm.rank, comm.size, tokens, order)
            ours = [x[:, :, here].requires_grad_() for x in (q, k, v)]
            out = ring_attention(*ours, Sequence(comm, tokens, order, causal))
            out.backward(cotangent[:, :, here])
            summed = [expected[0], expected[1], *(g.unflatten(1, (-1, groups)).sum(2) for g in expected[2:])]
            for mine, theirs in zip((out, *(x.grad for x in ours)), summed, strict=True):
                assert mine.numel() == 0 or apart(mine, theirs[:, :, here]) <= EXACT, (order, causal, tokens)


def test_what_ring_attention_keeps_for_its_backward_pass_is_counted():
    """q, k, v, output and a number a query: 1/N of whole sequences, and nothing that grows with their square."""
    for tokens in (1024, 4096, 16384):
        for ranks in (1, 2, 4):
            sequence = Sequence(solo(0, ranks), tokens, "zigzag", True)
            sequence.blocks = lambda owner: ()  # values do not count
            q, k, v = (torch.zeros(1, 2, tokens // ranks, 8, requires_grad=True) for _ in "qkv")
            with Activations() as kept:
                out = ring_attention(q, k, v, sequence)
            assert kept.now == 4 * (4 * 2 * 8 + 2) * tokens // ranks
            assert out.shape == q.shape


@on_ranks(2, 3)
def test_16_bits_are_as_near_as_torchs_own(world):
    comm = world.comm
    torch.manual_seed(3)
    whole = torch.randn(4, 1, 2, 12 * comm.size, 8, dtype=torch.float64)
    exact = alone(*whole, True)
    half = [x.bfloat16().requires_grad_() for x in whole[:3]]
    peer = scaled_dot_product_attention(*half, is_causal=True)
    peer.backward(whole[3].bfloat16())
    here = positions_of(comm.rank, comm.size, 12 * comm.size, "zigzag")
    mine = [x.bfloat16()[:, :, here].requires_grad_() for x in whole[:3]]
    out = ring_attention(*mine, Sequence(comm, 12 * comm.size, "zigzag", True))
    out.backward(whole[3].bfloat16()[:, :, here])
    assert out.dtype == mine[0].grad.dtype == torch.bfloat16
    for ours, theirs, right in zip((out, *(x.grad for x in mine)), (peer, *(x.grad for x in half)), exact, strict=True):
        allowed = 2 * apart(theirs.double(), right)
        assert 0 < apart(ours.double(), right[:, :, here]) <= allowed


class Staged(nn.Module):
    """A block whose positions are known from the start, as stages of a pipeline hand on one tensor."""

    def __init__(self, block, positions):
        super().__init__()
        self.block, self.positions = block, positions

    def forward(self, x):
        return self.block(x, self.positions)


@on_ranks(4)
def test_data_by_context_under_every_strategy(world):
    mesh = world.mesh(data=2, context=2)
    both, reference = mesh["data", "context"], gradients_alone(4)
    expected = [value.detach() - 0.1 * value.grad for value in reference.parameters()]
    x, target, mask = (one.chunk(2)[mesh.coordinates["data"]] for one in texts(4))

    def backward(model, cp):
        losses = losses_of(model, cp.split(x), cp.split(target), cp.positions(x.shape[1]))
        mean_over_tokens(losses, both, cp.split(mask)).backward()

    def data_parallel(kind):
        model = kind(ContextParallel(language(), mesh["context"], "contiguous"), both)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, model.module)
        if kind is DataParallelNaive:
            model.average_gradients()
        optimizer.step()
        return dict(model.named_parameters())

    def plain_zero(kind):
        model = ContextParallel(language(), mesh["context"])
        zero = kind(both, model, torch.optim.SGD, lr=0.1)
        backward(model, model)
        zero.step()
        if kind is Stage3:
            zero.gather(zero.units[0])
        return dict(model.named_parameters())

    def full_zero(stage):
        model = ContextParallel(language(), mesh["context"])
        zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, both, stage=stage, lr=0.1)
        backward(model, model)
        zero.step()
        return dict(model.named_parameters())

    def stage_3(_):
        model = ContextParallel(language(), mesh["context"])
        fully_shard(model, both)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, model)
        optimizer.step()
        return full_values(model, both)

    ways = [(data_parallel, kind) for kind in (DataParallelNaive, DataParallelBuckets, DataParallel)]
    ways += [(plain_zero, kind) for kind in (Stage1, Stage2, Stage3)] + [(full_zero, 1), (full_zero, 2), (stage_3, 3)]
    for way, which in ways:
        found = way(which)
        assert len(found) == len(expected)
        for (name, value), theirs in zip(found.items(), expected, strict=True):
            assert apart(value.detach(), theirs) <= EXACT, (way, which, name)


@on_ranks(4)
def test_pipeline_by_context(world):
    mesh, tokens = world.mesh(pipe=2, context=2), 13
    place, here = mesh.coordinates["pipe"], positions_of(mesh.coordinates["context"], 2, 13, "zigzag")
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(), Block(by_name=True)]).double()
    x, target = torch.randn(2, 4, tokens, WIDTH, dtype=torch.float64)

    def loss(y, target):
        return (y * target).sum() / tokens

    y = blocks[1](blocks[0](x, torch.arange(tokens)), torch.arange(tokens))
    loss(y, target).backward()
    expected = [parameter.grad.clone() for parameter in blocks[place].parameters()]
    blocks.zero_grad()
    part = ContextParallel(Staged(blocks[place], here), mesh["context"])
    stage = PipelineStage(DataParallel(part, mesh["context"]), place, 2, mesh["pipe"])
    Schedule1F1B(stage, 2, loss).step(
        *([x[:, here]] if stage.is_first else []), target=target[:, here] if stage.is_last else None
    )
    for parameter, theirs in zip(blocks[place].parameters(), expected, strict=True):
        assert apart(parameter.grad * 4, theirs) <= EXACT  # means of two ranks and of two micro-batches


@on_ranks(4)
def test_wrong_axes_and_means_are_refused(world):
    mesh = world.mesh(data=2, context=2)
    both = mesh["data", "context"]
    x, target, mask = texts(2)

    def made():
        return ContextParallel(language(), mesh["context"])

    for kind in (
        DataParallelNaive, DataParallelBuckets, DataParallel,
        lambda model, comm: Stage1(comm, model, torch.optim.SGD, lr=0.1),
        lambda model, comm: Stage3(comm, model, torch.optim.SGD, lr=0.1),
        lambda model, comm: ZeroOptimizer(model.parameters(), torch.optim.SGD, comm, stage=2, lr=0.1), fully_shard,
    ):  # fmt: skip
        refuses("share each sequence: average over both axes", kind, made(), mesh["data"])
    refuses("no axis 'tensor'", mesh.__getitem__, ("data", "tensor"))
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses_of(model, model.split(x), model.split(target), model.positions(13)).mean().backward()
    optimizer.step()  # of gradients that nobody has averaged
    refuses("parameters differ between ranks", model, model.split(x), model.positions(13))
    model = DataParallel(made(), both)
    refuses("cannot run this model, which communicates", model.join().__enter__)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.language = language()

        def forward(self, x, positions, mask):
            return self.language(x, positions)

    for tokens in (13, 12):  # of slices of 6 and 7; alike, but with other numbers of tokens that count
        model = DataParallelNaive(ContextParallel(Masked(), mesh["context"]), both)
        cp = model.module
        here = [cp.split(one[:, :tokens]) for one in (x, target, mask)]
        for divided in (False, True):
            losses = functional.cross_entropy(
                model(here[0], cp.positions(tokens), mask=here[2]).mT, here[1], reduction="none"
            )
            if divided:
                mean_over_tokens(losses, both, here[2]).backward()
                model.average_gradients()
                continue
            losses[here[2]].mean().backward()
            refuses(r"ranks had batches of .*mean_over_tokens", model.average_gradients)
            model.contract.ready = []
            model.zero_grad()


@on_ranks(2, 3)
def test_what_is_not_computed_over_ranks_is_refused(world):
    comm = world.comm

    class Calls(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.how, self.weight = how, nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.how(x * self.weight)

    def own(x):
        return (x @ x.mT).softmax(-1) @ x

    sdpa = scaled_dot_product_attention
    for why, how in {
        "with a mask": lambda x: sdpa(x, x, x, torch.ones(4, 4, dtype=torch.bool)),
        "dropout_p=0.5": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        "queries of": lambda x: sdpa(x, x[:, :, :2], x[:, :, :2]),
        "never called torch's": own,
        "attention_forward has its own attention": lambda x: nn.MultiheadAttention(2, 1)(x[0], x[0], x[0])[0],
        r"cut sequences with split\(\)": lambda x: sdpa(*[x[:, :, : 2 + 3 * (comm.rank == 0)]] * 3),
        "pass the same batch": lambda x: sdpa(*[x[:, : 1 + (comm.rank == 0)]] * 3),
    }.items():
        model = ContextParallel(Calls(how), comm)
        refuses(why, model, torch.ones(1, 6, 4, 2))
        assert functional.scaled_dot_product_attention is sdpa
        comm.barrier()
    for why, call in {
        "order='random'": lambda: ContextParallel(language(), comm, "random"),
        "method='tree'": lambda: ContextParallel(language(), comm, method="tree"),
        "order is contiguous on rank 0 and zigzag": lambda: ContextParallel(language(), comm, ORDERS[comm.rank > 0]),
        "1 is Conv1d": lambda: ContextParallel(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 3)), comm),
        "is TransformerEncoderLayer": lambda: ContextParallel(nn.TransformerEncoderLayer(4, 2), comm),
        "0 is MultiheadAttention": lambda: ContextParallel(nn.Sequential(nn.MultiheadAttention(4, 2)), comm),
        "5 of queries": lambda: ContextParallel(Calls(lambda x: sdpa(x, x, x)), comm, method="ulysses")(
            torch.ones(1, 5, 4, 2)
        ),
    }.items():
        refuses(why, call)


@on_ranks(2, 3)
def test_activation_checkpointing_of_modules_computes_over_ranks_and_of_functions_is_refused(world):
    """Also where what is checkpointed calls modules that call attention, and in a copy of the module."""
    comm, reference, (x, target, mask) = world.comm, gradients_alone(3), texts(3)

    class Function(nn.Module):
        """One block, checkpointed as a function that calls attention itself, or one that calls the block."""

        def __init__(self, inside, reentrant):
            super().__init__()
            self.language, self.inside, self.reentrant = language(), inside, reentrant

        def forward(self, x, positions):
            x = self.language.embedding(x)
            first, second = self.language.blocks
            called = first.forward if self.inside else lambda *given: first(*given)
            x = checkpoint(called, x, positions, use_reentrant=self.reentrant)
            return self.language.head(second(x, positions))

    def local():
        """Torch's attention is its own: else one rank would wait for the others."""
        comm.barrier()
        if comm.rank == 0:
            assert scaled_dot_product_attention(*[torch.ones(1, 1, 2, 2)] * 3).tolist() == [[[[1, 1], [1, 1]]]]

    def trained(model):
        cp = ContextParallel(model, comm)
        losses = losses_of(cp, cp.split(x), cp.split(target), cp.positions(x.shape[1]))
        mean_over_tokens(losses, comm, cp.split(mask)).backward()
        for parameter in model.parameters():
            comm.all_reduce(parameter.grad, op="mean")
        return model.language

    for reentrant in (False, True):
        once = Function(False, reentrant)
        assert gradients_apart(trained(once), reference) <= EXACT
        once.zero_grad()
        assert gradients_apart(trained(once), reference) <= EXACT  # wrapped a second time

    def stop(*_):
        if torch._C._current_graph_task_id() != -1:
            raise KeyboardInterrupt

    handle = once.language.blocks[0].out.register_forward_pre_hook(stop)
    once.zero_grad()
    with pytest.raises(KeyboardInterrupt):  # where it is computed again
        trained(once)
    handle.remove()
    local()
    once.zero_grad()
    assert gradients_apart(trained(once), reference) <= EXACT
    refuses("as in checkpoint.function, use_reentrant=True", trained, Function(True, True))
    comm.barrier()
    with pytest.raises(CheckpointError):  # torch notices that other tensors were saved
        trained(Function(True, False))
    local()
