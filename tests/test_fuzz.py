"""Any file of a finished run, damaged in any way, any option or argument of any value: a clear error or a result.

Nothing outside of the run is read or written through it, and no command passes over what it needs.
"""

import functools
import gzip
import json
import operator
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Annotated

import pytest
import torch
import yaml
from conftest import REPORT, snapshot
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

import ropewalk
import train as program
from conf.schema import Config
from ropewalk.app import ending
from ropewalk.app.cli import CONF_DIR
from ropewalk.report import frame, page
from ropewalk.training.hardware import check_memory
from ropewalk.training.stop import STOPPED, Stop
from scripts import evaluate, export, report, sample

# What each command needs of a run: without it there is no result.
NEEDS = {
    "train": {"config.yaml", "training.json"},  # it only prints
    "longer": {"config.yaml", "training.json", "environment.json", "data.json", "metrics.jsonl"},
    "evaluate": {"config.yaml", "data.json", "environment.json", "model.json", "model.safetensors"},
    "sample": {"config.yaml", "data.json", "model.json", "model.safetensors"},
    "export": {"config.yaml", "model.json", "model.safetensors"},
    "report": set(),
}
# Files whose numbers are results: whatever else they say is told from what was written.
FIGURES = ("training.json", "metrics.jsonl", "model.json", "model.safetensors")
VALUES = [..., None, True, -1, 0, 1e308, "", "x", "[/b]", "\x1b[31m", [], [[]], {}, {"a": 1}, 10**30]


def fuzz(cases):
    """A test of `cases` random generators, always the same ones; ROPEWALK_FUZZ=500 tries so many."""
    number = int(os.environ.get("ROPEWALK_FUZZ", cases))
    own = settings(max_examples=number, suppress_health_check=list(HealthCheck))
    return lambda test: own(given(rng=st.randoms(use_true_random=True))(test))


def leaves(value, at=()):
    """Paths to everything inside nested dicts and lists."""
    children = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    for key, child in children:
        yield (*at, key)
        yield from leaves(child, (*at, key))


def inside(value, path):
    """What lies at a path of `leaves`."""
    return functools.reduce(operator.getitem, path, value)


def retype(content, rng):
    """Another value, or none, somewhere in a JSON or YAML file or in a line of metrics.jsonl."""
    parts = [content]
    if content.startswith(b'{"'):  # a row a line
        parts = content.splitlines(keepends=True)
    number = rng.randrange(len(parts))
    values = yaml.safe_load(parts[number])
    *above, key = rng.choice(sorted(leaves(values), key=repr))
    owner = inside(values, above)
    owner[key] = rng.choice(VALUES)
    if owner[key] is ...:
        del owner[key]
    parts[number] = json.dumps(values).encode() + b"\n"  # which is YAML, too
    return b"".join(parts)


def truncate(content, rng):
    return content[: rng.randrange(len(content))]


def flip(content, rng):
    damaged = bytearray(content)
    damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def digit(content, rng):
    """Another digit somewhere in a text."""
    damaged = bytearray(content)
    place = rng.choice([i for i, byte in enumerate(content) if byte in b"0123456789"])
    damaged[place] = rng.choice(b"0123456789".replace(content[place : place + 1], b""))
    return bytes(damaged)


def mutate(file, rng, outside):
    """Damage one file of a run; returns how."""
    content = file.read_bytes()
    of_bytes = [truncate, flip]
    if file.suffix in (".json", ".jsonl", ".yaml"):
        of_bytes += [digit, retype]
    how = rng.choice([*of_bytes, "delete", "pipe", "folder", "link"])
    file.unlink()
    if how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "link":
        (outside / file.name).write_bytes(content)
        file.symlink_to(outside / file.name)
    elif how != "delete":
        file.write_bytes(how(content, rng))
    return how


SHORT = ("name=whole", "eval.lengths=[1,2]", "eval.variants=[]", "eval.sequences=2")


