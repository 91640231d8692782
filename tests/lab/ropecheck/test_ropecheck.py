"""The check of an engine's RoPE: faults planted in transformers, which computes independently of it, are named."""

import json
import math
import random
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lab.ropecheck import engines, tiny
from lab.ropecheck.__main__ import main
from lab.ropecheck.rope import settings

ORIGINAL = "original_max_position_embeddings"
SHARPER = 1 + 0.1 * math.log(4)  # the attention factor of YaRN at a factor of 4


def flat(config, kind):
    """The settings of a kind of layer in the spelling of transformers 5."""
    given = config.get("rope_parameters")
    if given:
        return given.get(kind, given)
    if kind == "sliding_attention":
        return {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]}
    return {"rope_type": "default"} | (config["rope_scaling"] or {}) | {"rope_theta": config["rope_theta"]}


def engine(change=lambda s, length: {}):
    """Transformers, told other settings than those of the configuration."""

    def rotate(config, positions, kind):
        s = flat(config, kind)
        s = s | {"kind": kind, "longest": config["max_position_embeddings"]}
        s |= change(s, positions[-1] + 1)
        longest = s.pop("longest")
        del s["kind"]
        hf = LlamaConfig(head_dim=config["head_dim"], max_position_embeddings=longest, rope_parameters=s)
        shift = s.pop("shift", 0)
        cos, sin = LlamaRotaryEmbedding(hf)(torch.empty(0), torch.tensor([positions]) + shift)
        return cos, sin * s.pop("direction", 1)

    return rotate


def of_yarn(**changes):
    return lambda s, length: changes if s["rope_type"] == "yarn" else {}


def unscaled(s, length):
    return {"rope_type": "default"}


def off_below(s, length):
    return {"rope_type": "default"} if length <= s.get(ORIGINAL, 0) else {}


def swapped(s, length):
    return {"beta_fast": s.get("beta_slow", 1.0), "beta_slow": s.get("beta_fast", 32.0)}


def of_local(**changes):
    return lambda s, length: changes if s["kind"] == "sliding_attention" else {}


def longrope(name):
    return lambda s, length: {"short_factor": s[name], "long_factor": s[name]} if s["rope_type"] == "longrope" else {}


def both(one, two):
    return lambda s, length: one(s, length) | two(s, length)


