"""What holds for every encoding, alone and as a part of a pattern over layers. A new YAML needs no edit here."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from conftest import ENCODINGS, at_last_scale, build_gpt, build_pe, pe_options
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.benchmarks.measure import peak_memory
from model import gpt, position
from model.gpt import GPT
from model.position import PositionEncoding, options_of
from model.position.layer import attend, cached_tokens, make_context

TRAIN_LEN = 16
LENGTH = 40  # beyond train_len, and within reach of a learned table at its default scale
WINDOW = 8

ALONE = [name for name in ENCODINGS if "pattern" not in pe_options(name)]


def slow_if_repeated(names, *more) -> list:
    """Parameters, of which the slow suite alone has those encodings whose hooks another one has too."""
    seen, found = set(), []
    for name in names:
        cls = position.resolve(next(iter(position.parts(pe_options(name)).values()))["_target_"])
        code = tuple(getattr(cls, hook) for hook in ("embed", "tables", "state", "rotate", "bias", "attend"))
        marks = [pytest.mark.slow] if code in seen else []
        found += [pytest.param((name, *rest) if rest else name, marks=marks) for rest in more or [()]]
        seen.add(code)
    return found


PLACES = [(name, "alone") for name in ENCODINGS] + slow_if_repeated(ALONE, ("local",), ("global",))
OPTIONS = {
    "alone": {},
    "own gates": {"gates": "projection", "npos_max": 5},
    "shared": {"gates": "values", "shared": True},
}
PLACES += [(name, options) for name in ENCODINGS if "npos_max" in pe_options(name) for options in [*OPTIONS][1:]]


@pytest.fixture(params=PLACES, ids="-".join)
def placed(request) -> dict:
    """Options of each encoding: alone, with a sliding window in layers that alternate with NoPE, or between such.

    Of CoPE in more than one way, since its options decide what is cached and learned.
    """
    name, place = request.param
    if place in OPTIONS:
        return {"name": name, "pe": OPTIONS[place]}
    local = pe_options(name if place == "local" else "rope", window=WINDOW)
    everywhere = pe_options(name if place == "global" else "nope")
    return {"name": "nope", "pe": {"pattern": ["local", "global"], "local": local, "global": everywhere}}


def tokens(length=LENGTH, batch=2):
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(2))


def network(name, pe=None, **cfg) -> GPT:
    """A network whose weights are large, as trained ones are: with initial ones positions hardly matter."""
    return build_gpt(name, pe=pe, **{"train_len": TRAIN_LEN, "init_std": 0.125} | cfg)


def each_scale(net, length=LENGTH):
    """The longest text up to `length` that is defined, at each scale that an evaluation measures."""
    for scale in net.scales:
        with net.at_scale(scale):
            yield min(length, net.max_len or length)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * b.abs().max().item())


@torch.no_grad()
def test_decoding_and_chunked_prefill_equal_the_full_forward(placed):
    for n_layer in (1, 2):
        net = network(**placed, n_layer=n_layer)
        for length in each_scale(net):
            idx = tokens(length)
            full = net(idx)
            # Angles that follow the length of the text differ for the past: in a second layer the cache then holds
            # what was computed while the text was shorter. That is inherent, and bounded.
            exact = n_layer == 1 or torch.allclose(net(idx[:, :8]), full[:, :8], atol=1e-3)
            for pieces in ([7, 1, length - 12, 1, 1, 1, 1], 13):
                cache = net.new_cache()
                for piece in idx.split(pieces, dim=1):
                    newest = net(piece, cache)[:, -1]
                    if exact or cache.length <= TRAIN_LEN:
                        close(newest, net(idx[:, : cache.length])[:, -1])
                close(newest, full[:, -1], 0.05)


@torch.no_grad()
def test_neither_the_future_nor_an_earlier_text_is_seen(placed):
    net = network(**placed)
    for length in each_scale(net):
        alone, idx = net(tokens(8)), tokens(length)
        other = idx.clone()
        other[:, length // 2 :] = 49 - other[:, length // 2 :]
        a, b = net(idx), net(other)
        close(a[:, : length // 2], b[:, : length // 2], 1e-6)
        assert (a[:, -1] - b[:, -1]).abs().max() > 1e-4
        assert torch.equal(net(tokens(8)), alone)


@torch.no_grad()
def test_documents_are_read_as_if_alone(placed):
    """And no bit of what a document says reaches another one."""
    net, sizes = network(**placed | {"train_len": LENGTH}), ([40], [17, 23], [3, 1, 20, 2, 14])
    net.document_end = end = 50 - 1
    idx = tokens(batch=3) % end
    for row, own in zip(idx, sizes, strict=True):
        row[torch.tensor(own).cumsum(0)[:-1] - 1] = end
    packed = net(idx, documents=net.documents(idx))
    for row, found, own in zip(idx, packed, sizes, strict=True):
        for text, logits in zip(row.split(own), found.split(own), strict=True):
            close(logits, net(text[None])[0])
    changed = torch.zeros_like(idx, dtype=torch.bool)
    changed[1, :16] = changed[2, 4:23] = True
    other = net(torch.where(changed, (idx + 7) % end, idx), documents=net.documents(idx))
    changed[1, 16] = changed[2, 23] = True  # the ends of these documents
    assert torch.equal(other[~changed], packed[~changed])
    assert not torch.equal(other[changed], packed[changed])


@torch.no_grad()
def test_absolute_encodings_and_only_they_notice_a_shift_of_all_positions(encoding):
    net = network(encoding)
    absolute = any(type(pe).embed is not PositionEncoding.embed for pe in net.encodings)
    for _ in each_scale(net):
        n = 4 if net.max_len == TRAIN_LEN else TRAIN_LEN
        idx = tokens(n)
        offset = min(100, (net.max_len or 1000) - n)
        difference = (net(idx, positions=(torch.arange(offset, offset + n), n)) - net(idx)).abs().max()
        assert (difference > 1e-5 * net(idx).abs().max()) == absolute


def test_every_parameter_gets_a_gradient(placed):
    net = build_gpt(**placed, train_len=TRAIN_LEN)
    idx = tokens(TRAIN_LEN + 1)
    net.train()(idx[:, :-1], targets=idx[:, 1:]).backward()
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert (p.grad != 0).any(), name


def test_initial_weights(encoding):
    """Nothing but parameters is saved; those of the network do not depend on the encoding, nor on the meta device."""
    real, theirs = build_gpt(encoding), build_gpt("nope").state_dict()
    ours = real.state_dict()
    assert set(ours) - {"head.weight"} == {name for name, _ in real.named_parameters()}
    assert not list(real.buffers())
    assert {name for name in ours if "position" not in name} == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with torch.device("meta"):
        net = build_gpt(encoding)
    net.materialise("cpu")
    for p in net.parameters():
        torch.nn.init.constant_(p, torch.nan)
    net.init_weights(0)
    real.init_weights(0)
    assert torch.equal(net(tokens()[:, :TRAIN_LEN]), real(tokens()[:, :TRAIN_LEN]))


@torch.no_grad()
def test_a_checkpoint_trained_at_256_reads_4096(encoding):
    size = dict(n_layer=1, n_head=2, n_kv_head=1, dim=16)
    trained = build_gpt(encoding, train_len=256, **size)
    options, pe = pe_options(encoding), trained.encodings[0]
    # A size that follows train_len when it is null stays what it was in training.
    kept = {k: getattr(pe, k) for k, v in options.items() if v is None and getattr(pe, k, None) is not None}
    longer = {"scale": 16.0} if "scale" in options else {}
    net = build_gpt(encoding, train_len=4096, pe=kept | longer, seed=1, **size)
    net.load_state_dict(trained.state_dict(), strict=True)
    cache = net.new_cache()
    for piece in tokens(4096, batch=1).split(512, dim=1):
        assert net(piece, cache).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_stays_near_fp32(encoding, precision):
    net = network(encoding)
    exact = [net(tokens(length)) for length in each_scale(net)]
    if precision == "bf16-true":
        net.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        rounded = [net(tokens(length)).float() for length in each_scale(net)]
    for a, b in zip(rounded, exact, strict=True):
        assert a.isfinite().all()
        assert (a - b).abs().mean() < 0.05 * b.abs().max()


def test_gradients_in_float64_are_those_of_numerical_differentiation(encoding):
    """Of every parameter, along a random direction. A number rounded to fp32 on the way would be an error of 1e-1."""
    net = network(encoding, n_layer=1).double()
    for pe in net.distinct_encodings:
        for name, p in pe.named_parameters():
            if name == "delta":
                p.data.fill_(-1.0)  # PoPE's starts at its limit, beyond which the loss does not change
    idx = tokens(TRAIN_LEN + 1)
    parameters = list(net.parameters())
    gradients = torch.autograd.grad(net(idx[:, :-1], targets=idx[:, 1:]), parameters)
    generator = torch.Generator().manual_seed(0)
    step = 1e-6
    with torch.no_grad():
        for p, gradient in zip(parameters, gradients, strict=True):
            direction = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            start = p.clone()
            p.copy_(start + step * direction)
            above = net(idx[:, :-1], targets=idx[:, 1:])
            p.copy_(start - step * direction)
            below = net(idx[:, :-1], targets=idx[:, 1:])
            p.copy_(start)
            slope = (above - below) / (2 * step)
            torch.testing.assert_close(slope, (gradient * direction).sum(), rtol=2e-6, atol=2e-9)


def layer_gradients(pe, q, k, v, x, weights):
    """The gradients of a layer's inputs q, k, v, and of the parameters of its encoding by name."""
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    ctx = make_context(pe, torch.arange(q.size(2)), q.size(2), q.size(2))
    out = attend(pe, *inputs, pe.state(x), ctx)
    parameters = dict(pe.named_parameters())
    loss = (out.to(weights.dtype) * weights).sum()
    gradients = torch.autograd.grad(loss, [*inputs, *parameters.values()], allow_unused=True)
    return gradients[:3], dict(zip(parameters, gradients[3:], strict=True))


