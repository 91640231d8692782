"""The network around the encoding: shapes, initialisation, counts, generation, files."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, build_gpt, gradients_of, pe_options, randomise, read_at, tokens
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from conf.schema import GPTConfig
from lab.benchmarks.measure import peak_memory
from model import gpt
from model.cache import Cache
from model.generation import generate
from model.gpt import GPT
from model.layout import packed
from model.position import Shape, build_encodings
from model.position.network import scales_of, with_parameters_of
from model.size import flops_per_token

FLAVOURS = [
    {"norm": "layernorm", "mlp": "gelu", "bias": True},
    {"norm": "rmsnorm", "mlp": "swiglu", "tie_embeddings": False},
    {"qk_norm": True, "n_kv_head": 1, "vocab_multiple": 64},
    {"n_kv_head": None, "hidden_dim": 40, "sinks": True},
    {"norm_at": "after", "qk_norm": "projection", "mlp": "geglu"},
    {"norm_at": "both", "norm": "rmsnorm", "bias": True},
    {"conv": 4, "mlp": "swiglu", "bias": True, "key_offset": True},
]


@pytest.mark.parametrize("cfg", FLAVOURS)
def test_every_flavour_trains_all_its_parameters_and_decodes_as_it_reads(cfg):
    """With checkpointing and without. The loss is the mean over the targets that count."""
    net = build_gpt("rope", pe={"temperature": "ssmax"}, **cfg)
    checkpointing = build_gpt("rope", pe={"temperature": "ssmax"}, checkpointing=True, **cfg)
    idx = tokens(9)
    targets = idx.clone()
    targets[0, :5] = -100
    cache = Cache()

    logits = net(idx)
    loss = net(idx, targets=targets)
    in_pieces = [net(piece, cache=cache) for piece in idx.split(4, dim=1)]
    gradients = gradients_of(loss, net)
    again = gradients_of(checkpointing(idx, targets=targets), checkpointing)

    assert logits.shape == (2, 9, 64 if "vocab_multiple" in cfg else 50)
    assert all(gradient.any() for gradient in gradients)
    assert_close(again, gradients)
    assert_close(loss, F.cross_entropy(logits[..., :50].flatten(0, 1), targets.flatten()))
    assert_close(torch.cat(in_pieces, dim=1), logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("autocast", "tolerance"), [(None, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_loss_in_pieces_has_the_gradients_of_the_whole_in_float64(autocast, tolerance, tied, monkeypatch):
    """Pieces of three tokens, ignored targets, a padded vocabulary."""
    cfg = {"vocab_multiple": 64, "tie_embeddings": tied}
    net = build_gpt("rope", **cfg)
    exact = build_gpt("rope", **cfg).double()
    idx = tokens(10)
    targets = idx.clone()
    targets[0, :5] = -100
    monkeypatch.setattr(gpt, "MAX_LOGITS", 3 * 2 * 64)

    expected = F.cross_entropy(exact(idx)[..., :50].flatten(0, 1), targets.flatten())
    expected_gradients = gradients_of(3 * expected, exact)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        loss = net(idx, targets=targets)
    gradients = gradients_of(3 * loss, net)

    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for gradient, of_exact in zip(gradients, expected_gradients, strict=True):
        assert (gradient - of_exact).norm() <= tolerance * of_exact.norm()


def test_a_frozen_head_has_no_gradient(monkeypatch):
    monkeypatch.setattr(gpt, "MAX_LOGITS", 3 * 2 * 50)
    idx = tokens(10)
    expected = build_gpt("rope", tie_embeddings=False)
    net = build_gpt("rope", tie_embeddings=False)
    net.head.requires_grad_(False)

    expected(idx, targets=idx).backward()
    net(idx, targets=idx).backward()

    assert net.head.weight.grad is None
    assert_close(net.embedding.weight.grad, expected.embedding.weight.grad)


def test_a_step_holds_a_part_of_the_logits_of_a_large_vocabulary():
    """Fewer bytes than all of them in fp32. Autograd would hold three times as many."""
    vocab_size = 50257
    net = build_gpt("rope", dim=128, vocab_size=vocab_size, train_len=256).train()
    x, y = tokens(256, 16, vocab_size).split(8)

    held = peak_memory(lambda: net(x, targets=y).backward(), "cpu")

    assert held < 4 * x.numel() * vocab_size


SCALED_BY_DEPTH = ("attn.out.weight", "mlp.down.weight")
# By the ends of their names; the others have a std of 0.02. A convolution is uniform, as PyTorch's Conv1d.
STDS = dict.fromkeys(SCALED_BY_DEPTH, 0.02 / math.sqrt(2 * 8)) | {"mix.conv": 0.5 / math.sqrt(3)}
CONSTANTS = {"bias": 0.0, "sinks": 0.0, "norm.weight": 1.0, "ssmax": 1 / math.log(64)}


def by_end(values, name, default=None):
    return next((value for end, value in values.items() if name.endswith(end)), default)


def test_initial_values_have_the_distribution_of_gpt_2():
    """What is added to the residual stream, twice in each of 8 layers, keeps its variance."""
    cfg = GPTConfig(n_layer=8, dim=256, bias=True, sinks=True, conv=4)
    net = GPT(cfg, pe_options("rope", temperature="ssmax"), vocab_size=500, train_len=64)
    for name, parameter in net.named_parameters():
        constant = by_end(CONSTANTS, name)
        if constant is not None:
            assert_close(parameter, torch.full_like(parameter, constant))
            continue
        std = by_end(STDS, name, default=0.02)
        error = 5 / math.sqrt(parameter.numel())

        assert parameter.std().item() == pytest.approx(std, rel=error), name
        assert abs(parameter.mean().item()) < error * std, name


def test_initial_values_depend_on_the_seed_and_the_name_alone():
    weights = build_gpt("rope").state_dict()
    of_seed_1 = build_gpt("rope", seed=1).state_dict()
    deeper = build_gpt("rope", n_layer=3).state_dict()
    with_more = build_gpt("rope", conv=4, sinks=True).state_dict()

    assert not torch.equal(weights["embedding.weight"], of_seed_1["embedding.weight"])

    for name, value in weights.items():
        assert torch.equal(value, with_more[name]), name
        assert name.endswith(SCALED_BY_DEPTH) or torch.equal(value, deeper[name]), name


def by_hand(net, x):
    """What a block of `net`, with NoPE, the GELU of GPT-2, a convolution and offset keys, makes of `x`: with PyTorch's
    modules and functions."""
    (block,) = net.blocks
    kernel = block.attn.mix.conv
    channels, width = kernel.shape

    def norm(x, name):
        place = "after" if "post" in name else "before"
        if net.cfg.norm_at not in (place, "both"):
            return x
        return F.layer_norm(x, (64,), getattr(block, name).weight)

    qkv = block.attn.qkv(norm(x, "attn_norm"))
    # PyTorch's convolution has its kernel the other way round, and is causal only with padding that is cut off again.
    convolved = F.conv1d(
        qkv.mT,
        kernel.flip(1)[:, None],
        padding=width - 1,
        groups=channels,
    )
    qkv = qkv + convolved[..., : x.size(1)].mT
    parts = qkv.split([64, 32, 32], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in parts)  # [B, H, T, D]
    first, second = k.chunk(2, dim=-1)
    before = F.pad(second, (0, 0, 1, -1))  # of the token before
    k = torch.cat((first, before), dim=-1)
    # Two heads share a key and a value.
    k, v = (shared.repeat_interleave(2, dim=1) for shared in (k, v))
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    attended = block.attn.out(heads.transpose(1, 2).flatten(2))
    x = x + norm(attended, "attn_post_norm")

    up = block.mlp.up(norm(x, "mlp_norm"))
    hidden = F.gelu(up, approximate="tanh")
    return x + norm(block.mlp.down(hidden), "mlp_post_norm")


@pytest.mark.parametrize("norm_at", ["before", "after", "both"])
def test_a_block_with_a_convolution_and_offset_keys_by_hand(norm_at):
    net = randomise(build_gpt("nope", n_layer=1, conv=3, key_offset=True, norm_at=norm_at)).double()
    idx = tokens(9)
    expected = net.norm(by_hand(net, net.embedding(idx)))

    assert_same(
        net.hidden_states(idx),
        expected,
        [*net.blocks.parameters()],
    )


def test_what_reset_parameters_leaves_out_is_an_error(monkeypatch):
    monkeypatch.setattr("model.position.absolute.Learned.reset_parameters", lambda self, generator: None)
    with pytest.raises(ValueError, match=r"Learned\.reset_parameters must set table"):
        build_gpt("learned")


@pytest.mark.parametrize(
    "cfg",
    [
        {},
        {"norm": "rmsnorm", "mlp": "swiglu", "n_kv_head": 2, "tie_embeddings": False},
    ],
)
def test_operations_are_those_that_pytorch_counts(cfg):
    """But for attention, whose causal half it counts whole."""
    net = build_gpt("nope", **cfg)
    idx = tokens(32)
    with FlopCounterMode(display=False) as counter:
        net(idx, targets=idx).backward()
    counts = counter.get_flop_counts()["Global"]
    linear = [count for operation, count in counts.items() if "mm" in str(operation)]
    # q.k and its product with v, 2 operations for each of 32 / 2 visible keys, and twice that backward.
    attention = 6 * net.cfg.n_layer * net.cfg.dim * 32
    of_text = (flops_per_token(net, 32) - attention) * idx.numel()

    assert of_text == sum(linear)


def test_sampling_follows_the_distribution():
    net = build_gpt("nope", n_layer=1, dim=16, n_head=2, n_kv_head=1)
    idx = torch.tensor([[3, 1, 4]])
    logits = net(idx)[0, -1]
    probability = (logits / 0.1).softmax(-1)
    ordered, order = probability.sort(descending=True)

    assert 0.1 < ordered[0] < 0.45  # neither flat nor certain

    def shares(**options):
        """Of each token among 5,000 that were drawn, the most probable first."""
        prompts = idx.expand(5_000, -1)
        (token,) = generate(net, prompts, 1, temperature=0.1, **options)
        return torch.bincount(token, minlength=50)[order] / 5_000

    assert_close(shares(), ordered, atol=0.025, rtol=0)
    assert shares(top_k=3).count_nonzero() == shares(top_k=3)[:3].count_nonzero() == 3
    assert torch.equal(shares(), shares(seed=0))
    assert not torch.equal(shares(), shares(seed=2))


REFUSED = [
    ([], {}, "prompt is empty"),
    ([50], {}, "token id 50 is outside the vocabulary 0..49"),
    ([-1], {}, "token id -1"),
    ([1], {"max_new_tokens": 32}, "a text of 33 tokens exceeds the 32 positions of Learned"),
]


@pytest.mark.parametrize(("ids", "options", "message"), REFUSED)
def test_generation_refuses_before_the_first_token(ids, options, message):
    idx = torch.tensor([ids], dtype=torch.int64)
    generated = generate(build_gpt("learned"), idx, **{"max_new_tokens": 1} | options)
    with pytest.raises(ValueError, match=message):
        next(generated)


END = 49  # the token that ends a document


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("name", "cfg"),
    [
        ("rope", {"sinks": True}),
        ("cope", {}),
        ("path_fox", {}),
        ("learned", {"conv": 4, "key_offset": True}),
        ("stick_breaking", {}),
    ],
)
def test_the_gradient_of_packed_documents_is_that_of_the_documents_one_by_one(name, cfg, checkpointing):
    """A token of a long document counts as much as one of a short one."""
    net = build_gpt(name, train_len=40, checkpointing=checkpointing, **cfg).double().train()
    idx, targets = tokens(40, 4, END).split(2)
    idx[0, [6, 7, 30]] = END
    idx[1, 20] = END
    sizes = [7, 1, 23, 9, 21, 19]
    expected = 0
    for x, y in zip(
        idx.flatten().split(sizes),
        targets.flatten().split(sizes),
        strict=True,
    ):
        share = x.numel() / idx.numel()
        expected = expected + share * net(x[None], targets=y[None])

    layout = packed(idx, END)
    loss = net(idx, layout, targets=targets)

    assert [rows.shape for rows in layout.rows] == [(3, 16), (3, 32)]  # at most half is padding
    assert_same(loss, expected, [*net.parameters()])


def test_a_pattern_over_layers_is_repeated_and_shares_what_has_no_parameters():
    options = {
        "pattern": ["local", "local", "global"],
        "local": pe_options("yarn", window=8),
        "global": pe_options("cope", npos_max=5),
    }
    net = build_gpt("nope", pe=options, n_layer=5)
    local, _, other, *_ = net.encodings

    assert net.encodings == [local, local, other, local, local]
    assert net.distinct_encodings == [local, other]
    assert (local.window, other.window) == (8, None)
    assert [name for name in net.state_dict() if "position" in name] == ["blocks.2.position.table"]

    for pattern in ([], ["local", "far"]):
        with pytest.raises(ValueError, match=r"pe\.pattern="):
            build_gpt("nope", pe=options | {"pattern": pattern})


@torch.no_grad()
def test_a_window_that_training_has_filled_is_not_scaled():
    """It never meets a longer distance."""
    net = build_gpt("yarn", pe={"scale": 8.0, "window": 16})
    assert scales_of(net.encodings) == (1.0,)

    parts = {"local": pe_options("yarn", window=16), "global": pe_options("yarn")}
    net = build_gpt("nope", n_layer=2, pe={"pattern": [*parts], **parts})
    assert scales_of(net.encodings) == (1.0, 4.0)
    assert [pe.active_scale for pe in read_at(net, 4.0)] == [1.0, 4.0]


def test_each_part_of_a_pattern_has_scales_of_its_own():
    names = ["linear", "dynamic_ntk", "rerope"]
    parts = {name: pe_options(name) for name in names}
    net = build_gpt("nope", n_layer=3, pe={"pattern": names, **parts})

    for i, scale in enumerate(scales_of(net.encodings)):
        for pe in read_at(net, scale):
            assert pe.active_scale == pe.scales[i]


@pytest.mark.parametrize("name", ["yarn", "fox", "gemma3", "path"])
def test_nothing_that_reads_a_network_changes_it(name):
    """No attribute of it, of a block or of an encoding: not its own reading, nor another one's, nor a generation."""
    net = build_gpt(name)
    modules = [*net.modules(), *net.encodings]
    idx = tokens(40, vocab_size=49)
    last_scale = read_at(net, scales_of(net.encodings)[-1])
    of_a_stage = build_encodings(pe_options(name), Shape.of(net.cfg, 64))
    before = [repr(vars(module)) for module in modules]

    net(idx[:, :32], targets=idx[:, :32])
    net(idx, packed(idx, 7), encodings=last_scale)
    net(idx, encodings=with_parameters_of(of_a_stage, net.encodings))
    next(generate(net, idx, 2))

    assert [repr(vars(module)) for module in modules] == before
