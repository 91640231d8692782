"""Export for transformers: what it computes there, what is refused, and the files beside the weights."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ENCODINGS, build_gpt, pe_options
from hf_models import VOCAB, assert_same_logits, edit, exported, tokens

from model import serialization
from model.generation import generate
from model.position.network import at_scale, max_len_of, scales_of
from ropewalk.hf import export, read_model

FORK = multiprocessing.get_context("fork")
TRAIN_LEN, PROMPT, NEW = 64, 58, 12  # tokens; a text grows across TRAIN_LEN
HALF = {"partial_rotary_factor": 0.5}
MODELS = {"tiny": {"n_kv_head": None}, "llama": {"n_kv_head": 2, "norm": "rmsnorm", "mlp": "swiglu"}}
ROTARY = ["rope", "linear", "ntk", "abf", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope", "p_rope"]


def build(encoding: str, model: str = "llama", pe=None, **cfg):
    """A network with random weights, and the options of its encoding."""
    net = build_gpt(encoding, vocab_size=VOCAB, train_len=TRAIN_LEN, pe=pe, **MODELS[model] | cfg)
    with torch.no_grad():
        for p in net.parameters():  # the initial ones are small, and say nothing of biases and norms
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.1, generator=torch.Generator().manual_seed(p.numel()))
    return net, pe_options(encoding, **(pe or {}))


def at_largest_scale(net):
    return at_scale(net.encodings, scales_of(net.encodings)[-1], net.train_len)


FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
MIXED = {"pattern": ["global", "local"], "local": pe_options("rope", window=20), "global": pe_options("rope")}
EXPORTS = {  # each is written at its largest scale
    **{name: dict(encoding=name) for name in ROTARY},
    "learned": dict(encoding="learned", model="tiny", bias=True, pe={"scale": 2.0}),
    "dynamic_ntk within": dict(encoding="dynamic_ntk", pe={"original_len": 128, "scale": 2.0}),
    "longrope with factors": dict(encoding="longrope", model="tiny", pe=FACTORS),
    "extended": dict(encoding="yarn", pe={"original_len": 32, "beta_fast": 8.0}),
    "yarn unrounded": dict(encoding="yarn", model="tiny", pe={"ramp": "unrounded", "attention_factor": 1.2}),
    "yarn of the paper": dict(encoding="yarn", pe={"ramp": "paper"}, bias="qkv"),
    "yarn trained at its scale": dict(encoding="yarn", pe={"original_len": 8, "scale": 4.0, "train_scale": 4.0}),
    "yarn to a broken length": dict(encoding="yarn", pe={"original_len": 63, "scale": 1.3}),
    "llama padded": dict(encoding="rope", bias=True, head_dim=32, vocab_multiple=64),
    "starcoder2 padded": dict(encoding="rope", model="tiny", bias=True, mlp="gelu_exact", vocab_multiple=64),
    "qwen3 window": dict(encoding="rope", qk_norm=True, pe={"window": 20}),
    "hybrid": dict(encoding="hybrid", n_layer=5),
    "nope": dict(encoding="nope"),
    "gemma3": dict(
        encoding="gemma3",
        pe={"local": pe_options("rope", window=32)},
        n_layer=7,
        norm_at="both",
        qk_norm=True,
        mlp="geglu",
    ),
    "gemma3 everywhere": dict(encoding="yarn", norm_at="both", qk_norm=True, tie_embeddings=False),
    "qwen3 mixed": dict(encoding="hybrid", n_layer=4, qk_norm=True, pe=MIXED),
    "gemma3 mixed": dict(encoding="hybrid", n_layer=4, qk_norm=True, norm_at="both", pe=MIXED),
    "olmo3": dict(encoding="olmo3", n_layer=4, norm_at="after", qk_norm="projection"),
    "smollm3": dict(encoding="smollm3", n_layer=5),
}


@pytest.mark.parametrize("name", EXPORTS)
@torch.no_grad()
def test_an_export_computes_the_same_in_transformers(name, tmp_path):
    net, pe = build(**EXPORTS[name])
    model = exported(net, pe, tmp_path / "out", scale=scales_of(net.encodings)[-1])
    if pe["name"] != "learned":  # the old keys are there too, and say the same by themselves
        whole = read_model(tmp_path / "out").pe
        edit(tmp_path / "out", rope_parameters=...)
        assert read_model(tmp_path / "out").pe == whole
    encodings = at_largest_scale(net)
    for length in (TRAIN_LEN - 1, min(256, max_len_of(encodings) or 256)):
        assert_same_logits(net, model, length, encodings)
    if pe["name"] not in ("dynamic_ntk", "longrope"):  # a cache of transformers keeps keys as they were rotated
        net, model = net.double(), model.double()  # in which no two tokens are equally probable by rounding
        theirs = model.generate(tokens(PROMPT), max_new_tokens=NEW, do_sample=False)[:, PROMPT:]
        ours = generate(net, tokens(PROMPT), NEW, encodings=encodings, temperature=0)
        assert torch.equal(torch.stack([*ours], 1), theirs)


OTHERS = [dict(encoding=name, n_layer=4) for name in sorted({*ENCODINGS} - {*ROTARY, *EXPORTS})]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((other, "cannot be exported") for other in OTHERS),
        (dict(encoding="rope", model="tiny", mlp="swiglu"), r"Starcoder2ForCausalLM, cannot have model\.mlp=swiglu"),
        (dict(encoding="rope", qk_norm=True, bias=True), r"Qwen3ForCausalLM, cannot have model\.bias=True"),
        (dict(encoding="rope", pe={"layout": "interleaved"}), r"pe\.layout=interleaved"),
        (dict(encoding="rope", pe={"resonance": True}), r"pe\.resonance=True"),
        (dict(encoding="rope", sinks=True), r"LlamaForCausalLM, cannot have model\.sinks=True"),
        (dict(encoding="rope", model="tiny", conv=4), r"Starcoder2ForCausalLM, cannot have model\.conv=4"),
        (dict(encoding="rope", key_offset=True), r"LlamaForCausalLM, cannot have model\.key_offset=True"),
        (dict(encoding="rope", pe={"temperature": "log"}), r"cannot have pe\.temperature=log"),
        (
            dict(encoding="rope", n_head=6, head_dim=8, bias=True),
            r"LlamaForCausalLM, cannot have model\.dim % n_head=4",
        ),
        (dict(encoding="learned"), r"model\.norm=rmsnorm and model\.mlp=swiglu and model\.n_kv_head"),
        (dict(encoding="learned", model="tiny", pe={"window": 8}), r"GPT2LMHeadModel, cannot have pe\.window=8"),
        (dict(encoding="rope", model="tiny", pe=HALF), r"Starcoder2ForCausalLM, cannot have pe\.partial_rotary_factor"),
        (dict(encoding="p_rope", pe=HALF), r"LlamaForCausalLM, cannot have pe\.partial_rotary_factor=0\.5"),
    ],
)
def test_what_transformers_lacks_is_refused_by_name(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        exported(*build(**arguments), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def run(tmp_path):
    """A run with plain RoPE."""
    (tmp_path / "run").mkdir()
    net, pe = build("rope")
    serialization.save(net, tmp_path / "run", pe=pe)
    return tmp_path / "run"


@pytest.mark.parametrize(("eos", "expected"), [(3, [3, 5]), (7, 7)])
def test_all_ends_of_a_text_are_kept(run, tmp_path, eos, expected):
    ends = '{"eos_token_id": [3, 5], "temperature": 0.5}'
    out = tmp_path / "out"
    export(run, out, eos_token_id=eos, tokenizer=lambda folder: (folder / "generation_config.json").write_text(ends))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text())["eos_token_id"] == expected


def test_export_overwrites_nothing(run, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    for name in ("used", "used/file"):
        with pytest.raises(ValueError, match="not an empty folder"):
            export(run, tmp_path / name)
    with pytest.raises(ValueError, match="scale=8"):
        export(run, tmp_path / "new", scale=8.0)
    assert not (tmp_path / "new").exists()

    (tmp_path / "empty").mkdir()
    export(run, tmp_path / "empty")


def killed(folder):
    """Stand in for the writer of the tokenizer: the weights are written by then."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_exports_leave_one_folder_which_the_next_removes(run, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        process = FORK.Process(target=export, args=(run, out), kwargs={"tokenizer": killed})
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    (left,) = [path for path in tmp_path.glob(".*") if path.is_dir()]
    (left / "old file").touch()
    export(run, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out", "run"]
    assert not (out / "old file").exists()


READER = """
import sys, torch, transformers
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
def test_an_older_version_computes_the_same_or_refuses(tmp_path):
    """Of transformers, in a folder that `pip install --target` made, such as 4.51.3."""
    logits = {}
    for name, arguments in EXPORTS.items():
        net, pe = build(**arguments)
        folder = tmp_path / name
        exported(net, pe, folder, scale=scales_of(net.encodings)[-1])
        if "or newer" not in (folder / "README.md").read_text():
            logits[folder] = net(tokens(128), encodings=at_largest_scale(net))[..., :VOCAB]
            torch.save(tokens(128), folder / "tokens.pt")
    python = [sys.executable, "-c", READER, *map(str, logits)]
    subprocess.run(python, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.environ["OLDER_TRANSFORMERS"]}, check=True)
    read = [folder for folder in logits if (folder / "logits.pt").exists()]
    assert len(read) > len(EXPORTS) / 2

    for folder in read:
        torch.testing.assert_close(
            torch.load(folder / "logits.pt"), logits[folder], rtol=1e-4, atol=1e-4, msg=str(folder)
        )
