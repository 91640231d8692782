"""Shared by all tests: every YAML under conf/pe is an encoding to test, with no list to keep."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; Triton reads it when PyTorch imports it

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from hypothesis import settings
from triton_interpreter import prepare_once

from conf.options import encoding_names, options_of
from conf.schema import GPTConfig
from model import position
from model.gpt import GPT
from model.position.layer import init_parameters, make_context
from model.position.network import at_scale, view
from ropewalk.app import cli
from ropewalk.app.explain import explain
from ropewalk.app.sweep import is_done
from ropewalk.report import page
from ropewalk.run.directory import RunDir, read_metrics

os.environ["OMP_NUM_THREADS"] = "1"  # in each process, also of those that tests start: the order of sums depends on it
torch.set_num_threads(1)
prepare_once()

settings.register_profile("ropewalk", deadline=None, derandomize=True)  # no test depends on time or luck
settings.load_profile("ropewalk")

REPORT = page.html
ROOT = Path(__file__).resolve().parents[1]
LONG_ROOMS = {"lab", "hf", "report"}  # of tests: kernels, transformers, pages in a browser
YAMLS = {name: options_of("pe", name) for name in encoding_names()}
PRESETS = [name for name in YAMLS if "pattern" in YAMLS[name] and name != "hybrid"]  # patterns, which it stands for
ENCODINGS = [name for name in YAMLS if name not in PRESETS]


def data_options(name: str) -> dict:
    """The options in conf/data/`name`.yaml, without its settings of other groups."""
    values = options_of("data", name)
    return values.get("data", values)


def pe_options(pe: str, **options) -> dict:
    """The options in conf/pe/`pe`.yaml, the parts of a pattern filled in, with some replaced."""
    own = YAMLS[pe]
    if "pattern" in options and "pattern" not in own:  # a pattern has nothing but its parts
        own = {"name": pe}
    merged = own | options
    for key, value in merged.items():
        if isinstance(value, dict) and "pe" in value:
            merged[key] = pe_options(**value)
    return merged


def build_pe(name: str, *, dim=64, n_head=4, n_kv_head=None, head_dim=16, train_len=32, **options):
    """The encoding `name` for a small network, with random parameters instead of their initial values."""
    shape = position.Shape(
        dim,
        n_head,
        n_kv_head or n_head,
        head_dim,
        train_len,
        n_layer=1,
    )
    (pe,) = position.build_encodings(pe_options(name, **options), shape)
    init_parameters(pe, torch.Generator().manual_seed(0))
    return randomise(pe)


def at_last_scale(pe):
    """`pe` at the last scale that an evaluation measures."""
    return view(pe, active_scale=pe.scales[-1])


def tokens(length, batch=2, vocab_size=50):
    """Texts of token ids, always the same: [batch, length]."""
    return torch.randint(
        vocab_size,
        (batch, length),
        generator=torch.Generator().manual_seed(2),
    )


def normal(*shapes, seed=0, dtype=torch.float32):
    """A tensor of each shape, always the same."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def variables(*shapes):
    """The same in float64, as `assert_same` wants its inputs."""
    return [x.requires_grad_() for x in normal(*shapes, dtype=torch.float64)]


def context(pe, length, newest=None):
    """Of the newest tokens of a text, or of all."""
    return make_context(pe, torch.arange(length), newest or length, length)


def attend(pe, q, k, v, x=None, ctx=None):
    """The heads [B, H, T, D] of one layer, whose input is x [B, T, dim]; q, k, v [B, H, T, D] are not rotated.

    The queries are the newest tokens.
    """
    ctx = ctx or context(pe, k.size(2), q.size(2))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    heads = ctx.attend(pe, q, k, v, pe.state(x), layer="layer", sinks=ctx.sinks)
    return heads.transpose(1, 2)


def read_at(net, scale):
    """The encodings of `net` at `scale`, as an evaluation passes them."""
    return at_scale(net.encodings, scale)


