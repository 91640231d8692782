"""Any file of a finished run, damaged in any way, and any command: a clear error or an honest result.

Nothing outside of the run is read or written through it, and no command passes over what it needs.
"""

import functools
import hashlib
import json
import operator
import os
import shutil
import signal
from importlib import import_module

import pytest
import torch
import yaml
from conftest import REPORT, snapshot
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from evaluation.report import page
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
MANY = int(os.environ.get("ROPEWALK_FUZZ", "500"))  # mutations of the slow test
PATIENCE = 120  # seconds that one call may take
VALUES = st.sampled_from([..., None, True, -1, 0, 1e308, "", "x", "[/b]", "\x1b[31m", [], [[]], {}, {"a": 1}, 10**30])


def leaves(value, at=()):
    """Paths to everything inside nested dicts and lists."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*at, key)
        yield from leaves(child, (*at, key))


def retype(file, data):
    """Another value, or none, somewhere in a JSON or YAML file or in a line of metrics.jsonl."""
    lines = file.read_text().splitlines(keepends=True) if file.suffix == ".jsonl" else [file.read_text()]
    line = data.draw(st.integers(0, len(lines) - 1))
    values = yaml.safe_load(lines[line])
    *above, key = data.draw(st.sampled_from(sorted(leaves(values), key=repr)))
    inside = functools.reduce(operator.getitem, above, values)
    inside[key] = data.draw(VALUES)
    if inside[key] is ...:
        del inside[key]
    lines[line] = json.dumps(values) + "\n"  # which is YAML, too
    file.write_text("".join(lines))


def lie(content, data):
    """Weights whose header says something else, of which the length is right or wrong."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    key, value = data.draw(
        st.sampled_from([
            ("shape", [2**62]), ("shape", [-1]), ("shape", []), ("dtype", "I32"), ("dtype", "F4096"),
            ("data_offsets", [0, 2**62]), ("data_offsets", [8, 0]), ("data_offsets", [0, 4]),
        ])
    )  # fmt: skip
    header[name][key] = value
    lying = json.dumps(header).encode()
    length = data.draw(st.sampled_from([len(lying), 0, 2**63 - 1]))
    return length.to_bytes(8, "little") + lying + content[8 + size :]


def with_nan(file, content, data):
    """The same with NaN in one tensor of a checkpoint or of the weights."""
    state = load(content) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    part = state if file.suffix == ".safetensors" else state["model"]
    part[data.draw(st.sampled_from(sorted(part)))].flatten()[0] = torch.nan
    if file.suffix == ".safetensors":
        return save(state)
    torch.save(state, file)
    return file.read_bytes()


def mutate(run, file, data, outside):
    """Damage one file of the run; returns how."""
    ways = ["delete", "truncate", "flip", "retype", "swap", "link", "folder", "pipe", "clock"]
    if file.suffix == ".safetensors":
        ways += ["lie", "nan"]
    if file.suffix == ".ckpt":
        ways.append("nan")
    how = data.draw(st.sampled_from(ways))
    content = file.read_bytes()
    if how == "clock":
        seconds = data.draw(st.sampled_from([0, 2**33]))
        os.utime(file, (seconds, seconds))
        return how
    if how in ("lie", "nan"):
        damaged = lie(content, data) if how == "lie" else with_nan(file, content, data)
        file.write_bytes(damaged)
        # Whoever makes such a file can make its hash as well.
        about = json.loads((run / "model.json").read_text())
        if file.suffix == ".safetensors":
            about["sha256"] = hashlib.sha256(damaged).hexdigest()
            (run / "model.json").write_text(json.dumps(about))
        return how
    if how == "retype" and file.suffix in (".json", ".jsonl", ".yaml"):
        retype(file, data)
        return how
    file.unlink()
    at = data.draw(st.integers(0, max(0, len(content) - 1)))
    if how == "truncate":
        file.write_bytes(content[:at])
    elif how == "flip":
        file.write_bytes(content[:at] + bytes([content[at] ^ (1 << data.draw(st.integers(0, 7)))]) + content[at + 1 :])
    elif how == "link":
        (outside / file.name).write_bytes(content)
        file.symlink_to(outside / file.name)
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "swap":
        other = data.draw(st.sampled_from([p for p in sorted(run.rglob("*")) if p.is_file() and p != file]))
        file.write_bytes(other.read_bytes())
    return how


def blocked(*_):
    raise AssertionError("a call did not end")


@pytest.mark.parametrize("count", [25, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(0)])])
def test_mutations(train, script, monkeypatch, count):
    monkeypatch.setattr("train.page", page)
    signal.signal(signal.SIGALRM, blocked)
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

    # without shrinking, which would take minutes
    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
    @given(data=st.data())
    def damaged(data):
        for old in (whole, outside, out):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(kept, whole)
        outside.mkdir()
        (outside / "mine").write_text("untouched")
        name = data.draw(st.sampled_from(files))
        command = data.draw(st.sampled_from(sorted(NEEDS)))
        how = mutate(whole, whole / name, data, outside)
        before = snapshot(outside)
        signal.alarm(PATIENCE)
        outcome = call(command)  # an exception would be a traceback
        signal.alarm(0)
        said = f"{how} {name}, {command}: {outcome}"
        assert outcome.code in (0, 2), said
        assert "Traceback" not in outcome.out + outcome.err, said
        assert snapshot(outside) == before, said
        if outcome.code == 2:
            assert outcome.err.startswith(("error:", "warning:", str(train.runs))) or "error:" in outcome.err, said
        elif how == "flip" and name == "model.safetensors":
            assert command not in ("evaluate", "sample", "export"), said
        elif how not in ("flip", "retype", "clock") and (how, name) != (
            "delete",
            "training.json",
        ):  # which makes it unfinished
            assert name not in NEEDS[command], said

    damaged()
