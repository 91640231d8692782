"""Any file of a finished run, damaged in any way, or any option with any value: a clear error or an honest result.

Nothing outside of the run is read or written through it, and no command passes over what it needs.
"""

import functools
import hashlib
import itertools
import json
import operator
import os
import random
import shutil
import signal
import stat
import time
import traceback
from collections import Counter
from importlib import import_module
from typing import Annotated

import pytest
import torch
import yaml
from conftest import REPORT, snapshot
from omegaconf import OmegaConf
from pydantic import BaseModel, TypeAdapter
from safetensors.torch import load, save

import train as program
from conf.schema import Config
from data.base import resolve as data_class
from model.position import resolve as encoding_class
from ropewalk.app.cli import CONF_DIR
from ropewalk.plugins import schema_of
from ropewalk.report import page
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
# Seeds of the mutations and command lines of the slow test; ROPEWALK_FUZZ=100:200 tries those from 100 on.
MANY = range(*map(int, os.environ.get("ROPEWALK_FUZZ", "0:500").split(":")))
PATIENCE = 120  # seconds that one call may take
VALUES = [..., None, True, -1, 0, 1e308, "", "x", "[/b]", "\x1b[31m", [], [[]], {}, {"a": 1}, 10**30]


def leaves(value, at=()):
    """Paths to everything inside nested dicts and lists."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*at, key)
        yield from leaves(child, (*at, key))


def retype(file, rng):
    """Another value, or none, somewhere in a JSON or YAML file or in a line of metrics.jsonl."""
    lines = file.read_text().splitlines(keepends=True) if file.suffix == ".jsonl" else [file.read_text()]
    line = rng.randint(0, len(lines) - 1)
    values = yaml.safe_load(lines[line])
    *above, key = rng.choice(sorted(leaves(values), key=repr))
    inside = functools.reduce(operator.getitem, above, values)
    inside[key] = rng.choice(VALUES)
    if inside[key] is ...:
        del inside[key]
    lines[line] = json.dumps(values) + "\n"  # which is YAML, too
    file.write_text("".join(lines))


def lie(content, rng):
    """Weights whose header says something else, of which the length is right or wrong."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = rng.choice(sorted(header.keys() - {"__metadata__"}))
    lies = [("shape", [2**62]), ("shape", [-1]), ("shape", []), ("dtype", "I32"), ("dtype", "F4096")]
    lies += [("data_offsets", [0, 2**62]), ("data_offsets", [8, 0]), ("data_offsets", [0, 4])]
    key, value = rng.choice(lies)
    header[name][key] = value
    lying = json.dumps(header).encode()
    length = rng.choice([len(lying), 0, 2**63 - 1])
    return length.to_bytes(8, "little") + lying + content[8 + size :]


def with_nan(file, content, rng):
    """The same with NaN in one tensor of a checkpoint or of the weights."""
    state = load(content) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    part = state if file.suffix == ".safetensors" else state["model"]
    part[rng.choice(sorted(part))].flatten()[0] = torch.nan
    if file.suffix == ".safetensors":
        return save(state)
    torch.save(state, file)
    return file.read_bytes()


def mutate(run, file, rng, outside):
    """Damage one file of the run; returns how."""
    ways = ["delete", "truncate", "flip", "retype", "swap", "link", "folder", "pipe", "device", "clock"]
    if file.suffix == ".safetensors":
        ways += ["lie", "nan"]
    if file.suffix == ".ckpt":
        ways.append("nan")
    how = rng.choice(ways)
    content = file.read_bytes()
    if how == "clock":
        seconds = rng.choice([0, 2**33])
        os.utime(file, (seconds, seconds))
        return how
    if how in ("lie", "nan"):
        damaged = lie(content, rng) if how == "lie" else with_nan(file, content, rng)
        file.write_bytes(damaged)
        # Whoever makes such a file can make its hash as well.
        about = json.loads((run / "model.json").read_text())
        if file.suffix == ".safetensors":
            about["sha256"] = hashlib.sha256(damaged).hexdigest()
            about.pop("checksum", None)
            (run / "model.json").write_text(json.dumps(about))
        return how
    if how == "retype" and file.suffix in (".json", ".jsonl", ".yaml"):
        retype(file, rng)
        return how
    file.unlink()
    at = rng.randint(0, max(0, len(content) - 1))
    if how == "truncate":
        file.write_bytes(content[:at])
    elif how == "flip":
        file.write_bytes(content[:at] + bytes([content[at] ^ (1 << rng.randint(0, 7))]) + content[at + 1 :])
    elif how == "link":
        (outside / file.name).write_bytes(content)
        file.symlink_to(outside / file.name)
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "device":
        try:
            os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero of Linux, which never ends
        except PermissionError:  # only root may make devices; anybody a socket, which cannot be opened
            os.mknod(file, stat.S_IFSOCK | 0o600)
    elif how == "folder":
        file.mkdir()
    elif how == "swap":
        other = rng.choice([p for p in sorted(run.rglob("*")) if p.is_file() and p != file])
        file.write_bytes(other.read_bytes())
    return how


