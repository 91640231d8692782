"""Any file of a finished run, damaged in any way, any option of any value: a clear error or a result.

Nothing outside of the run is read or written through it, and no command passes over what it needs.
"""

import json
import os
import random
import re
import shutil
from functools import partial
from itertools import chain

import pytest
import yaml
from conftest import ROOT, snapshot
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

import ropewalk
import train as program
from conf.errors import flatten
from conf.schema import Config
from model.size import n_parameters
from ropewalk.app.configure import train_values
from scripts import evaluate, export, report, sample

# What each command needs of a run: without it there is no result.
NEEDS = {
    "train": {"config.yaml", "training.json"},  # it only prints
    "longer": {
        "config.yaml",
        "training.json",
        "environment.json",
        "data.json",
        "metrics.jsonl",
        "checkpoints/step=2.ckpt",
    },
    "evaluate": {"config.yaml", "data.json", "environment.json", "model.json", "model.safetensors"},
    "sample": {"config.yaml", "data.json", "model.json", "model.safetensors"},
    "export": {"config.yaml", "model.json", "model.safetensors"},
    "report": set(),
}
# Files whose numbers are results: whatever else they say is told from what was written.
FIGURES = ("training.json", "metrics.jsonl", "model.json", "model.safetensors")
VALUES = [
    None, True, -1, 0, 1e308, 10**30,
    "", "x", "[/b]", "\x1b[31m",
    [], [[]], {}, {"a": 1},
    ...,
]  # fmt: skip


