"""The self-test of an export: what it says of transformers and of a server, right and with a planted fault each."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import transformers
from conftest import build_gpt, pe_options
from hf_models import VOCAB, edit, exported

from scripts import selftest

TRAIN_LEN, BASE = 64, 5e5
FAULTS = {
    "rope_scaling is ignored": ("yarn", dict(rope_parameters={"rope_type": "default", "rope_theta": BASE})),
    "rope_theta is lost": ("yarn", dict(rope_theta=1e4)),
    "the sliding window is ignored": ("rope", dict(sliding_window=None, layer_types=["full_attention"] * 2)),
    "no fault that selftest.json knows explains it": ("yarn", dict(rms_norm_eps=1.0)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Exports of networks with random weights: one scaled and with a base of its own, one with a window."""
    folders = {}
    for name, options in (("yarn", {"base": BASE, "scale": 4.0}), ("rope", {"base": BASE, "window": 40})):
        cfg = {"norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True}
        net = build_gpt(name, vocab_size=VOCAB, train_len=TRAIN_LEN, pe=options, **cfg)
        with torch.no_grad():
            for p in net.parameters():
                p.normal_(1.0 if p.ndim == 1 else 0.0, 0.2, generator=torch.Generator().manual_seed(p.numel()))
        folders[name] = tmp_path_factory.mktemp(name) / "out"
        exported(net, pe_options(name, **options), folders[name], scale=net.scales[-1])
    return folders


@pytest.fixture
def faulty(folders):
    """`faulty(fault)` is an export whose config.json a program would read so after this fault, until the test ends."""
    before = {folder: (folder / "config.json").read_text() for folder in folders.values()}

    def change(fault):
        name, changes = FAULTS[fault]
        folder = folders[name]
        config = json.loads(before[folder])
        if fault == "rope_theta is lost":
            changes = changes | {"rope_parameters": config["rope_parameters"] | changes}
        edit(folder, rope_scaling=None, **changes)
        return folder

    yield change
    for folder, text in before.items():
        (folder / "config.json").write_text(text)


def test_transformers_reads_an_export_as_it_was_trained(folders, capsys):
    assert selftest.main([str(folders["yarn"])]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["64 tokens (as trained): equal", "256 tokens (at the scaled length): equal"]
    assert said[2].startswith("equal: ")
    assert selftest.main([str(folders["rope"]), "float32"]) == 0
    assert "72 tokens (across a window's edge): equal" in capsys.readouterr().out


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(faulty, fault, capsys):
    assert selftest.main([str(faulty(fault))]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("different: ")] == [f"different: {fault}"]
    if fault == "the sliding window is ignored":
        # The first token whose window leaves out an earlier one.
        assert said[0].startswith("64 tokens (as trained): differs from token 42 on")


class Server(BaseHTTPRequestHandler):
    """Answers as a server of completions that computes by transformers; `folder` None: without log-probabilities."""

    folder: str | None = None

    def do_GET(self):
        self.answer({"data": [{"id": "exported"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/completion":
            self.answer(self.as_llama_cpp(body))
            return
        assert (body["model"], body["echo"]) == ("exported", True)
        values = None
        if self.folder:
            tokens = body["prompt"]
            computed = selftest.by_transformers(self.folder, tokens, len(tokens) - 1, "float32")
            values = {"token_logprobs": [None, *computed, -1.0]}
        self.answer({"choices": [{"text": "", "logprobs": values}]})

    def as_llama_cpp(self, body):
        """What llama.cpp's server answers: the tokens that may follow the prompt, the most probable one first."""
        assert (body["n_predict"], body["n_probs"] >= VOCAB) == (1, True)
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype="float32")
        with torch.inference_mode():
            logprobs = model(torch.tensor([body["prompt"]])).logits[0, -1].log_softmax(-1)
        order = logprobs.argsort(descending=True).tolist()
        choices = [{"id": token, "logprob": float(logprobs[token])} for token in order]
        return {"content": "", "completion_probabilities": [choices[0] | {"top_logprobs": choices}]}

    def answer(self, values):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(values).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/completions"
    server.shutdown()
    server.server_close()


def test_a_server_is_checked_by_what_it_returns_for_the_prompt(folders, faulty, url, monkeypatch, capsys):
    folder = str(folders["yarn"])
    monkeypatch.setattr(Server, "folder", folder)
    assert selftest.main([folder, url]) == 0
    faulty("rope_scaling is ignored")
    assert selftest.main([folder, url]) == 1
    assert "different: rope_scaling is ignored" in capsys.readouterr().out
    monkeypatch.setattr(Server, "folder", None)
    assert selftest.main([folder, url, "bfloat16"]) == 2
    assert "returned 0 log-probabilities for a prompt of 64 tokens" in capsys.readouterr().err
    assert selftest.main([f"{folder}/none"]) == 2
    assert selftest.main([]) == 2


def test_llama_cpp_is_checked_by_the_token_that_follows(folders, faulty, url, monkeypatch, capsys):
    folder = str(folders["yarn"])
    completion = url.replace("/v1/completions", "/completion")
    monkeypatch.setattr(Server, "folder", folder)
    assert selftest.main([folder, completion]) == 0
    faulty("rope_theta is lost")
    assert selftest.main([folder, completion]) == 1
    assert "different: rope_theta is lost" in capsys.readouterr().out