@pytest.fixture
def commands(train, script, monkeypatch):
    """Each command on the run "whole"; beside it lies another one, "beside"."""
    monkeypatch.setattr(ending, "page", page)  # it reads results at the end of a run
    for options in (["name=beside", "seed=1"], ["name=whole"]):
        assert train(*SHORT[1:], *options, "trainer.max_steps=2").code == 0
    folder = train.runs.parent
    run = f"run={train.runs / 'whole'}"
    return {
        "train": partial(train, *SHORT, "trainer.max_steps=2"),
        "longer": partial(train, *SHORT, "trainer.max_steps=3"),
        "evaluate": partial(script, evaluate, run, f"cache_dir={folder / 'cache'}"),
        "sample": partial(script, sample, run, "prompt=a", "max_new_tokens=1"),
        "export": partial(script, export, run, f"out={folder / 'out'}"),
        "report": partial(script, report, f"folders=[{train.runs}]", "format=md", f"out={folder / 'page'}"),
    }


@pytest.fixture
def kept(commands, train, tmp_path):
    """A copy of the run, as it was before any damage."""
    return shutil.copytree(train.runs / "whole", tmp_path / "kept")


@fuzz(25)
def test_mutations(commands, kept, train, tmp_path, rng):
    """One file of a run damaged: whoever needs it says so, and nobody else is disturbed."""
    whole, outside, out = train.runs / "whole", tmp_path / "outside", tmp_path / "out"
    for old in (whole, outside, out):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(kept, whole)
    outside.mkdir()
    (outside / "mine").write_text("untouched")
    names = [str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file() and path.suffix != ".html"]
    name = rng.choice(sorted(names))
    command = rng.choice(sorted(commands))
    how = mutate(whole / name, rng, outside)
    note(f"{command} after {how} of {name}")
    before = snapshot(outside)

    outcome = commands[command]()  # an exception would be a traceback

    assert outcome.code in (0, 2)
    assert "Traceback" not in outcome.out + outcome.err
    assert snapshot(outside) == before

    is_needed = name in NEEDS[command]
    if command == "report":  # on the other run, whatever this one holds
        assert outcome.code == 0
        assert "beside" in (tmp_path / "page").read_text()
    elif outcome.code == 2:
        assert "error:" in outcome.err
    elif how in (flip, digit):
        assert not (is_needed and name in FIGURES)
    elif how != retype and (how, name) != ("delete", "training.json"):
        # Deleting the latter makes the run unfinished.
        assert not is_needed


@pytest.fixture
def reported(straight, tmp_path, monkeypatch):
    """A folder of runs of ours, and the rows of somebody else's."""
    monkeypatch.setattr(page, "html", REPORT)
    shutil.copytree(straight("pe=rope"), tmp_path / "runs" / "mine")
    frame.save(tmp_path / "theirs.jsonl.gz", [straight("pe=rope", "seed=1")])
    return tmp_path / "runs", gzip.decompress((tmp_path / "theirs.jsonl.gz").read_bytes())


@fuzz(30)
def test_archives(reported, script, tmp_path, rng):
    """Whatever somebody else's file of results holds, there is a report on the other runs."""
    runs, rows = reported
    damage = rng.choice([retype, retype, retype, digit, flip, truncate])
    kind = rng.choice(["html", "csv", "md"])
    note(f"{kind} after {damage}")
    theirs = tmp_path / "theirs.jsonl.gz"
    theirs.write_bytes(gzip.compress(damage(rows, rng)))
    outcome = script(report, f"folders=[{runs},{theirs}]", f"format={kind}", f"out={tmp_path / 'page'}")
    assert outcome.code == 0
    assert "Traceback" not in outcome.err
    assert "rope" in (tmp_path / "page").read_text()