def build_gpt(name: str, *, vocab_size=50, train_len=32, seed=0, pe=None, checkpointing=False, **cfg) -> GPT:
    """A small network with the encoding `name`; `pe` replaces options of its YAML."""
    cfg = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "dim": 64} | cfg
    sizes = {"vocab_size": vocab_size, "train_len": train_len}
    options = pe_options(name, **(pe or {}))
    net = GPT(
        GPTConfig(**cfg),
        options,
        **sizes,
        seed=seed,
        checkpointing=checkpointing,
    )
    randomise(torch.nn.ModuleList(net.distinct_encodings))
    return net.eval()


def randomise(module):
    """Parameters that start at zero (CoPE's table) would hide errors: give them values."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.empty_like(p).normal_(0, 0.3, generator=generator))
    return module


def assert_same(out, expected, inputs, tol=1e-10):
    """Equal outputs, and equal gradients of all inputs for the same random weights of the outputs."""
    torch.testing.assert_close(out, expected, rtol=tol, atol=tol)
    weight = torch.randn(
        out.shape,
        dtype=out.dtype,
        generator=torch.Generator().manual_seed(9),
    )
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    gradients = torch.autograd.grad((out * weight).sum(), inputs, **options)
    expected_gradients = torch.autograd.grad(
        (expected * weight).sum(),
        inputs,
        **options,
    )
    torch.testing.assert_close(gradients, expected_gradients, rtol=tol, atol=tol)


def gradients_of(loss, net):
    """The gradient of each parameter, zero where the loss does not depend on it."""
    return torch.autograd.grad(
        loss,
        list(net.parameters()),
        allow_unused=True,
        materialize_grads=True,
    )


def layer_gradients(pe, q, k, v, x, weights, autocast=None):
    """The gradients of a layer's inputs q, k, v and of the parameters of its encoding, those that there are.

    `weights` are those of the outputs in what is differentiated; `autocast` is a dtype.
    """
    inputs = {"q": q, "k": k, "v": v, **dict(pe.named_parameters())}
    for tensor in inputs.values():
        tensor.requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        out = attend(pe, q, k, v, x)
    (out * weights).sum().backward()
    return {name: tensor.grad for name, tensor in inputs.items() if tensor.grad is not None}


def pytest_collection_modifyitems(items):
    """Mark what trains a run, or needs a kernel, transformers or a browser: `make test-fast` leaves it out."""
    for item in items:
        rooms = item.path.parts[len(ROOT.parts) :]
        if "train" in item.fixturenames or LONG_ROOMS.intersection(rooms):
            item.add_marker("long")


@pytest.fixture(params=ENCODINGS)
def encoding(request) -> str:
    """Each encoding that has a YAML."""
    return request.param


class Outcome(NamedTuple):
    """What a command line did."""

    code: int
    out: str
    err: str


def outcome_of(module: str, capfd, code: int | None = 0) -> Outcome:
    """What running a program did, until it exits with this code; None: with any."""
    ended = 0
    try:
        cli.run(module)
    except SystemExit as stop:
        ended = stop.code
    outcome = Outcome(ended, *capfd.readouterr())
    assert code in (ended, None), outcome.err
    return outcome


@pytest.fixture(autouse=True)
def _denormals():
    """train.py flushes denormals to zero in its process, which is here that of the tests."""
    yield
    torch.set_flush_denormal(False)


SMALL = [
    "data=text", "data.val_fraction=0.3", "train_len=16", "model.n_layer=1", "model.dim=32", "model.n_head=2",
    "optim.warmup_steps=2", "eval.lengths=[0.5,1,2,4,8]", "eval.sequences=2",
    "eval.far_copies=false", "eval.by_position=false", "trainer.accelerator=cpu", "trainer.max_steps=6",
    "trainer.batch_size=4", "trainer.log_every=2", "trainer.val_every=3", "trainer.val_tokens=64",
    "trainer.checkpoint_every=2", "trainer.precision=32",  # auto may be bf16-mixed; tolerances are those of fp32
]  # fmt: skip


def write_knots(folder: Path) -> Path:
    """A small corpus in the new `folder`."""
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"{i} knots in a rope; " * 40)
    return folder


def train_here(runs) -> list[str]:
    """As `trials.train_all`, but in this process, which has imported what a run needs."""
    from train import train

    failed = []
    for cfg in runs:
        if not is_done(RunDir(cfg)):
            try:
                train(cfg)
            except ValueError as error:
                print(f"{cfg.name}: {explain(error)}")
                failed.append(cfg.name)
    return failed


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """`train("pe=rope", ...)` runs the command line of train.py on a small corpus and model, within this process.

    It has to end with the exit code `code`, or with any for None.
    """
    monkeypatch.setattr(page, "html", lambda *_: "")  # it takes as long as all else: REPORT, where it matters
    corpus = write_knots(tmp_path / "corpus")
    own = [
        f"runs_dir={tmp_path / 'runs'}",
        f"data.files={corpus}/*.txt",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]

    def complete(*arguments: str) -> list[str]:
        given = {argument.split("=")[0] for argument in arguments}
        decides = {"init_from": "model.", "data": "data."}
        decided = tuple(decides[key] for key in decides.keys() & given)
        defaults = [option for option in own + SMALL if not option.startswith(decided)]
        defaults = [option for option in defaults if option.split("=")[0] not in given]
        if "-m" in given and "hydra/launcher" not in given:
            defaults.append("hydra/launcher=basic")  # in this process, which has imported what a run needs
        return sorted([*defaults, *arguments], key=lambda argument: not argument.startswith("-"))  # flags come first

    def run(*arguments: str, code: int | None = 0) -> Outcome:
        monkeypatch.setattr("sys.argv", ["train.py", *complete(*arguments)])
        monkeypatch.setattr("__main__.__spec__", None)  # `python -m pytest` has one, train.py has none
        return outcome_of("train", capfd, code)

    run.runs = tmp_path / "runs"
    run.corpus = corpus
    run.complete = complete  # the command line of `run` for another process
    return run


@pytest.fixture
def trained(train):
    """`trained("pe=rope", ..., name="mine")` is the folder of a run that has ended well."""

    def run(*options: str, name: str = "run") -> Path:
        train(*options, f"name={name}")
        return train.runs / name

    return run


@pytest.fixture(scope="session")
def finished() -> dict[tuple[str, ...], Path]:
    return {}


@pytest.fixture
def straight(trained, finished, tmp_path_factory):
    """`straight("pe=rope", ...)` is the run of these options from start to end, made only once."""

    def run(*options: str) -> Path:
        if options not in finished:
            folder = tmp_path_factory.mktemp("straight")
            finished[options] = trained(*options, name="straight").rename(folder / "run")
        return finished[options]

    return run


@pytest.fixture
def script(monkeypatch, capfd):
    """`script(program, "run=...", ...)` runs the command line of a module in scripts/, within this process.

    It has to end with the exit code `code`, or with any for None.
    """

    def run(program, *arguments, code: int | None = 0) -> Outcome:
        monkeypatch.setattr("sys.argv", [f"{program.__name__.rpartition('.')[2]}.py", *map(str, arguments)])
        capfd.readouterr()
        return outcome_of(program.__name__, capfd, code)

    return run


def edit(path: Path, section: str | None = None, **changes) -> None:
    """Change values in a JSON or YAML file, as anybody can: without its checksum. `...` removes one."""
    is_json = path.suffix == ".json"
    text = path.read_text()
    values = json.loads(text) if is_json else yaml.safe_load(text)
    values.pop("checksum", None)
    part = values[section] if section else values
    part.update(changes)
    for key in [key for key, value in changes.items() if value is ...]:
        del part[key]
    path.write_text(json.dumps(values) if is_json else yaml.safe_dump(values))


def snapshot(folder: Path) -> dict[Path, bytes]:
    """All files below `folder`."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl, without what a clock measured."""
    rows = [*read_metrics(run_dir)]
    for row in rows:
        del row["seconds"], row["tokens_per_s"]
    return rows