ONE = of_yarn(attention_factor=1.0)
# What is planted; one of the cases in which it shows; what must be said of it.
PLANTED = [
    (unscaled, "yarn", "the scaling is ignored"),
    (unscaled, "longrope", "the scaling is ignored"),
    (off_below, "yarn", "YaRN is off up to 64 tokens"),
    (off_below, "llama3", "Llama 3's scaling is off up to 64 tokens"),
    (lambda s, length: {"rope_theta": 1e4}, "linear", "the base is 10000 instead of 50000"),
    (lambda s, length: {"rope_theta": 1e6}, "yarn_by_layer", "the base is 1000000 instead of 50000"),
    (of_local(rope_theta=5e4), "linear_by_layer", "local layers use the global base"),
    (of_local(rope_type="linear", factor=4.0), "linear_by_layer", "local layers use the global scaling"),
    (lambda s, length: {ORIGINAL: s["longest"]}, "llama3", "the original length is max_position_embeddings, 256"),
    (of_yarn(factor=16.0, attention_factor=SHARPER), "yarn", "the factor is applied twice"),
    (lambda s, length: {"factor": 0.25}, "linear", "frequencies are multiplied by the factor, not divided"),
    (ONE, "yarn", "attention factor 1.0 instead of 1.139"),
    (ONE, "yarn_mscale", "attention factor 1.0 instead of 1.065"),
    (of_yarn(attention_factor=SHARPER**2), "yarn", "the attention factor is applied twice, 1.139 squared"),
    (swapped, "yarn", "beta_fast and beta_slow are swapped"),
    (of_yarn(beta_fast=32.0, beta_slow=1.0), "yarn_betas", "beta_fast and beta_slow are ignored: 32 and 1"),
    (of_yarn(truncate=False), "yarn", "the limits of YaRN's ramp are not rounded"),
    (of_yarn(truncate=True), "yarn_untruncated", "truncate=false is ignored"),
    (of_yarn(rope_type="linear"), "yarn", "YaRN is computed as linear scaling"),
    (
        lambda s, length: {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "llama3_limits",
        "low_freq_factor and high_freq_factor are ignored: 1 and 4",
    ),
    (longrope("long_factor"), "longrope", "the long list of LongRoPE up to 64 tokens"),
    (longrope("short_factor"), "longrope", "the short list of LongRoPE above 64 tokens"),
    (lambda s, length: {"partial_rotary_factor": 1.0}, "proportional_factor", "partial_rotary_factor is ignored"),
    (lambda s, length: {"direction": -1}, "default", "rotates in the opposite direction"),
    (lambda s, length: {"shift": 1}, "llama3", "positions are one too large"),
    (both(swapped, ONE), "yarn", "attention factor 1.0 instead of 1.139 and beta_fast and beta_slow are swapped"),
    (both(off_below, ONE), "yarn", "YaRN is off up to 64 tokens and attention factor 1.0 instead of 1.139"),
    (
        both(unscaled, lambda s, length: {"rope_theta": 1e6}),
        "llama3",
        "the scaling is ignored and the base is 1000000 instead of 50000",
    ),
]


@pytest.mark.parametrize(("change", "name", "text"), PLANTED)
def test_a_planted_fault_is_named(change, name, text):
    cases = [case for case in engines.CASES if case[0] == name]
    (line,) = engines.check(engine(change), cases)
    assert text in line.removeprefix(f"{name}: ").split(", or ")


def test_nothing_is_named_on_a_right_engine():
    """Transformers, in 200 random configurations and in all cases.

    It ignores truncate=false in models whose layers differ, but not in the flat settings that this engine gives it.
    """
    assert engines.check(engine(), engines.CASES) == []

    draw = random.Random(0)
    cases = []
    for number in range(200):
        s = dict(flat(draw.choice(engines.CASES)[1], "full_attention"))
        original = draw.choice([16, 100, 4096, 32768])
        s |= {"rope_theta": draw.choice([1e4, 5e5, 1e6]) * draw.uniform(0.5, 2), "factor": draw.uniform(1.1, 40)}
        s |= {ORIGINAL: original} if ORIGINAL in s else {}
        sizes = {"head_dim": 32, "max_position_embeddings": int(original * s["factor"])}
        cases.append((str(number), sizes | {"rope_parameters": s}, "full_attention"))
    assert engines.check(engine(), cases) == []


MODELS = {
    "qwen3": {"num_key_value_heads": 2},
    "phi": {"partial_rotary_factor": 0.5},
    "cohere": {},  # pairs of channels lie side by side
    "deepseek_v3": {"qk_rope_head_dim": 32},  # a part of a head is rotated
    "gemma3_text": {},  # kinds of layers
    "glm": {},
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_are_right(name, scaled, tmp_path):
    """From their config.json, whatever lies around the rotation."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096}
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, ORIGINAL: 1024}
    rope = {"rope_parameters": yarn} if scaled else {}
    AutoConfig.for_model(name, **sizes, **MODELS[name], **rope).save_pretrained(tmp_path)
    assert main([f"transformers:{tmp_path}"]) == 0


@pytest.mark.parametrize(("name", "local"), [("gemma3_text", {"rope_local_base_freq": 300.0}), ("olmo3", {})])
def test_layers_with_a_window_are_checked_by_the_keys_of_transformers_4(name, local, tmp_path):
    """Which name no kinds of layers."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 8, "max_position_embeddings": 256}
    yarn = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}
    rope = {"rope_theta": 5e5, "rope_scaling": yarn} | local
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name} | sizes | rope))
    assert {kind for *_, kind in engines.of_transformers(tmp_path)} == {"full_attention", "sliding_attention"}
    assert main([f"transformers:{tmp_path}"]) == 0


def test_the_golden_vectors_are_those_that_the_command_writes(tmp_path):
    assert main([f"vectors:{tmp_path / 'vectors.json'}"]) == 0
    written = json.loads((tmp_path / "vectors.json").read_text())
    assert (tmp_path / "vectors.json").stat().st_size < 300_000
    committed = engines.GOLDEN
    assert [case["config"] for case in written["cases"]] == [case["config"] for case in committed["cases"]]
    for case, same in zip(written["cases"], committed["cases"], strict=True):
        for length, numbers in case["lengths"].items():
            for name, values in numbers.items():
                np.testing.assert_allclose(
                    values, same["lengths"][length][name], rtol=1e-9, atol=1.1e-4 * (name == "logits")
                )


