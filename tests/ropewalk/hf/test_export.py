"""Export for transformers: what it computes there, what is refused, and the files beside the weights."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ENCODINGS, build_gpt, pe_options
from hf_models import SIZES, VOCAB, assert_same_logits, edit, exported, hf_model, network, tokens
from process_helpers import CONTEXT

from model import serialization
from model.generation import generate
from ropewalk.hf import export, read_model

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


FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
EXPORTS = {  # each is written at its largest scale
    **{name: dict(encoding=name) for name in ROTARY},
    "learned": dict(encoding="learned", model="tiny", bias=True, pe={"scale": 2.0}),
    "dynamic_ntk within": dict(encoding="dynamic_ntk", pe={"original_len": 128, "scale": 2.0}),
    "longrope with factors": dict(encoding="longrope", model="tiny", pe=FACTORS),
    "extended": dict(encoding="yarn", pe={"original_len": 32, "beta_fast": 8.0}),
    "yarn unrounded": dict(encoding="yarn", model="tiny", pe={"ramp": "unrounded", "attention_factor": 1.2}),
    "yarn of the paper": dict(encoding="yarn", pe={"ramp": "paper"}, bias="qkv"),
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
    "olmo3": dict(encoding="olmo3", n_layer=4, norm_at="after", qk_norm="projection"),
    "smollm3": dict(encoding="smollm3", n_layer=5),
}


@pytest.mark.parametrize("name", EXPORTS)
@torch.no_grad()
def test_an_export_computes_the_same_in_transformers(name, tmp_path):
    net, pe = build(**EXPORTS[name])
    model = exported(net, pe, tmp_path / "out", scale=net.scales[-1])
    if pe["name"] != "learned":  # the old keys are there too, and say the same by themselves
        whole = read_model(tmp_path / "out").pe
        edit(tmp_path / "out", rope_parameters=...)
        assert read_model(tmp_path / "out").pe == whole
    with net.at_scale(net.scales[-1]):
        for length in (TRAIN_LEN - 1, min(256, net.max_len or 256)):
            assert_same_logits(net, model, length)
        if pe["name"] not in ("dynamic_ntk", "longrope"):  # a cache of transformers keeps keys as they were rotated
            net, model = net.double(), model.double()  # in which no two tokens are equally probable by rounding
            theirs = model.generate(tokens(PROMPT), max_new_tokens=NEW, do_sample=False)[:, PROMPT:]
            assert torch.equal(torch.stack([*generate(net, tokens(PROMPT), NEW, temperature=0)], 1), theirs)


OTHERS = [dict(encoding=name, n_layer=4) for name in sorted({*ENCODINGS} - {*ROTARY, *EXPORTS})]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((other, "cannot be exported") for other in OTHERS),
        (dict(encoding="rope", model="tiny", mlp="swiglu"), r"Starcoder2ForCausalLM, cannot have model\.mlp=swiglu"),
        (dict(encoding="rope", qk_norm=True, bias=True), r"Qwen3ForCausalLM, cannot have model\.bias=True"),
        (dict(encoding="rope", pe={"layout": "interleaved"}), r"train with pe\.layout=half"),
        (dict(encoding="rope", pe={"resonance": True}), r"pe\.resonance=true cannot be exported"),
        (dict(encoding="rope", sinks=True), r"LlamaForCausalLM, cannot have model\.sinks=True"),
        (dict(encoding="rope", gate="head"), r"LlamaForCausalLM, cannot have model\.gate=head"),
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
        (dict(encoding="rope", parallel=True), r"LlamaForCausalLM, cannot have model\.parallel=True"),
    ],
)
def test_what_transformers_lacks_is_refused_by_name(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        exported(*build(**arguments), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ends_of_a_text_are_said_once_and_all_are_kept(tmp_path):
    hf_model("llama", **SIZES).save_pretrained(tmp_path / "in")
    pretrained, run = read_model(tmp_path / "in"), tmp_path / "run"
    run.mkdir()
    serialization.save(network(pretrained), run, pe=pretrained.pe)
    ends = '{"eos_token_id": [3, 5], "temperature": 0.5}'
    for eos, expected in ((3, [3, 5]), (7, 7)):
        out = tmp_path / str(eos)
        said = export(run, out, eos_token_id=eos, tokenizer=lambda f: (f / "generation_config.json").write_text(ends))
        assert said == "LlamaForCausalLM, default"
        files = [json.loads((out / f"{name}.json").read_text()) for name in ("config", "generation_config")]
        assert [config["eos_token_id"] for config in files] == [expected, expected]
        assert "position encoding rope at scale 1, trained at 32 tokens" in (out / "README.md").read_text()


def test_export_overwrites_nothing_and_leaves_nothing_behind(tmp_path, monkeypatch):
    net, pe = build("yarn")
    for name in ("used", "empty", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    serialization.save(net, tmp_path / "run", pe=pe)
    for name in ("used", "used/file"):
        with pytest.raises(ValueError, match="exists and is not an empty folder"):
            export(tmp_path / "run", tmp_path / name)
    with pytest.raises(ValueError, match=r"scale=8 is none of the encoding's, \(1\.0, 4\.0\)"):
        export(tmp_path / "run", tmp_path / "new", scale=8.0)
    assert export(tmp_path / "run", tmp_path / "empty") == "LlamaForCausalLM, default"

    def full_disk(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("ropewalk.hf.write.write_text", full_disk)
    with pytest.raises(OSError, match="no space left"):
        export(tmp_path / "run", tmp_path / "new")
    locks = [".empty.lock", ".new.lock"]  # empty files
    assert sorted(path.name for path in tmp_path.iterdir()) == [*locks, "empty", "run", "used"]


def killed(folder):
    """Stand in for the writer of the tokenizer: the weights are written by then."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_exports_leave_one_folder_which_the_next_removes(tmp_path):
    net, pe = build("rope")
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    serialization.save(net, run, pe=pe)
    for _ in range(2):
        process = CONTEXT.Process(target=export, args=(run, out), kwargs={"tokenizer": killed})
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    (left,) = [path for path in tmp_path.glob(".*") if path.is_dir()]
    assert left.name == ".out.partial"
    assert any(path.suffix == ".safetensors" for path in left.rglob("*"))
    (left / "old file").touch()
    export(run, out)
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # who may read one file may read the weights
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out", "run"]
    assert not (out / "old file").exists()


def test_the_second_of_two_exports_to_one_folder_says_what_is_in_the_way(tmp_path, monkeypatch):
    net, pe = build("rope")
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    serialization.save(net, run, pe=pe)
    load, seconds = serialization.load, []

    def begin_another(folder):  # in the middle of the first
        started = threading.Event()

        def announced(run):
            started.set()
            return load(run)

        monkeypatch.setattr(serialization, "load", announced)
        seconds.append(pool.submit(export, run, out))
        assert started.wait(60)

    with ThreadPoolExecutor(1) as pool:
        export(run, out, tokenizer=begin_another)
        with pytest.raises(ValueError, match="exists and is not an empty folder"):
            seconds[0].result()
    assert read_model(out).train_len == TRAIN_LEN
