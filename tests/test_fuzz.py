"""Any file of a finished run, damaged in any way, any option or argument of any value: a clear error or a result.

Nothing outside of the run is read or written through it, and no command passes over what it needs.
"""

import functools
import gzip
import json
import operator
import os
import random
import shutil
import signal
import traceback
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Annotated

import pytest
import torch
import yaml
from conftest import REPORT, snapshot
from omegaconf import OmegaConf
from pydantic import BaseModel, TypeAdapter

import ropewalk
import train as program
from conf.schema import Config
from data.base import resolve as data_class
from model.position import resolve as encoding_class
from ropewalk.app.cli import CONF_DIR
from ropewalk.plugins import schema_of
from ropewalk.report import frame, page
from ropewalk.training.hardware import check_memory
from ropewalk.training.stop import STOPPED, Stop
from scripts import report

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
# Seeds of the slow tests; ROPEWALK_FUZZ=100:200 tries those from 100 on.
MANY = range(*map(int, os.environ.get("ROPEWALK_FUZZ", "0:500").split(":")))
PATIENCE = 120  # seconds that one call may take
VALUES = [..., None, True, -1, 0, 1e308, "", "x", "[/b]", "\x1b[31m", [], [[]], {}, {"a": 1}, 10**30]


def few_and_many(few):
    """A test of the first seeds, and a slow one of many."""
    many = pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(0)])
    return pytest.mark.parametrize("numbers", [range(few), many], ids=["few", "many"])


class BlockedError(BaseException):
    """A call that has not ended: no handler of exceptions may take it for one of its own."""


def blocked(*_):
    raise BlockedError


def try_all(numbers, check):
    """Call `check` with a random generator of each of the numbers; AssertionError: all that went wrong."""
    wrong = []
    outcomes = Counter()
    signal.signal(signal.SIGALRM, blocked)
    for number in numbers:
        tried = []
        signal.alarm(PATIENCE)
        try:
            outcomes[check(random.Random(number), tried)] += 1
        except (Exception, BlockedError):
            wrong.append(f"{number}: {tried}\n{traceback.format_exc(limit=-3)}")
        finally:
            signal.alarm(0)
    print(f"outcomes {dict(outcomes)}, {len(wrong)} failures")
    assert not wrong, "\n".join(wrong)


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


def retype(content, rng):
    """Another value, or none, somewhere in a JSON or YAML file or in a line of metrics.jsonl."""
    parts = [content]
    if content.startswith(b'{"'):  # a row a line
        parts = content.splitlines(keepends=True)
    number = rng.randrange(len(parts))
    values = yaml.safe_load(parts[number])
    *above, key = rng.choice(sorted(leaves(values), key=repr))
    inside = functools.reduce(operator.getitem, above, values)
    inside[key] = rng.choice(VALUES)
    if inside[key] is ...:
        del inside[key]
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
    at = rng.choice([at for at, byte in enumerate(content) if chr(byte).isdigit()])
    return content[:at] + rng.choice(b"0123456789".replace(content[at : at + 1], b"")).to_bytes() + content[at + 1 :]


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


@few_and_many(25)
def test_mutations(train, script, monkeypatch, numbers):
    monkeypatch.setattr("ropewalk.app.ending.page", page)
    options = ("name=whole", "trainer.max_steps=2", "eval.lengths=[1,2]", "eval.variants=[]", "eval.sequences=2")
    for run in (options, ("name=beside", "seed=1", *options[1:])):
        assert train(*run).code == 0
    whole, folder = train.runs / "whole", train.runs.parent
    kept = whole.rename(folder / "kept")
    files = sorted(str(p.relative_to(kept)) for p in kept.rglob("*") if p.is_file() and p.name != "report.html")
    outside, out = folder / "outside", folder / "out"
    arguments = {
        "evaluate": [f"run={whole}", f"cache_dir={folder / 'cache'}"],
        "sample": [f"run={whole}", "prompt=a", "max_new_tokens=1"],
        "export": [f"run={whole}", f"out={out}"],
        "report": [f"folders=[{train.runs}]", f"out={folder}/page.html"],
    }

    def call(command):
        monkeypatch.setattr(page, "html", REPORT if command == "report" else lambda *_: "")  # others only warn
        if command in ("train", "longer"):
            return train(options[0], f"trainer.max_steps={2 + (command == 'longer')}", *options[2:])
        return script(import_module(f"scripts.{command}"), *arguments[command])

    def damaged(rng, tried):
        for old in (whole, outside, out):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(kept, whole)
        outside.mkdir()
        (outside / "mine").write_text("untouched")
        name = rng.choice(files)
        command = rng.choice(sorted(NEEDS))
        how = mutate(whole / name, rng, outside)
        before = snapshot(outside)
        tried += [how, name, command]
        outcome = call(command)  # an exception would be a traceback
        tried.append(outcome)
        assert outcome.code in (0, 2)
        assert "Traceback" not in outcome.out + outcome.err
        assert snapshot(outside) == before
        needed = name in NEEDS[command]
        if command == "report":  # on the other run, whatever this one holds
            assert (outcome.code, needed) == (0, False)
            assert "beside" in (folder / "page.html").read_text()
        elif outcome.code == 2:
            assert "error:" in outcome.err
        elif how in (flip, digit):
            assert not (needed and name in FIGURES)
        elif how != retype and (how, name) != ("delete", "training.json"):
            # Deleting the latter makes the run unfinished.
            assert not needed
        return outcome.code

    try_all(numbers, damaged)