# Values as they stand on a command line: of every type, beyond every limit, and what a parser, a path or a terminal may
# take for something else.
WORDS = """
null true -1 0 0.5 1 3 512 2147483648 1e308 -1e-320 nan inf x auto 1_0 0x10 '1' [] {} [1,1] [[1]] {a:1} [{}]
??? ${seed} ${nowhere} ${pe} $x 1,2 = ' %s {0} é [/b] range(1,3) rope hf: train:0 train:99999999
../up a/b . PIPE /dev/null /dev/zero /proc/self/mem
"""
ODD = [*WORDS.split(), "", "\0", "\x1b[31m", "x" * 300, "[" * 99]
RARE = "+{key}={value} ++{key}={value} ~{key} {key} {key}.{word}={value} {key}x={value} {section}={value}"
FORMS = ["{key}={value}"] * 12 + RARE.split()


def options_in(schema, prefix=""):
    """(key, values at its limits and its choices) of every option in a schema."""
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from options_in(field.annotation, f"{prefix}{name}.")
            continue
        rules = TypeAdapter(Annotated[(field.annotation, field)]).json_schema()
        values = []
        for path in leaves(rules):
            rule = inside(rules, path)
            if "imum" in str(path[-1]):  # minimum, exclusiveMaximum, ...
                values += [rule - 1, rule, rule + 1]
            elif path[-1] == "const" or "enum" in path[:-1]:
                values.append(rule)
        yield prefix + name, [str(value) for value in values]


def choices(group, text):
    """The YAML files of a group that hold `text`, with their keys."""
    values = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CONF_DIR.glob(f"{group}/*.yaml"))}
    return {name: list(options) for name, options in values.items() if text in str(options.get("_target_"))}


PLAIN = [(key, limits) for key, limits in options_in(Config) if key not in ("pe", "data")]
ENCODINGS = choices("pe", "model.position")
SOURCES = choices("data", "data.tasks") | choices("data", "data.text.TextFiles")


class Soon(Stop):
    """Tells a run to stop after its second step."""

    def __bool__(self):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 2:
            self.reason = "SIGTERM"
        return super().__bool__()


def affordable(cfg, hardware, **sizes):
    """`check_memory`, and an error if going on would take more than a moment."""
    memory = check_memory(cfg, hardware, **sizes)
    evaluated = cfg.eval.sequences * max(cfg.lengths)
    if max(cfg.step_tokens, cfg.trainer.val_tokens, evaluated) > 10_000 or sizes["parameters"] > 2_000_000:
        raise ValueError("legal, but too large for a test")
    if hardware.compile or any((cfg.logger.tensorboard, cfg.logger.trackio, cfg.logger.wandb)):
        raise ValueError("legal, but too slow for a test")
    return memory


def one_process(trainer, hardware, launch=program.distributed.launch):
    """`launch`, and an error if it would start other processes."""
    if trainer.devices > 1 or trainer.strategy == "fsdp":
        raise ValueError("legal, but of more than one process")
    return launch(trainer, hardware)


@pytest.fixture
def quick(train, tmp_path, monkeypatch):
    """`train`, so that no option makes it take more than a moment; with a pipe that nobody writes to."""
    monkeypatch.setattr(program, "Stop", Soon)
    monkeypatch.setattr(program, "check_memory", affordable)
    monkeypatch.setattr(program.distributed, "launch", one_process)
    os.mkfifo(tmp_path / "pipe.tiktoken")
    return train


def drawn_arguments(rng, pipe):
    """A command line with one or two options of odd values, or written in odd ways."""
    pe = rng.choice([*ENCODINGS])
    source = rng.choice(["text", "text", *SOURCES])
    of_groups = [f"pe.{key}" for key in ENCODINGS[pe]] + [f"data.{key}" for key in SOURCES[source]]
    options = rng.choice([PLAIN, [(key, []) for key in of_groups]])
    arguments = [f"pe={pe}"] + [f"data={source}"] * (source != "text")
    for _ in range(rng.randint(1, 2)):
        key, limits = rng.choice(options)
        value = rng.choice(ODD + limits * 5).replace("PIPE", str(pipe))
        word = rng.choice(PLAIN)[0].rpartition(".")[2]
        section = key.partition(".")[0]
        arguments.append(rng.choice(FORMS).format(key=key, value=value, word=word, section=section))
    return arguments


