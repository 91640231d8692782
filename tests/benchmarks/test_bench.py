"""Every mode of scripts/bench.py at a small size, with what must hold of its numbers."""

import json
import runpy
import shutil
from functools import partial

import nanogpt_standin
import pytest
import torch
from conftest import ROOT

import data as data_sources
from benchmarks import attention, data, peers, startup, training
from benchmarks.measure import in_fresh_process, take_turns
from model.position.cope import contextual_positions

SMALL = {
    "model.n_layer": "2",
    "model.dim": "32",
    "train_len": "16",
    "trainer.batch_size": "4",
    "trainer.accelerator": "cpu",
    "optim.warmup_steps": "2",
}


@pytest.fixture
def bench(monkeypatch, capfd):
    """`bench("attention", ...)`: exit code, output and errors of the command line, within this process."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["scripts/bench.py", *arguments])
        code = 0
        try:
            runpy.run_path(str(ROOT / "scripts" / "bench.py"), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def small(tmp_path):
    """Options of train.py for a small model on a small text."""
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"{i} knots in a rope; " * 40)
    own = {"data": "text", "data.files": f"{tmp_path}/*.txt", "data.cache_dir": f"{tmp_path}/cache"}
    return SMALL | own | {"data.val_fraction": "0.3"}


def test_attention(bench, tmp_path):
    out = tmp_path / "out.json"
    sizes = (
        "lengths=32,64",
        "n_head=2",
        "head_dim=8",
        "definition=32",
        "rounds=2",
        "rotary=false",
        "device=cpu",
        "memory=false",
    )
    code, said, _ = bench("attention", "pe=rope,cope", *sizes, f"out={out}")
    assert code == 0
    found = json.loads(out.read_text())
    assert found["environment"]["command"].split()[1:3] == ["attention", "pe=rope,cope"]
    assert found["environment"]["packages"]["torch"] in said
    tables = found["tables"]
    assert len(tables) == 2  # forward, and with backward
    rows = {row[""]: row for row in tables["Forward: time as a ratio to SDPA, by length"]}
    assert list(rows) == ["SDPA, ms", "rope", "cope", "cope, gates that never clamp", "cope, by its definition"]
    assert rows["cope, by its definition"]["64"] is None  # longer than asked for
    measured = {(m["encoding"], m["length"], m["pass"]): m for m in found["measurements"]}
    for name in ("rope", "cope"):
        m = measured[name, 32, "forward"]
        assert rows[name]["32"] == m["wall_ratio"]["median"]
        assert m["wall_ratio"]["low"] <= m["wall_ratio"]["median"] <= m["wall_ratio"]["high"]
        assert f"| {name} | {rows[name]['32']:#.3g} |" in said


def case(length, variant="", **sizes):
    request = attention.read({"pe": "cope", "device": "cpu"} | {k: str(v) for k, v in sizes.items()})
    return attention.Case(request.args, "cpu", length, request.encodings["cope"], variant)


def test_attention_compares_the_same_thing():
    own, definition = case(200), case(200, attention.DEFINITION)
    torch.testing.assert_close(own.forward(), definition.forward(), rtol=1e-4, atol=1e-5)
    names = ("q", "k", "v", "table")
    for name, a, b in zip(names, own.both(), definition.both(), strict=True):
        assert (a - b).norm() < 1e-4 * b.norm() + 1e-6, name


@pytest.mark.parametrize(("variant", "clamped"), [("", True), (attention.SPARSE, False)])
def test_gates(variant, clamped):
    """Dense gates are a half on average; sparse ones do not reach the last position in the longest text."""
    length = 4096
    it = case(length, variant, n_head=1)
    logits = it.q[:, :, -1:] @ it.k.mT / 8
    last = contextual_positions(logits.detach(), torch.ones(1, length, dtype=torch.bool))[0, 0, 0, 0]
    assert (last > 63) == clamped
    if clamped:
        assert last / length == pytest.approx(0.5, abs=0.05)


def test_memory_of_the_definition_is_that_of_its_scores():
    length, heads = 2048, 1
    request = attention.read({"pe": "cope", "n_head": str(heads), "device": "cpu"})
    options = request.encodings["cope"]
    held = partial(in_fresh_process, attention.held, request.args, "cpu", length)
    scores = 4 * heads * length**2
    assert held(options, attention.DEFINITION, "both") > 5 * scores
    assert held(options, "", "both") < 3 * scores
    assert held(None, "", "both") < scores


def test_complex_and_real_rotations_are_listed():
    args = attention.read({"pe": "rope", "lengths": "16", "n_head": "1", "head_dim": "8", "rounds": "1"}).args
    calls = []
    compiled = torch.compile
    try:
        torch.compile = lambda function, **_: calls.append(function) or function
        rows = attention.rotations(args, "cpu")
    finally:
        torch.compile = compiled
    assert [row[""] for row in rows] == ["real, half", "real, interleaved", "complex, interleaved"]
    assert all(row["eager"] > 0 and row["compiled"] > 0 for row in rows)
    assert len(calls) == 3


def test_both_loops_train_the_same_model_on_the_same_batches(small):
    request = training.read(small | {"pe": "cope", "rounds": "3", "steps": "2", "threads": "1"})
    cfg = request.configs["cope"]
    source = data_sources.build(cfg.data)
    source.prepare()
    machine = training.machine_of(cfg)
    contenders = {name: partial(getattr(training, name), cfg, source, machine) for name in ("bare", "trained")}
    courses = take_turns(contenders, rounds=3, threads=1)
    facts = {name: [piece.facts for piece in course.pieces] for name, course in courses.items()}
    assert [f["weights"] for f in facts["bare"]] == [f["weights"] for f in facts["trained"]]
    assert len({f["weights"] for f in facts["bare"]}) == 3  # and they move
    losses = [[f["loss"] for f in each] for each in facts.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    training.check_same_work(courses["trained"], courses["bare"])
    courses["trained"].pieces[1].facts["loss"] *= 1.01
    with pytest.raises(ValueError, match="same work"):
        training.check_same_work(courses["trained"], courses["bare"])


def test_training(small):
    request = training.read(small | {"pe": "rope", "rounds": "2", "steps": "2", "threads": "1"})
    outcome = training.measure(request)
    (row,), (measured,) = outcome.tables[0].rows, outcome.measurements
    seconds = {who: sum(p["wall"] for p in measured[who]["pieces"]) for who in ("bare", "train.py")}
    mean = seconds["bare"] / seconds["train.py"]
    low, high = map(float, row["range"].split(" to "))
    assert low - 0.01 <= mean <= high + 0.01  # the ratio of sums lies within those of the pairs
    flops = 6 * (2 * (3 + 1 + 8) * 32**2 + 257 * 32) + 6 * 2 * 32 * 16  # per token, counted by hand
    reached = row["train.py, tokens/s"] * flops / measured["peak_flops"]
    assert row["of the peak FLOP/s, %"] == pytest.approx(100 * reached)
    assert 0 < row["waiting for data, %"] < 100


def test_peers(small, tmp_path):
    checkout = tmp_path / "nanoGPT"
    checkout.mkdir()
    shutil.copy(nanogpt_standin.SOURCE, checkout / "model.py")
    own = {"nanogpt": str(checkout), "transformers": "true", "compiled": "false", "rounds": "2", "steps": "2"}
    request = peers.read(small | own | {"threads": "1", "optim.weight_decay": "0"})
    rows = {row[""]: row for row in peers.measure(request).tables[0].rows}
    assert list(rows) == ["train.py", "nanoGPT", "transformers"]
    assert rows["train.py"]["train.py / it"] == 1
    cfg = request.configs["learned"]
    net = training.network(cfg, data_sources.build(cfg.data))
    x, y = torch.randint(net.vocab_size, (2, 3, 16))
    first = net.loss(x, y).item()
    assert peers.nanogpt_model(str(checkout), net)(x, y)[1].item() == pytest.approx(first, rel=1e-6)
    logits = peers.transformers_model(net)(x).logits
    torch.testing.assert_close(logits, net(x), rtol=1e-4, atol=1e-5)


def test_data(small):
    request = data.read(
        small | {"rounds": "1", "steps": "1", "megabytes": "0.005", "sampling": "false", "clock": "cpu"}
    )
    row = data.measure(request).tables[0].rows[0]
    quotient = row["MB/s"] / row["tiktoken alone, 1 thread, MB/s"]
    assert row["its MB/s / tiktoken's"] == pytest.approx(quotient)
    assert quotient < 1  # it does the same and more


def test_sampling(small):
    request = data.read(small | {"rounds": "2", "steps": "1", "batches": "3", "threads": "1"})
    assert set(request.sampled) == {"text", "flip_flop", "selective_copy", "counting", "recall"}
    row, _ = data.sampling(request, "text", request.cfg)
    assert row["batch / step, %"] == pytest.approx(100 * row["batch, ms"] / row["step, ms"])


def test_first_documents():
    class Source:
        def documents(self, wanted):
            return iter([b"aa", b"", b"aa", b"bbbb", b"c"])

    assert data.first(Source(), 100) == [b"aa", b"bbbb", b"c"]
    assert data.first(Source(), 3) == [b"aa", b"c"]


def test_imports_by_package():
    report = """import time: self [us] | cumulative | imported package