@few_and_many(30)
def test_archives(straight, script, tmp_path, monkeypatch, numbers):
    """Whatever somebody else's file of results holds, there is a report on the other runs."""
    monkeypatch.setattr(page, "html", REPORT)
    mine = shutil.copytree(straight("pe=rope"), tmp_path / "runs" / "mine")
    theirs = tmp_path / "theirs.jsonl.gz"
    frame.save(theirs, [straight("pe=rope", "seed=1")])
    rows = gzip.decompress(theirs.read_bytes())
    out = tmp_path / "page"

    def damaged(rng, tried):
        how = rng.choice([retype, retype, retype, digit, flip, truncate])
        kind = rng.choice(["html", "csv", "md"])
        tried += [how, kind]
        theirs.write_bytes(gzip.compress(how(rows, rng)))
        outcome = script(report, f"folders=[{mine.parent},{theirs}]", f"format={kind}", f"out={out}")
        tried.append(outcome)
        assert outcome.code == 0
        assert "Traceback" not in outcome.err
        assert "rope" in out.read_text()
        return "left out" if f"left out: {theirs}" in outcome.err else "taken"

    try_all(numbers, damaged)


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
            rule = functools.reduce(operator.getitem, path, rules)
            if "imum" in str(path[-1]):  # minimum, exclusiveMaximum, ...
                values += [rule - 1, rule, rule + 1]
            elif path[-1] == "const" or "enum" in path[:-1]:
                values.append(rule)
        yield prefix + name, [str(value) for value in values]


def options_of_group(group, name, find):
    """The same of the class that conf/`group`/`name`.yaml names."""
    config = OmegaConf.load(CONF_DIR / group / f"{name}.yaml")
    return list(options_in(schema_of(find(config._target_)), f"{group}."))


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


@few_and_many(15)
def test_options(train, tmp_path, monkeypatch, numbers):
    """Each key of the schema, and of the classes that conf/pe and conf/data name, with values of every kind."""
    monkeypatch.setattr(program, "Stop", Soon)
    monkeypatch.setattr(program, "check_memory", affordable)
    monkeypatch.setattr(program.distributed, "launch", one_process)
    here = tmp_path / "here"
    pipe = tmp_path / "pipe.tiktoken"
    os.mkfifo(pipe)
    plain = [key for key in options_in(Config) if key[0] not in ("pe", "data")]
    encodings = [path.stem for path in sorted(CONF_DIR.glob("pe/*.yaml")) if "_target_" in path.read_text()]
    tasks = [path.stem for path in sorted(CONF_DIR.glob("data/*.yaml")) if "data.tasks" in path.read_text()]

    def given_options(rng, tried):
        shutil.rmtree(train.runs, ignore_errors=True)
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        monkeypatch.chdir(here)
        pe = rng.choice(encodings)
        source = rng.choice(["text", "text", *tasks])
        options = {
            "plain": lambda: plain,
            "pe": lambda: options_of_group("pe", pe, encoding_class),
            "data": lambda: options_of_group("data", source, data_class),
        }[rng.choice(["plain", "plain", "pe", "data"])]()
        arguments = [f"pe={pe}"] + [f"data={source}"] * (source != "text")
        for _ in range(rng.randint(1, 2)):
            key, limits = rng.choice(options)
            value = rng.choice(ODD + limits * 5).replace("PIPE", str(pipe))
            word = rng.choice([key for key, _ in plain]).rpartition(".")[2]
            form = rng.choice(FORMS)
            arguments.append(form.format(key=key, value=value, word=word, section=key.partition(".")[0]))
        tried += arguments
        outcome = train(*arguments)  # an exception would be a traceback
        tried.append(outcome)
        assert outcome.code in (0, 2, STOPPED)
        assert "Traceback" not in outcome.out + outcome.err
        assert "\x1b" not in outcome.out + outcome.err
        assert (outcome.code == 2) == ("error: " in outcome.err)
        assert {path.name for path in tmp_path.iterdir()} <= {"runs", "cache", "corpus", "here", pipe.name}
        if not any("runs_dir" in argument or "cache_dir" in argument for argument in arguments):
            assert not list(here.iterdir())
        return outcome.code

    try_all(numbers, given_options)