@fuzz(15)
def test_any_option_of_any_value_is_an_error_or_a_run(quick, tmp_path, monkeypatch, rng):
    """Each key of the schema, and of the classes that conf/pe and conf/data name, with values of every kind."""
    here = tmp_path / "here"
    for old in (quick.runs, here):
        shutil.rmtree(old, ignore_errors=True)
    here.mkdir()
    monkeypatch.chdir(here)
    arguments = drawn_arguments(rng, tmp_path / "pipe.tiktoken")
    note(arguments)

    outcome = quick(*arguments)  # an exception would be a traceback

    assert outcome.code in (0, 2, STOPPED)
    assert "Traceback" not in outcome.out + outcome.err
    assert "\x1b" not in outcome.out + outcome.err
    assert (outcome.code == 2) == ("error: " in outcome.err)
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", "cache", "corpus", "here", "pipe.tiktoken"}

    if not any("runs_dir" in argument or "cache_dir" in argument for argument in arguments):
        assert not list(here.iterdir())


OTHERS = [None, True, -1, 0, 0.5, 3, 2**70, float("nan"), float("inf"), "", "x", "rope", "../up", "\0", b"x"]
OTHERS += [[], [1], {}, {"name": "rope"}, Path("/dev/null"), object(), torch.zeros(2), torch.device("meta")]


def odd(rng, *right):
    """One of these, or rarely anything."""
    return rng.choice(right if rng.random() < 0.7 else OTHERS)


def odd_tensor(rng, *sizes):
    """A tensor of these sizes, of which some may be others, of any dtype, on a device or another."""
    sizes = [rng.choice([size] * 20 + [0, 1, size + 1]) for size in sizes]
    sizes += [3] * (rng.random() < 0.03)
    dtype = rng.choice([torch.float32] * 20 + [torch.int64, torch.bfloat16, torch.complex64])
    return torch.zeros(sizes, device=rng.choice(["cpu"] * 20 + ["meta"])).to(dtype)


def attend(rng):
    """Build an encoding, and let it attend."""
    name = rng.choice(ropewalk.encodings())
    options = rng.choice([{}, {"scale": odd(rng, 2.0)}, {"base": odd(rng, 500.0)}, {"window": odd(rng, 4)}])
    sizes = {"n_head": odd(rng, 2), "head_dim": odd(rng, 8), "n_kv_head": odd(rng, None, 1), "dim": odd(rng, None)}
    pe = ropewalk.encoding(name, **sizes, train_len=odd(rng, 16), seed=odd(rng, 0), **options)
    shapes = [(1, heads, 6, pe.head_dim) for heads in (pe.n_head, pe.n_kv_head, pe.n_kv_head)]
    q, k, v = (odd_tensor(rng, *shape) for shape in shapes)
    x = rng.choice([None, odd_tensor(rng, 1, 6, 16)])
    assert ropewalk.attend(pe, q, k, v, x, embedded=odd(rng, True)).shape == shapes[0]


@fuzz(40)
def test_the_python_interface(straight, rng):
    """Only ValueError or OSError, as its docstrings say; TypeError is Python's for what is no argument at all."""
    run = straight("pe=rope")
    model = ropewalk.load(run)
    calls = {  # what is right for the first argument, and for those with a name
        ropewalk.load: (run, {"step": [None, 2], "pe": [None, "yarn"], "device": ["cpu"]}),
        ropewalk.runs: (run, {"only": ["*", ["*"]], "exclude": ["x"], "reference": ["rope"]}),
        ropewalk.curves: (run, {"only": ["*"], "exclude": [[]]}),
        model.encode: ("knots", {}),
        model.logits: ("knots", {}),
        model.generate: ("knots", {"max_new_tokens": [3], "temperature": [1.0], "seed": [1], "top_k": [None, 2]}),
    }
    call = rng.choice([attend, attend, *calls])
    note(call)
    try:
        if call is attend:
            attend(rng)
        else:
            first, named = calls[call]
            call(odd(rng, first), **{name: odd(rng, *values) for name, values in named.items()})
    except (ValueError, OSError) as error:
        note(error)