@pytest.mark.parametrize("name", slow_if_repeated(ALONE))
@pytest.mark.parametrize("length", [40, 300])
def test_gradients_in_bf16_are_near_those_in_float64(name, length):
    """Those of an encoding's parameters, too: gates sum up gradients that nearly cancel."""
    generator = torch.Generator().manual_seed(3)
    pe = build_pe(name, train_len=length, head_dim=32, n_kv_head=2)
    q, k, v, weights = (torch.randn(2, heads, length, 32, generator=generator) for heads in (4, 2, 2, 4))
    x = torch.randn(2, length, 64, generator=generator)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        inputs, parameters = layer_gradients(pe, q, k, v, x, weights)
    exact_inputs, exact = layer_gradients(pe.double(), q.double(), k.double(), v.double(), x.double(), weights.double())

    def error(gradient, expected):
        return ((gradient.double() - expected).norm() / expected.norm()).item()

    of_inputs = max(error(a, b) for a, b in zip(inputs, exact_inputs, strict=True))
    if (name, length) != ("cope_rope", 300):  # rounded gates move some of its positions across a kink
        assert of_inputs < 0.02
    limit = 0.03 if name == "kerple" else 4 * of_inputs  # its terms cancel in part, and each is a rounded product
    for key, gradient in parameters.items():
        # The bias of all scores of a head changes no softmax, and what FIRE's network has from c and its last weights
        # is such a bias, nearly.
        if gradient is not None and name != "fire":
            assert error(gradient, exact[key]) < limit, key