@pytest.mark.parametrize("name", ["default", "dynamic", "yarn_mscale", "llama3_limits", "longrope"])
@torch.no_grad()
def test_the_tiny_model_computes_the_committed_logits_in_transformers(name, tmp_path):
    assert main([f"model:{tmp_path}", "--case", name]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 100_000

    case = next(case for case in reversed(engines.GOLDEN["cases"]) if case["name"] == name)
    for length, numbers in case["lengths"].items():
        text = "".join(tiny.CHARACTERS[token] for token in tiny.prompt(int(length)))
        ids = tokenizer(text, return_tensors="pt").input_ids
        logits = model(ids).logits[0, -1]
        np.testing.assert_allclose(logits, numbers["logits"], rtol=0, atol=2e-4)
        assert tokenizer.decode(ids[0]) == text
    assert main([f"transformers:{tmp_path}"]) == (name == "dynamic")  # which remembers the longest text


@pytest.fixture
def serve(tmp_path):
    """Start a server of completions with the tiny model, by transformers: one configuration to read, one to decode."""
    servers = []

    def start(prefill, decode, shift=0, says=lambda text, values: {"tokens": [*text], "token_logprobs": values}):
        models = []
        for number, rope in enumerate((prefill, decode)):
            tiny.write(tmp_path / str(number), config_of("yarn") | {"rope_parameters": rope})
            models.append(AutoModelForCausalLM.from_pretrained(tmp_path / str(number)).eval())

        @torch.no_grad()
        def complete(prompt, new):
            cache = DynamicCache()
            tokens = [tiny.CHARACTERS.index(character) for character in prompt]
            logits = models[0](torch.tensor([tokens]), past_key_values=cache).logits[0]
            for _ in range(new):
                tokens.append(int(logits[-1].argmax()))
                place = torch.tensor([[len(tokens) - 1 + shift]])
                step = models[1](torch.tensor([tokens[-1:]]), past_key_values=cache, position_ids=place)
                logits = torch.cat([logits, step.logits[0]])
            values = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].tolist()
            text = "".join(tiny.CHARACTERS[token] for token in tokens)
            return {"text": text, "logprobs": says(text, [None, *values])}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()
                choices = [complete(body["prompt"], body["max_tokens"])]
                self.wfile.write(json.dumps({"choices": choices}).encode())

            def log_message(self, *arguments):
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/v1/completions"

    yield start
    for server in servers:
        server.shutdown()


def config_of(name):
    return next(case[1] for case in reversed(engines.CASES) if case[0] == name)


def of_new_tokens(text, values):
    """What MLX says: no text, nothing of the prompt."""
    return {"content": [{"logprob": value} for value in values[-engines.NEW :]]}


YARN = config_of("yarn")["rope_parameters"]
PLAIN = {"rope_type": "default", "rope_theta": 5e4}
PREFILL = "the tiny model in prefill: "
DECODE = "the tiny model in decode: "


@pytest.mark.parametrize(
    ("prefill", "decode", "options", "text"),
    [
        (YARN, YARN, {}, "right"),
        (YARN, YARN, {"says": of_new_tokens}, "right"),
        (YARN, YARN, {"says": lambda text, values: None}, "right"),
        (PLAIN, PLAIN, {}, PREFILL + "the scaling is ignored"),
        (PLAIN, PLAIN, {"says": lambda text, values: None}, PREFILL + "the scaling is ignored"),
        (YARN | {"attention_factor": 1.0},) * 2 + ({}, PREFILL + "attention factor 1.0 instead of 1.139"),
        (YARN | {"beta_fast": 1.0, "beta_slow": 32.0},) * 2
        + ({"says": of_new_tokens}, PREFILL + "beta_fast and beta_slow are swapped"),
        (YARN, PLAIN, {}, DECODE + "the scaling is ignored"),
        (YARN, YARN, {"shift": 1}, DECODE + "positions are one too large"),
    ],
)
def test_a_server_is_checked_by_one_command(prefill, decode, options, text, serve, capsys):
    code = main([serve(prefill, decode, **options)])
    assert capsys.readouterr().out.splitlines()[-1].split(", or ")[0] == text
    assert code == (text != "right")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("http://127.0.0.1:9/v1/completions", "Connection refused"),
        ("no_such_module:rope", "No module named 'no_such_module'"),
        ("json:no_such_name", "has no attribute 'no_such_name'"),
        ("json:dumps", "the engine refuses all cases"),  # another signature
        ("transformers:NoSuchModel", "has no attribute NoSuchModel"),
        ("transformers:.", "No such file"),
        ("transformers:{folder}", "'max_position_embeddings' is missing"),
        ("model:{folder}/config.json/tiny", "Not a directory"),
    ],
)
def test_what_cannot_be_told_is_said(target, message, capsys, tmp_path, monkeypatch):
    """In one line, such as of a configuration without RoPE."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2", "n_positions": 64}')
    assert main([target.format(folder=tmp_path / "gpt2")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_kind_of_layer_without_settings_is_not_plain_rope():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32, "partial_rotary_factor": None}
    given = {"sliding_attention": {"rope_theta": 5.0}, "full_attention": None}

    assert settings({**sizes, "rope_parameters": given}, "sliding_attention")["rope_theta"] == 5.0
    for parameters in (given, {"sliding_attention": {"rope_theta": 5.0}}):
        with pytest.raises(KeyError, match="full_attention"):
            settings({**sizes, "rope_parameters": parameters}, "full_attention")