def fuzz(cases):
    """A test of `cases` random generators, always the same ones; ROPEWALK_FUZZ=500 tries so many."""
    number = int(os.environ.get("ROPEWALK_FUZZ", cases))
    # A generator of random numbers cannot be made simpler.
    own = settings(
        max_examples=number,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    generators = st.randoms(use_true_random=True)
    return lambda test: own(given(rng=generators)(test))


def containers(value):
    """The dicts and lists in a value, itself among them, that are not empty."""
    if isinstance(value, dict | list) and value:
        yield value
        for child in value.values() if isinstance(value, dict) else value:
            yield from containers(child)


def retype(content, rng):
    """Another value, or none, somewhere in a JSON or YAML file or in a line of metrics.jsonl."""
    parts = [content]
    if content.startswith(b'{"'):  # a row a line
        parts = content.splitlines(keepends=True)
    number = rng.randrange(len(parts))
    values = yaml.safe_load(parts[number])
    owner = rng.choice([*containers(values)])
    key = rng.choice([*owner] if isinstance(owner, dict) else range(len(owner)))
    owner[key] = rng.choice(VALUES)
    if owner[key] is ...:
        del owner[key]
    as_json = json.dumps(values).encode()  # which is YAML, too
    parts[number] = as_json + b"\n"
    return b"".join(parts)


def truncate(content, rng):
    return content[: rng.randrange(len(content))]


def flip(content, rng):
    """Another bit."""
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def other_digit(content, rng):
    """The lowest bit of a digit is another one, which makes it another digit."""
    place = rng.choice([i for i, byte in enumerate(content) if byte in b"0123456789"])
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def mutate(file, rng, outside):
    """Damage one file of a run; returns how."""
    content = file.read_bytes()
    kinds = [truncate, flip, "delete", "pipe", "folder", "link"]
    if file.suffix in (".json", ".jsonl", ".yaml"):
        kinds += [other_digit, retype]
    how = rng.choice(kinds)
    file.unlink()
    if how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "link":  # to the same content
        (outside / file.name).write_bytes(content)
        file.symlink_to(outside / file.name)
    elif how != "delete":
        file.write_bytes(how(content, rng))
    return how


SHORT = ("eval.lengths=[1,2]", "eval.variants=[]", "eval.sequences=2")


@pytest.fixture
def commands(train, script):
    """Each command on the run "whole"; beside it lies another one, "beside"."""
    train(*SHORT, "trainer.max_steps=2", "name=beside", "seed=1")
    train(*SHORT, "trainer.max_steps=2", "name=whole")
    folder = train.runs.parent
    run = f"run={train.runs / 'whole'}"
    page_of_all = f"folders=[{train.runs}]", "format=md", f"out={folder / 'page.md'}"
    return {
        "train": partial(train, *SHORT, "name=whole", "trainer.max_steps=2"),
        "longer": partial(train, *SHORT, "name=whole", "trainer.max_steps=3"),
        "evaluate": partial(script, evaluate, run, f"cache_dir={folder / 'cache'}"),
        "sample": partial(script, sample, run, "prompt=a", "max_new_tokens=1"),
        "export": partial(script, export, run, f"out={folder / 'out'}"),
        "report": partial(script, report, *page_of_all),
    }


@pytest.fixture
def undamaged(commands, train, tmp_path):
    """A copy of the run, as it was before any damage."""
    return shutil.copytree(train.runs / "whole", tmp_path / "undamaged")


NEEDED = [(command, name) for command in NEEDS for name in sorted(NEEDS[command])]
DAMAGES = {  # without training.json a run is unfinished, and is trained
    "lost": [(command, name) for command, name in NEEDED if name != "training.json"],
    # A row of metrics.jsonl that somebody has corrected is a warning.
    "changed": [(command, name) for command, name in NEEDED if name in FIGURES and name != "metrics.jsonl"],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_command_needs_is_missed(commands, undamaged, train, damage):
    """And nothing is written, so that the run can still be mended."""
    run = train.runs / "whole"
    for command, name in DAMAGES[damage]:
        shutil.rmtree(run)
        shutil.copytree(undamaged, run)
        content = (run / name).read_bytes()
        (run / name).unlink()
        if damage == "changed":
            (run / name).write_bytes(other_digit(content, random.Random(0)))
        before = snapshot(run)

        assert "error:" in commands[command](code=2).err
        assert snapshot(run) == before, (command, name)


@fuzz(25)
def test_mutations(commands, undamaged, train, tmp_path, rng):
    """One file of a run damaged: a clear error or a result, and a report on the other run."""
    run = train.runs / "whole"
    outside = tmp_path / "outside"
    for old in (run, outside, tmp_path / "out"):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(undamaged, run)
    outside.mkdir()
    (outside / "mine").write_text("untouched")

    files = [path for path in run.rglob("*") if path.is_file() and path.suffix != ".html"]
    file = rng.choice(sorted(files))
    name = str(file.relative_to(run))
    command = rng.choice(sorted(commands))
    how = mutate(file, rng, outside)
    note(f"{command} after {how} of {name}")
    before = snapshot(outside)

    outcome = commands[command](code=None)  # an exception would be a traceback

    assert outcome.code in (0, 2)

    assert "Traceback" not in outcome.out + outcome.err
    assert (outcome.code == 2) == ("error:" in outcome.err)
    assert snapshot(outside) == before

    if command == "report":  # on the other run, whatever this one holds
        assert outcome.code == 0
        assert "beside" in (tmp_path / "page.md").read_text()


# Values as they stand on a command line: of every type, beyond every limit, and what a parser, a path or a terminal may
# take for something else.
WORDS = """
null true -1 0 0.5 1 3 512 2147483648 1e308 -1e-320 nan inf x auto 1_0 0x10 '1' [] {} [1,1] [[1]] {a:1} [{}]
??? ${seed} ${nowhere} ${pe} $x 1,2 = ' %s {0} é [/b] range(1,3) rope hf: train:0 train:99999999
../up a/b . PIPE /dev/null /dev/zero /proc/self/mem
"""
ODD = [*WORDS.split(), "", "\0", "\x1b[31m", "x" * 300, "[" * 99]
FORMS = ["{key}={value}"] * 12
FORMS += ["+{key}={value}", "++{key}={value}", "~{key}", "{key}", "{key}.lr={value}", "{key}x={value}"]
# Sources that need no download.
SOURCES = [path.stem for path in sorted(ROOT.glob("conf/data/*.yaml")) if ".tasks." in path.read_text()]


# The words that may be chosen, and what stands at and beside the limits of numbers: minimum, exclusiveMaximum, ...
SCHEMA = json.dumps(Config.model_json_schema())
LIMITS = [*chain(*map(json.loads, re.findall(r'"enum": (\[.*?\])', SCHEMA)))]
for limit in map(int, re.findall(r'imum": (-?\d+)', SCHEMA)):
    LIMITS += [f"{limit - 1}", f"{limit}", f"{limit + 1}"]


def affordable(fabric, cfg, hardware, data, net, training=program.Training):
    """A `Training`, or an error if going on would take more than a moment."""
    evaluated = cfg.eval.sequences * max(cfg.lengths)
    tokens = max(cfg.step_tokens, cfg.trainer.val_tokens, evaluated)
    if tokens > 10_000 or n_parameters(net)["total"] > 2_000_000 or cfg.trainer.max_steps > 20:
        raise ValueError("legal, but too large for a test")
    if hardware.compile or cfg.logger.tensorboard or cfg.logger.wandb:
        raise ValueError("legal, but too slow for a test")
    return training(fabric, cfg, hardware, data, net)


def one_process(trainer, hardware, launch=program.distributed.launch):
    """`launch`, and an error if it would start other processes."""
    if trainer.devices > 1 or trainer.strategy == "fsdp":
        raise ValueError("legal, but of more than one process")
    return launch(trainer, hardware)


@pytest.fixture
def quick(train, monkeypatch):
    """`train`, where no option makes it take more than a moment."""
    monkeypatch.setattr(program, "Training", affordable)
    monkeypatch.setattr(program.distributed, "launch", one_process)
    return train


def drawn_arguments(rng, complete):
    """A command line with one or two options of odd values, or written in odd ways."""
    pe = rng.choice(ropewalk.encodings())
    source = rng.choice(["text", *SOURCES])
    arguments = [f"pe={pe}"]
    if source != "text":
        arguments.append(f"data={source}")
    options = train_values(*complete(*arguments))
    sections = rng.choice([["pe", "data"], sorted(options)])
    for _ in range(rng.randint(1, 2)):
        section = rng.choice(sections)
        keys = flatten({section: options[section]})
        key = rng.choice([section, *keys, *keys])
        value = rng.choice(rng.choice([ODD, LIMITS]))
        arguments.append(rng.choice(FORMS).format(key=key, value=value))
    return arguments


@fuzz(15)
def test_any_option_of_any_value_is_an_error_or_a_run(quick, tmp_path, monkeypatch, rng):
    """Each key of the schema, and of the classes that conf/pe and conf/data name, with values of every kind."""
    here = tmp_path / "here"
    for old in (quick.runs, here):
        shutil.rmtree(old, ignore_errors=True)
    here.mkdir()
    monkeypatch.chdir(here)
    pipe = tmp_path / "pipe.tiktoken"  # nobody writes to it
    if not pipe.exists():
        os.mkfifo(pipe)
    arguments = [argument.replace("PIPE", str(pipe)) for argument in drawn_arguments(rng, quick.complete)]
    note(arguments)

    outcome = quick(*arguments, code=None)  # an exception would be a traceback

    said = outcome.out + outcome.err
    assert outcome.code in (0, 2)

    assert "Traceback" not in said
    assert "\x1b" not in said
    assert (outcome.code == 2) == ("error: " in outcome.err)

    files = {path.name for path in tmp_path.iterdir()}

    assert files <= {"runs", "cache", "corpus", "here", pipe.name}

    if not any("runs_dir" in argument or "cache_dir" in argument for argument in arguments):
        assert not list(here.iterdir())