@pytest.mark.parametrize("name", slow_if_repeated(ENCODINGS))
def test_compiled_equals_eager_with_two_graphs_for_three_lengths(name):
    """Forward and backward."""
    net = network(name, n_layer=1).train()
    net.distinct_encodings[0].active_scale = net.scales[-1]
    compiled, parameters = torch.compile(net, fullgraph=True, backend="eager"), list(net.parameters())
    torch._dynamo.reset()
    counters.clear()
    for t in (min(LENGTH, net.max_len or LENGTH), 9, 12):
        x = tokens(t)
        found, expected = (torch.autograd.grad(f(x, targets=x), parameters) for f in (compiled, net))
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-6
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("name", slow_if_repeated(ALONE))
@torch.no_grad()
def test_a_window(name):
    """A key beyond it has no influence, and the cache forgets it; one as long as the text is full attention."""
    net, full, long = (network(name, pe={"window": size}, n_layer=1) for size in (WINDOW, None, LENGTH))
    seen = cached_tokens(net.encodings[0])
    for length in each_scale(net):
        idx, cache = tokens(length), net.new_cache()
        other = idx.clone()
        other[:, 3] = 49 - other[:, 3]
        difference = (net(idx) - net(other)).abs().amax((0, 2))  # [T]
        assert (difference[3 : 3 + seen] > 0).all()
        close(net(idx)[:, 3 + seen :], net(other)[:, 3 + seen :], 1e-6)
        for token in idx.split(1, dim=1):
            net(token, cache)
        held = max(x.size(1) for layer in cache._buffers for x in layer.values())
        assert held <= 2 * seen or length <= 2 * seen
        for unlimited in (full, long):
            unlimited.distinct_encodings[0].active_scale = net.distinct_encodings[0].active_scale
        assert torch.equal(full(idx), long(idx))


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("name", slow_if_repeated(ALONE))
@torch.no_grad()
def test_a_text_with_gaps_is_the_whole_text_without_those_keys(name, window):
    """With one exception: where a score depends on the tokens between, there is no whole text to compare with."""
    n, kept = 16, torch.tensor([0, 1, 4, 5, 9, 12, 15])
    reach = {"max_distance": 4} if "beyond" in pe_options(name) else {}  # the gaps lie beyond it
    pe, generator = build_pe(name, n_kv_head=2, train_len=n, window=window, **reach), torch.Generator().manual_seed(0)
    q, k, x = (torch.randn(2, n, *size, generator=generator) for size in ([4, 16], [2, 16], [64]))
    v = torch.eye(n).expand(2, 2, n, n)  # so that what comes out are the weights of the keys

    def weights(q, k, x, at):
        state = {key: value[:, at] for key, value in pe.state(x).items()}
        q, k = q[:, at].transpose(1, 2), k[:, at].transpose(1, 2)
        return pe.attend(q, k, v[:, :, at], state, make_context(pe, at, len(at), n))  # [B, H, T, n]

    for scale in pe.scales:
        pe.active_scale, pos = scale, torch.arange(n)
        whole = weights(q, k, x, pos)[:, :, kept][..., kept]
        others = torch.ones(n, 1).index_fill(0, kept, 0.0)
        changed = weights(q, k + others[:, None], x + others, pos)[:, :, kept][..., kept]
        whole, changed = (w / w.sum(-1, keepdim=True) for w in (whole, changed))
        if torch.allclose(whole, changed, atol=1e-4):
            close(weights(q, k, x, kept)[..., kept], whole)
        close(pe.embed(x, pos)[:, kept], pe.embed(x[:, kept], kept))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation made; and the number of operations that are no views."""

    elements = operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += not func.is_view
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def test_no_tensor_grows_with_the_square_of_the_length(placed):
    """Neither one that training makes, nor what it keeps for the backward pass."""
    made, kept = [], []
    for length in (384, 768):
        options = placed
        if placed["name"] == "hybrid":  # whose own window is a share of train_len
            options = placed | {"pe": {"local": pe_options("rope", window=WINDOW)}}
        net = build_gpt(**options, train_len=length, n_layer=2, n_head=2, n_kv_head=1, dim=8).train()
        saved = {}  # bytes of each storage: views of one are counted once

        def keep(x, saved=saved):
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with Largest() as largest:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                loss = net(tokens(length, 1), targets=tokens(length, 1))
            loss.backward()
        made.append(largest.elements)
        kept.append(sum(saved.values()))
    assert made[1] <= 2.2 * made[0]
    assert kept[1] <= 2.4 * kept[0]


@pytest.mark.parametrize("name", slow_if_repeated(ALONE))
def test_launches_of_a_layer_are_few(name):
    """On a GPU each operation is the launch of a kernel; 1,024 tokens, forward and backward."""
    pe, x = build_pe(name, dim=16, n_head=2, head_dim=8, train_len=1024), torch.randn(1, 1024, 16)
    q, k, v = torch.randn(3, 1, 2, 1024, 8).requires_grad_()
    with Largest() as counted:
        attend(pe, q, k, v, pe.state(x), make_context(pe, torch.arange(1024), 1024, 1024)).sum().backward()
    assert 0 < counted.operations < 2500


@pytest.mark.parametrize("name", slow_if_repeated(ENCODINGS))
def test_checkpointing_is_the_same_training_in_less_memory(name, monkeypatch):
    """Loss and gradients, with dropout; the logits never exist at once."""
    monkeypatch.setattr(gpt, "MAX_LOGITS", 2**16)
    x, y = torch.randint(4096, (2, 2, 128), generator=torch.Generator().manual_seed(2))
    size = dict(n_layer=6, n_head=2, n_kv_head=1, dim=32, vocab_size=4096, train_len=128)
    net = network(name, dropout=0.2, **size).train()
    made, peaks = [], []

    def step():
        torch.manual_seed(0)
        loss = net(x, targets=y)
        made.append([loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))])

    for net.checkpointing in (False, True):
        with Largest() as largest:
            peaks.append(peak_memory(step, "cpu"))
    for a, b in zip(*made, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    assert largest.elements < y.numel() * 4096
    assert peaks[1] < peaks[0] / 2


@torch.no_grad()
def test_no_option_is_accepted_and_ignored(encoding):
    """Every option changes what the network computes: at some scale, for a short or a long text."""

    def outputs(**options):
        net = network(encoding, pe=options, train_len=256)
        return [net(tokens(t)) for length in each_scale(net, 300) for t in (8, length)]

    def differ(a, b):
        return len(a) != len(b) or any(x.shape != y.shape or not torch.equal(x, y) for x, y in zip(a, b, strict=True))

    options = pe_options(encoding)
    if "pattern" in options:
        assert differ(outputs(), outputs(pattern=["global", "local"]))
        return
    known = options_of(position.resolve(options["_target_"]))
    auto = {name: "auto" for name, (annotation, _) in known.items() if "auto" in choices(annotation)}
    bases = [(others, outputs(**others)) for others in ([{}, auto] if auto else [{}])]  # some matter beside "auto" only
    for name, (annotation, _) in known.items():
        verdicts, of_choice, refusals = [], isinstance(options[name], str | bool), []
        values = candidates(options[name], annotation)
        for value in values[:1] if name in options_of(PositionEncoding) else values:  # for the others see test_bias.py
            if any(verdicts) and not of_choice:
                break
            try:
                verdicts.append(any(differ(outputs(**others | {name: value}), base) for others, base in bases))
            except ValueError as error:  # out of the option's range, of another type, or without a meaning here
                refusals.append(str(error))
        if of_choice and not verdicts:
            assert all(f"pe.{name}=" in message for message in refusals)
            continue
        assert verdicts, f"no other value of pe.{name} is accepted"
        assert all(verdicts) if of_choice else any(verdicts), f"pe.{name}, or a choice of it, is ignored"


def choices(annotation):
    """The strings that an option of this type may be."""
    return [annotation] if isinstance(annotation, str) else [c for part in get_args(annotation) for c in choices(part)]


def candidates(value, annotation):
    """Other values of an option, some of which may be wrong."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        other_choices = [choice for choice in choices(annotation) if choice != value]
        return other_choices or [500.0]  # a number or a word, such as auto
    if value is None:
        return [8, 128, 5, 2.0, [2.0] * 8]
    return [type(value)(value * factor or factor) for factor in (0.1, 0.5, 2, 10)] + choices(annotation)