class BlockedError(BaseException):
    """A call that has not ended: no handler of exceptions may take it for one of its own."""


def blocked(*_):
    raise BlockedError


def try_all(numbers, check):
    """Call `check` with a random generator of each of the numbers; AssertionError: all that went wrong."""
    wrong = []
    codes = Counter()
    signal.signal(signal.SIGALRM, blocked)
    for number in numbers:
        tried = []
        signal.alarm(PATIENCE)
        try:
            codes[check(random.Random(number), tried)] += 1
        except (Exception, BlockedError):
            wrong.append(f"{number}: {tried}\n{traceback.format_exc(limit=-3)}")
        finally:
            signal.alarm(0)
    print(f"exit codes {dict(codes)}, {len(wrong)} failures")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("numbers", [range(25), pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(0)])])
def test_mutations(train, script, monkeypatch, numbers):
    monkeypatch.setattr("ropewalk.app.ending.page", page)
    options = ("name=whole", "trainer.max_steps=2", "eval.lengths=[1,2]", "eval.variants=[]", "eval.sequences=2")
    assert train(*options).code == 0
    whole, folder = train.runs / "whole", train.runs.parent
    kept = folder / "kept"
    whole.rename(kept)
    files = sorted(str(p.relative_to(kept)) for p in kept.rglob("*") if p.is_file() and p.name != "report.html")
    outside, out = folder / "outside", folder / "out"

    def call(command):
        monkeypatch.setattr(page, "html", REPORT if command == "report" else lambda *_: "")  # others only warn
        if command in ("train", "longer"):
            return train(options[0], f"trainer.max_steps={2 + (command == 'longer')}", *options[2:])
        arguments = {
            evaluate: [f"run={whole}", f"cache_dir={folder / 'cache'}"],
            sample: [f"run={whole}", "prompt=a", "max_new_tokens=1"],
            export: [f"run={whole}", f"out={out}"],
            report: [f"folders=[{train.runs}]", f"out={folder}/page.html"],
        }
        program = import_module(f"scripts.{command}")
        return script(program, *arguments[program])

    def damaged(rng, tried):
        for old in (whole, outside, out):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(kept, whole)
        outside.mkdir()
        (outside / "mine").write_text("untouched")
        name = rng.choice(files)
        command = rng.choice(sorted(NEEDS))
        how = mutate(whole, whole / name, rng, outside)
        before = snapshot(outside)
        tried += [how, name, command]
        with monkeypatch.context() as patch:
            if how == "clock":  # that of the machine is set while the command runs, by years
                jumps = itertools.cycle([0.0, 2.0**33])
                patch.setattr(time, "time", lambda: next(jumps))
            outcome = call(command)  # an exception would be a traceback
        tried.append(outcome)
        assert outcome.code in (0, 2)
        assert "Traceback" not in outcome.out + outcome.err
        assert snapshot(outside) == before
        if outcome.code == 2:
            assert "error:" in outcome.err
        elif how == "flip" and name == "model.safetensors":
            assert command not in ("evaluate", "sample", "export")
        elif how not in ("flip", "retype", "clock") and (how, name) != ("delete", "training.json"):
            # Deleting the latter makes the run unfinished.
            assert name not in NEEDS[command]
        return outcome.code

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


@pytest.mark.parametrize("numbers", [range(15), pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(0)])])
def test_options(train, tmp_path, monkeypatch, numbers):
    """Each key of the schema, and of the classes that conf/pe and conf/data name, with values of every kind."""
    monkeypatch.setattr(program, "Stop", Soon)
    monkeypatch.setattr(program, "check_memory", affordable)
    monkeypatch.setattr(program.distributed, "launch", one_process)
    here = tmp_path / "here"
    os.mkfifo(tmp_path / "pipe.tiktoken")
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
        section = rng.choice(["plain", "plain", "pe", "data"])
        options = plain
        if section == "pe":
            options = options_of_group("pe", pe, encoding_class)
        elif section == "data":
            options = options_of_group("data", source, data_class)
        arguments = [f"pe={pe}"] + [f"data={source}"] * (source != "text")
        for _ in range(rng.randint(1, 2)):
            key, limits = rng.choice(options)
            value = rng.choice(ODD + limits * 5).replace("PIPE", str(tmp_path / "pipe.tiktoken"))
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
        assert {path.name for path in tmp_path.iterdir()} <= {"runs", "cache", "corpus", "here", "pipe.tiktoken"}
        if not any("runs_dir" in argument or "cache_dir" in argument for argument in arguments):
            assert not list(here.iterdir())
        return outcome.code

    try_all(numbers, given_options)