import time:      1000 |       1000 |   torch._C
import time:       500 |       1500 | torch
import time:      2500 |       2500 |     numpy.core
something else
"""
    assert startup.by_package(report) == {"numpy": 0.0025, "torch": 0.0015}


def test_startup(small):
    overrides = [f"{key}={value}" for key, value in small.items()]
    assert startup.first_step(overrides, 1) > startup.seconds_of("import torch", 1)
    packages = startup.imports(overrides, 1)
    assert packages["torch"] > 0
    # torchmetrics, which Lightning imports, imports transformers where it is installed
    assert set(startup.HEAVY) & set(packages) <= {"transformers"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no such mode"),
        (("atention",), "did you mean attention?"),
        (("attention", "length=3"), "did you mean lengths?"),
        (("attention", "lengths=3,x"), "whole numbers"),
        (("attention", "lengths=1"), "at least 2 tokens"),
        (("attention", "pe=rop"), "did you mean rope?"),
        (("attention", "pe=rope", "head_dim=3"), "even number of channels"),
        (("attention", "pe=rope", "out=no/such/out.json"), "there is no such directory"),
        (("training", "rounds=0"), "rounds='0'"),
        (("training", "trainer.log_every=3"), "set by the benchmark"),
        (("training", "trainer.batch=3"), "trainer.batch"),
        (("data", "data=recall"), "no text to prepare"),
        (("startup", "name=x"), "set by the benchmark"),
        (("peers",), "name a peer"),
        (("peers", "nanogpt=no/such/folder"), "no checkout of nanoGPT"),
        (("peers", "transformers=true", "model.norm=rmsnorm"), "model.norm"),
    ],
)
def test_mistakes_are_one_message(bench, arguments, message):
    code, _, err = bench(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