@pytest.mark.parametrize("name", ALONE)
def test_the_yaml_lists_every_option(name):
    options = pe_options(name)
    cls = position.resolve(options.pop("_target_"))
    assert options.pop("name") == name
    assert issubclass(cls, PositionEncoding)
    assert set(options) == set(options_of(cls))


@pytest.mark.parametrize("name", slow_if_repeated(ALONE))
@torch.no_grad()
def test_sinks_take_part_in_the_softmax_of_every_encoding(name):
    """Values of one come out as sigmoid(logsumexp - sink), so the logits of what comes out differ as the sinks do."""
    if name == "stick_breaking":
        with pytest.raises(ValueError, match="in a softmax, which StickBreaking lacks"):
            build_gpt(name, sinks=True)
        return
    pe, generator = build_pe(name, n_kv_head=2, train_len=TRAIN_LEN), torch.Generator().manual_seed(0)
    q, k, x = (torch.randn(2, *size, generator=generator) for size in ([4, LENGTH, 16], [2, LENGTH, 16], [LENGTH, 64]))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for scale in pe.scales:
        pe.active_scale = scale
        n = min(LENGTH, pe.max_len or LENGTH)
        q, k, ctx = q[:, :, :n], k[:, :, :n], make_context(pe, torch.arange(n), n, n)
        a, b = (
            attend(pe, q, k, torch.ones_like(k), pe.state(x[:, :n]), replace(ctx, sinks=s)).double()
            for s in (sinks, torch.zeros(4))
        )
        expected = (a.logit() + sinks[:, None, None]).sigmoid()
        torch.testing.assert_close(b, expected, rtol=0, atol=1e-4)
        assert b.max() - b.min() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("chosen", ["rope", "fox", "pope", "selective_rope", "path", "stick_breaking", "dca"])
def test_a_temperature_is_a_factor_of_the_scores(chosen):
    """Also of those that are made of softplus(q)."""
    pe, tempered = (at_last_scale(build_pe(chosen, train_len=TRAIN_LEN, temperature=t)) for t in ("none", "log"))
    q, k, v, x = (torch.randn(2, *size) for size in ([4, 1, 16], [4, LENGTH, 16], [4, LENGTH, 16], [LENGTH, 64]))
    ctx = make_context(pe, torch.arange(LENGTH), 1, LENGTH)
    factor = math.log(LENGTH) / math.log(TRAIN_LEN)
    state = pe.state(x)
    expected = attend(pe, q, k, v, state, replace(ctx, scale=factor * ctx.scale))
    close(attend(tempered, q, k, v, state, make_context(tempered, torch.arange(LENGTH), 1, LENGTH)), expected)


@torch.no_grad()
def test_the_default_dtype_changes_no_position(encoding):
    """Training with bf16-true may make bf16 the default dtype; evaluation does not."""
    pe = at_last_scale(build_pe(encoding))
    length = min(2040, pe.max_len or 2040)
    expected = pe.tables(torch.arange(length), length)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = pe.tables(torch.arange(length), length)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
