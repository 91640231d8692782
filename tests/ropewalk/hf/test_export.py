"""Export for transformers: what it computes there, what is refused, and the files beside the weights.

Architectures that are read and written again are tests of imports; here are encodings of ours.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import ENCODINGS, build_gpt, pe_options
from hf_models import VOCAB, assert_rotates_by, assert_same_logits, exported, tokens
from packaging.version import Version

from lab.ropecheck.__main__ import main as ropecheck
from model.generation import generate
from model.position.network import at_scale, max_len_of, scales_of
from ropewalk.hf import export

TRAIN_LEN = 64
PROMPT = 58  # tokens; a text of 12 more grows across TRAIN_LEN
GELU = {"n_kv_head": None}
LLAMA = {"n_kv_head": 2, "norm": "rmsnorm", "mlp": "swiglu"}
ROTARY = ["rope", "linear", "ntk", "abf", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope", "p_rope"]


def build(encoding: str, model=LLAMA, pe=None, **cfg):
    """A network with random weights, and the options of its encoding."""
    net = build_gpt(encoding, vocab_size=VOCAB, train_len=TRAIN_LEN, pe=pe, **model | cfg)
    with torch.no_grad():
        for p in net.parameters():  # the initial ones are small, and say nothing of biases and norms
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.1, generator=torch.Generator().manual_seed(p.numel()))
    return net, pe_options(encoding, **(pe or {}))


def largest_scale(net):
    return scales_of(net.encodings)[-1]


HALF = {"partial_rotary_factor": 0.5}
FACTORS = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}
WINDOW_32 = {"local": pe_options("rope", window=32)}
MIXED = {"pattern": ["global", "local"], "local": pe_options("rope", window=20), "global": pe_options("rope")}
GLOBALS_FIRST = MIXED | {"pattern": ["global", "global", "local"]}
TWO_BASES = MIXED | {"local": pe_options("rope", window=20, base=1e3)}
# Each is written at its largest scale.
EXPORTS = {name: dict(encoding=name) for name in ROTARY} | {
    "learned": dict(encoding="learned", model=GELU, bias=True, pe={"scale": 2.0}),
    "dynamic_ntk within": dict(encoding="dynamic_ntk", pe={"original_len": 128, "scale": 2.0}),
    "longrope with factors": dict(encoding="longrope", model=GELU, pe=FACTORS),
    "extended": dict(encoding="yarn", pe={"original_len": 32, "beta_fast": 8.0}),
    "yarn unrounded": dict(encoding="yarn", model=GELU, pe={"ramp": "unrounded", "attention_factor": 1.2}),
    "yarn of the paper": dict(encoding="yarn", pe={"ramp": "paper"}, bias="qkv"),
    "yarn trained at its scale": dict(encoding="yarn", pe={"original_len": 8, "scale": 4.0, "train_scale": 4.0}),
    "yarn to a broken length": dict(encoding="yarn", pe={"original_len": 63, "scale": 1.3}),
    "llama padded": dict(encoding="rope", bias=True, head_dim=32, vocab_multiple=64),
    "starcoder2 padded": dict(encoding="rope", model=GELU, bias=True, mlp="gelu_exact", vocab_multiple=64),
    "qwen3 window": dict(encoding="rope", qk_norm=True, pe={"window": 20}),
    "hybrid": dict(encoding="hybrid", n_layer=5),
    "nope": dict(encoding="nope"),
    "gemma3": dict(encoding="gemma3", n_layer=7, norm_at="both", qk_norm=True, mlp="geglu", pe=WINDOW_32),
    "gemma3 everywhere": dict(encoding="yarn", norm_at="both", qk_norm=True, tie_embeddings=False),
    "qwen3 mixed": dict(encoding="hybrid", n_layer=4, qk_norm=True, pe=MIXED),
    "gemma3 mixed": dict(encoding="hybrid", n_layer=4, qk_norm=True, norm_at="both", pe=MIXED),
    "olmo3": dict(encoding="olmo3", n_layer=4, norm_at="after", qk_norm="projection"),
    "olmo3 windows": dict(encoding="rope", norm_at="after", qk_norm="projection", pe={"window": 20, "base": 5e5}),
    "olmo3 one window": dict(encoding="hybrid", n_layer=4, norm_at="after", qk_norm="projection", pe=MIXED),
    "olmo3 two bases": dict(encoding="hybrid", n_layer=4, norm_at="after", qk_norm="projection", pe=TWO_BASES),
    "gemma3 globals first": dict(encoding="hybrid", n_layer=4, norm_at="both", qk_norm=True, pe=GLOBALS_FIRST),
    "gemma3 windows": dict(encoding="rope", norm_at="both", qk_norm=True, mlp="geglu", pe={"window": 20}),
    "smollm3": dict(encoding="smollm3", n_layer=5),
}


@pytest.mark.parametrize("name", EXPORTS)
@torch.no_grad()
def test_an_export_computes_the_same_in_transformers(name, tmp_path):
    """Logits within and beyond the trained length, and the text that it generates across it."""
    net, pe = build(**EXPORTS[name])
    model = exported(net, pe, tmp_path / "out", scale=largest_scale(net))
    encodings = at_scale(net.encodings, largest_scale(net))

    assert_same_logits(net, model, TRAIN_LEN - 1, encodings)
    assert_same_logits(net, model, min(256, max_len_of(encodings) or 256), encodings)

    if pe["name"] not in ("dynamic_ntk", "longrope"):  # a cache of transformers keeps keys as they were rotated
        net.double()  # in which no two tokens are equally probable by rounding
        texts = model.double().generate(tokens(PROMPT), max_new_tokens=12, do_sample=False)
        new = generate(net, tokens(PROMPT), 12, encodings=encodings, temperature=0)
        assert torch.equal(torch.stack([*new], dim=1), texts[:, PROMPT:])


@pytest.mark.parametrize("name", [name for name in EXPORTS if name not in ("learned", "nope")])
def test_ropecheck_finds_an_export_right(name, tmp_path):
    """What its config.json says is what our network does, and what transformers does in each kind of layer."""
    net, pe = build(**EXPORTS[name])
    exported(net, pe, tmp_path / "out", scale=largest_scale(net))
    encodings = at_scale(net.encodings, largest_scale(net))

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert_rotates_by(config, encodings)
    if "before 5 " not in (tmp_path / "out" / "README.md").read_text():
        del config["rope_parameters"]  # the old keys are there too, and say the same by themselves
        assert_rotates_by(config, encodings)

    # Of dynamic NTK transformers remembers the longest text.
    assert ropecheck([f"transformers:{tmp_path / 'out'}"]) == (pe["name"] == "dynamic_ntk")


OTHERS = [dict(encoding=name, n_layer=4) for name in sorted({*ENCODINGS} - {*EXPORTS})]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((other, "cannot be exported") for other in OTHERS),
        (dict(encoding="rope", model=GELU, mlp="swiglu"), r"Starcoder2ForCausalLM, cannot have model\.mlp=swiglu"),
        (dict(encoding="rope", qk_norm=True, bias=True), r"Qwen3ForCausalLM, cannot have model\.bias=True"),
        (dict(encoding="rope", pe={"layout": "interleaved"}), r"pe\.layout=interleaved"),
        (dict(encoding="rope", pe={"resonance": True}), r"pe\.resonance=True"),
        (dict(encoding="rope", sinks=True), r"LlamaForCausalLM, cannot have model\.sinks=True"),
        (dict(encoding="rope", model=GELU, conv=4), r"Starcoder2ForCausalLM, cannot have model\.conv=4"),
        (dict(encoding="rope", key_offset=True), r"LlamaForCausalLM, cannot have model\.key_offset=True"),
        (dict(encoding="rope", pe={"temperature": "log"}), r"cannot have pe\.temperature=log"),
        (dict(encoding="rope", n_head=6, head_dim=8, bias=True), r"LlamaForCausalLM, .* model\.dim % n_head=4"),
        (dict(encoding="learned"), r"model\.norm=rmsnorm and model\.mlp=swiglu and model\.n_head / n_kv_head=2"),
        (dict(encoding="learned", model=GELU, pe={"window": 8}), r"GPT2LMHeadModel, cannot have pe\.window=8"),
        (dict(encoding="rope", model=GELU, pe=HALF), r"Starcoder2ForCausalLM, cannot have pe\.partial_rotary_factor"),
        (dict(encoding="p_rope", pe=HALF), r"LlamaForCausalLM, cannot have pe\.partial_rotary_factor=0\.5"),
    ],
)
def test_what_transformers_lacks_is_refused_by_name(arguments, message, tmp_path):
    """With all that it lacks, and before anything is written."""
    with pytest.raises(ValueError, match=message):
        exported(*build(**arguments), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def model():
    """Plain RoPE, and what its model.json says."""
    net, pe = build("rope")
    return net, {"pe": pe, "original_len": net.train_len}


@pytest.mark.parametrize(("eos", "expected"), [(3, [3, 5]), (7, 7)])
def test_all_ends_of_a_text_are_kept(model, tmp_path, eos, expected):
    """The tokenizer's files may name several; they stay if ours is one of them."""

    def write_tokenizer(folder):
        (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5], "temperature": 0.5}')

    out = tmp_path / "out"
    export(*model, out, eos_token_id=eos, tokenizer=write_tokenizer)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text())["eos_token_id"] == expected


