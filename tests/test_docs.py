"""README and docs/: links lead somewhere, commands and code run, tables and the picture follow from the results."""

import ast
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from conftest import ROOT, outcome_of, snapshot, tokens, write_knots
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

import ropewalk
from conf.schema import parse
from docs import results
from lab.board import tries
from model import serialization
from ropewalk.app.compose import composed, plain
from ropewalk.app.configure import train_values
from ropewalk.app.resolve import completed
from ropewalk.evaluation.results import load_all

LOG = sorted(ROOT.glob("docs/log/*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *LOG]
# Commands that are not checked here, by how they begin, and why.
NOT_CHECKED = {
    "python -m": "runs the tests or what they test",
    "python train.py --config-dir": "an encoding of the user's own: tests/model/test_add_your_own.py",
    "make": "the Makefile; CI runs it",
    "git": "commits an entry of the board",
    "python scripts/judge.py entry=board/DATE-NAME": "an entry that is still to be written",
    "apt-get download": "fetches a corpus",
    "dpkg": "unpacks it",
    "mkdir corpus": "has no options to check",
    "basename": "part of the loop that strips its pages of tags",
    "python docs/results.py": "the last test here runs it",
    "pip": "installs",
    "lm_eval": "another program",
    "grep": "shows rows of several runs",
    "xdg-open": "shows a page in a browser",
}
# What a command needs that only another command makes.
NEEDS_A_RUN = ("init_from=", "init_optimizer=", "init_partial=")
# What is no override: flags, a line that goes on, and "and so on".
NO_OVERRIDES = ("-m", "\\", "--cfg", "job", "...")
FENCED = re.compile(r"^```(?:sh|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)    (?:python|pip|bash|make) .*\n(?:    .*\n)*")
# Makes bash write down what it would call.
RECORD = r"""exec 3>&1 >/dev/null; command_not_found_handle() { printf '%s\n' "$@" '' >&3; }; PATH=/nowhere
SLURM_ARRAY_TASK_ID=1; """


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """The anchors of a page, as GitHub makes them of its headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = without_code(page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text):
        file, _, anchor = "".join(target).partition("#")
        if file.startswith(("http:", "https:")):
            continue
        place = (page.parent / file).resolve() if file else page

        assert place.exists(), f"{page.name}: {file}"

        if anchor:
            assert anchor in anchors(place), f"{page.name}: {file}#{anchor}"


def said(block):
    """The commands that bash calls for a block of code, none of which is run: the words of each."""
    block = block.replace(". .venv/bin/activate", ":")
    shell = ["/bin/bash", "-c", RECORD + block]
    with TemporaryDirectory() as folder:
        output = subprocess.run(shell, cwd=folder, capture_output=True, text=True, check=False).stdout
    commands = output.removesuffix("\n\n").split("\n\n")
    return [command.split("\n") for command in commands if command]


def all_commands():
    """The commands in the pages' blocks of code, as the shell would call them: {command: its words}."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in FENCED.findall(text) + INDENTED.findall(text):
            found += said(block)
    return {" ".join(words): words for words in found}


def single_jobs(overrides):
    """The jobs of a command: for several swept keys each value once, with the first ones of the others."""
    choices = []
    for override in OverridesParser.create().parse_overrides(overrides):
        values = [override.input_line]
        if override.is_sweep_override() and not override.is_discrete_sweep():
            continue  # an interval that a search draws from
        if override.is_sweep_override():
            key = override.input_line.partition("=")[0]
            values = [f"{key}={value}" for value in override.sweep_string_iterator()]
        choices.append(values)
    longest = max(map(len, choices), default=1)
    for number in range(longest):
        yield [values[number] if number < len(values) else values[0] for values in choices]


def check_job(program, overrides):
    """Compose what a program gets, and make the checks that come before any work."""
    if program == "train":
        from_scratch = [override for override in overrides if not override.startswith(NEEDS_A_RUN)]
        completed(train_values(*from_scratch))
        return
    module = import_module(f"scripts.{program}")
    with composed(program, *overrides) as config:
        values = plain(config)
        (argument,) = inspect.signature(module.main).parameters.values()
        args = parse(argument.annotation, values)
        if program == "judge":  # its other keys are those of train.py
            tries.configurations(args)


COMMANDS = all_commands()


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_valid(command):
    if command.startswith(tuple(NOT_CHECKED)):
        return
    words = COMMANDS[command]
    files = [place for place, word in enumerate(words) if word.endswith(".py")]

    assert files, f"{command} is neither checked nor listed"

    program, *arguments = words[files[0] :]  # after python, or a launcher and its options
    overrides = []
    for argument in arguments:
        if argument not in NO_OVERRIDES and not argument.startswith("hydra"):
            overrides.append(argument.replace("NAME", "alibi"))
    for job in single_jobs(overrides):
        check_job(Path(program).stem, job)


@pytest.mark.long
def test_tables_and_picture_follow_from_the_results(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    for page in [tmp_path / "README.md", *tmp_path.glob("docs/log/*.md")]:
        without_tables = re.sub("(-- made by .*? -->).*?(?=<!-- end)", r"\1\n", page.read_text(), flags=re.DOTALL)
        page.write_text(without_tables)
    (tmp_path / "docs/gain.svg").unlink()

    results.main([], tmp_path)

    for path, content in snapshot(tmp_path).items():
        original = ROOT / path.relative_to(tmp_path)
        assert content == original.read_bytes(), f"run python docs/results.py: {path.name}"


@pytest.mark.long
def test_the_notebook_runs(monkeypatch):
    """In the folder it lies in; what it claims is asserted in its cells."""
    monkeypatch.chdir(ROOT / "docs")
    notebook = json.loads((ROOT / "docs/tour.ipynb").read_text())
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)


@pytest.mark.long
def test_the_commands_of_the_walk_end_with_the_same_model_in_transformers(tmp_path, monkeypatch, capfd):
    """docs/walk.sh at a small size."""
    corpus = write_knots(tmp_path / "corpus")
    options = [
        "data=text",
        f"data.files={corpus}/*.txt",
        f"data.cache_dir={tmp_path}/prepared",
        "data.val_fraction=0.3",
        "model.n_layer=1",
        "model.dim=32",
        "model.n_head=2",
        "trainer.accelerator=cpu",
        "trainer.val_tokens=512",
        "eval.by_position=false",
        "eval.far_copies=false",
    ]
    runs = tmp_path / "runs"
    small = f"set -- {shlex.join(options)}; RUNS={runs} LENGTH=48 STEPS=20\n"
    monkeypatch.chdir(tmp_path)
    _, *commands = said(small + (ROOT / "docs" / "walk.sh").read_text())  # the first one asks where the script lies
    for _, program, *arguments in commands:
        monkeypatch.setattr("sys.argv", [program, *arguments])
        module = program.removesuffix(".py").replace("/", ".")
        outcome_of(module, capfd)

    read_by = {e.variant.label for e in load_all(runs / "walk-rope")}

    assert read_by == {"rope", "linear at scale 4", "ntk at scale 4", "yarn at scale 4", "yarn at scale 8"}

    net = serialization.load(runs / "walk-yarn")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(runs / "walk-hf")
    idx = tokens(192, vocab_size=net.vocab_size)
    logits = net(idx)

    torch.testing.assert_close(theirs(idx).logits, logits, rtol=1e-5, atol=1e-5)
    assert logits.std() > 0.1


@pytest.mark.slow
def test_the_demo_prints_what_readme_shows(tmp_path):
    """But for the digits of its numbers, which depend on the machine."""
    command = [sys.executable, "train.py", "experiment=demo", f"runs_dir={tmp_path}"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    block = re.search(r"```\n(rope-markov: .*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)[1]

    def words(text):
        return [re.sub(r"[-+ ]*\d[\d.]*", " 0", line).split() for line in text.splitlines()]

    shown = words(block)
    lines = words(printed)
    start = lines.index(shown[0])

    assert lines[start : start + len(shown)] == shown


def test_lines_of_one_label_on_several_kinds_of_texts_are_told_apart():
    folder = ROOT / "docs/results"
    sections = results.loaded([folder / "nope.parquet", folder / "code.parquet"]).results.groupby("line").section
    assert sections.nunique().max() == 1
    assert {"nope", "nope-code"} <= set(sections.groups)


# A program of the user's own.
OWN_PROGRAM = (ROOT / "docs" / "own_program.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", OWN_PROGRAM, re.MULTILINE | re.DOTALL)
PROGRAM = next(block for block in BLOCKS if block.startswith("# study.py"))


@pytest.mark.long
def test_code_of_the_page_on_own_programs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in BLOCKS:
        if block != PROGRAM:
            exec(block, names)

    runs = {path.parent.name for path in tmp_path.glob("runs/*/training.json")}

    assert runs == {"first", "rope-lr0.001", "rope-lr0.004", "trial-0", "trial-1"}
    assert names["study"].best_value == min(trial.value for trial in names["study"].trials)
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.long
def test_a_hydra_program_of_the_users_trains(tmp_path):
    (conf,) = re.findall(r"^```yaml\n(.*?)^```$", OWN_PROGRAM, re.MULTILINE | re.DOTALL)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "study.yaml").write_text(conf)
    program = PROGRAM.replace("def main(config):\n", "def main(config):\n" + BEFORE).replace("\n\n\nmain()", AFTER)
    (tmp_path / "study.py").write_text(program)
    options = ast.literal_eval(re.search(r"SMALL = (\[.*?\n\])", OWN_PROGRAM, re.DOTALL)[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "study.py", "pe=rope", *options], cwd=tmp_path, env=environment, check=True)

    assert {path.parent.name for path in tmp_path.glob("runs/*/training.json")} == {"study", "other"}


BEFORE = """    from hydra.core.hydra_config import HydraConfig
    before = HydraConfig.get()
"""
AFTER = """
    assert HydraConfig.get() is before


main()
"""


def test_a_file_that_hides_train_py_is_named(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("raise AssertionError('it runs again')")
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}/train.py, not Ropewalk's: give that file another name"):
        ropewalk.train("pe=rope", "data=markov")


@pytest.mark.parametrize(("overrides", "options"), [((["pe=rope"],), {}), ((), {"config": {"pe": "rope"}})])
def test_train_says_which_argument_has_another_type(overrides, options):
    """A list in place of its strings, a dictionary in place of what Hydra composes."""
    with pytest.raises(ValueError, match="Input should be"):
        ropewalk.train(*overrides, **options)