OTHERS = [None, True, -1, 0, 0.5, 3, 2**70, float("nan"), float("inf"), "", "x", "rope", "../up", "\0", b"x"]
OTHERS += [[], [1], {}, {"name": "rope"}, Path("/dev/null"), object(), torch.zeros(2), torch.device("meta")]


class Odd:
    """Arguments of the Python interface: mostly what is right, else of another type, size, shape, dtype or device."""

    def __init__(self, rng):
        self.rng = rng

    def __call__(self, *right):
        """One of these, or rarely anything."""
        return self.rng.choice([*right] if self.rng.random() < 0.7 else OTHERS)

    def tensor(self, *sizes):
        """A tensor of these sizes, of which some may be others, of any dtype, on a device or another."""
        sizes = [self.rng.choice([size] * 20 + [0, 1, size + 1]) for size in sizes]
        sizes += [3] * (self.rng.random() < 0.03)
        x = torch.zeros(sizes, device=self.rng.choice(["cpu"] * 20 + ["meta"]))
        return x.to(self.rng.choice([torch.float32] * 20 + [torch.int64, torch.bfloat16, torch.complex64]))


def calls_of(odd, run, model):
    """Calls of the interface, by name: each makes its arguments when it is called."""
    options = odd.rng.choice([{}, {"scale": odd(2.0)}, {"base": odd(500.0)}, {"window": odd(4)}])

    def attend():
        name = odd.rng.choice(ropewalk.encodings())
        sizes = {"n_head": odd(2), "head_dim": odd(8), "n_kv_head": odd(None, 1), "dim": odd(None)}
        pe = ropewalk.encoding(name, **sizes, train_len=odd(16), seed=odd(0), **options)
        shapes = [(1, heads, 6, pe.head_dim) for heads in (pe.n_head, pe.n_kv_head, pe.n_kv_head)]
        x = odd.tensor(1, 6, 16) if odd.rng.random() < 0.8 else None
        out = ropewalk.attend(pe, *[odd.tensor(*shape) for shape in shapes], x, embedded=odd(True))
        assert out.shape == shapes[0]

    return {
        "load": lambda: ropewalk.load(odd(run), step=odd(None, 2), pe=odd(None, "yarn"), device=odd("cpu")).logits("a"),
        "generate": lambda: model.generate(odd("knots"), odd(3), temperature=odd(1.0), seed=odd(1), top_k=odd(None, 2)),
        "encode": lambda: model.encode(odd("knots")),
        "logits": lambda: model.logits(odd("knots")),
        "runs": lambda: ropewalk.runs(odd(run), only=odd("*", ["*"]), exclude=odd("x"), reference=odd("rope")),
        "curves": lambda: ropewalk.curves(odd(run), only=odd("*"), exclude=odd([])),
        "attend": attend,
    }


@few_and_many(40)
def test_the_python_interface(straight, numbers):
    """Only ValueError or OSError, as its docstrings say; TypeError is Python's for what is no argument at all."""
    run = straight("pe=rope")
    model = ropewalk.load(run)

    def called(rng, tried):
        calls = calls_of(Odd(rng), run, model)
        name = rng.choice([*calls, "attend", "attend"])
        tried.append(name)
        try:
            calls[name]()
        except (ValueError, OSError) as error:
            tried.append(error)

            return type(error).__name__
        return "result"

    try_all(numbers, called)