def test_export_overwrites_nothing_and_leaves_nothing_half_written(model, tmp_path):
    used = tmp_path / "used"
    used.mkdir()
    export(*model, used)  # it is empty

    for place in (used, used / "config.json"):
        with pytest.raises(ValueError, match="not an empty folder"):
            export(*model, place)

    with pytest.raises(ValueError, match="scale=8"):
        export(*model, tmp_path / "new", scale=8.0)
    with pytest.raises(ZeroDivisionError):  # when the weights are written
        export(*model, tmp_path / "new", tokenizer=lambda folder: 1 / 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new.lock", ".used.lock", "used"]


READER = """
import sys, torch, transformers
print(transformers.__version__)
for folder in sys.argv[1:]:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    except (ValueError, KeyError):  # the model type, or the rope type
        continue
    with torch.no_grad():
        torch.save(model(torch.load(folder + "/tokens.pt")).logits, folder + "/logits.pt")
"""


@pytest.mark.skipif("OLDER_TRANSFORMERS" not in os.environ, reason="OLDER_TRANSFORMERS names no folder")
@torch.no_grad()
def test_an_older_version_computes_the_same_or_is_warned_of(tmp_path):
    """Of transformers, in a folder that `pip install --target` made, such as 4.51.3. It may also refuse."""
    expected = {}
    for name, arguments in EXPORTS.items():
        net, pe = build(**arguments)
        folder = tmp_path / name
        exported(net, pe, folder, scale=largest_scale(net))
        encodings = at_scale(net.encodings, largest_scale(net))
        expected[folder] = net(tokens(128), encodings=encodings)[..., :VOCAB]
        torch.save(tokens(128), folder / "tokens.pt")

    environment = os.environ | {"PYTHONPATH": os.environ["OLDER_TRANSFORMERS"]}
    command = [sys.executable, "-c", READER, *expected]
    reader = subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True)

    version = Version(reader.stdout.splitlines()[0])
    read = [folder for folder in expected if (folder / "logits.pt").exists()]

    assert version < Version(transformers.__version__)
    assert len(read) > len(EXPORTS) / 2

    for folder in read:
        warned = re.search(r"Transformers before (\S+) ", (folder / "README.md").read_text())
        logits = torch.load(folder / "logits.pt")
        if warned and version < Version(warned[1]):  # the warning is true
            assert not torch.allclose(logits, expected[folder], rtol=1e-4, atol=1e-4), folder.name
        else:
            torch.testing.assert_close(logits, expected[folder], rtol=1e-4, atol=1e-4, msg=folder.name)


def test_a_card_warns_of_no_version_without_a_reason(tmp_path):
    exported(*build(encoding="rope"), tmp_path / "out")
    assert "before" not in (tmp_path / "out" / "README.md").read_text()
