"""README and docs/: links lead somewhere, commands are valid, tables and the picture follow from the results."""

import importlib.util
import json
import re
import shutil
import subprocess
from importlib import import_module
from itertools import zip_longest
from tempfile import TemporaryDirectory

import pytest
from conftest import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser

from conf.schema import parse
from ropewalk.app.cli import composed, plain
from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import check

RESULTS = ["README.md", "docs/gain.svg", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/log/*.md"))]
RESULTS += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/results/*"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/log/*.md"))]
# Commands that are not checked here, by how they begin, and why.
NOT_CHECKED = {
    "python -m": "runs the tests or what they test",
    "python train.py --config-dir": "an encoding of the user's own: tests/model/test_add_your_own.py",
    "make": "the Makefile; CI runs it",
    "git": "commits an entry of the board",
    "apt-get download": "fetches a corpus",
    "dpkg": "unpacks it",
    "mkdir corpus": "has no options to check",
    "basename": "part of the loop that strips its pages of tags",
    "python docs/results.py": "the last test here runs it",
    "pip": "installs",
    "lm_eval": "another program",
}
LAUNCHERS = ("srun", "torchrun")
# Stand-ins for what a reader fills in, and what a command needs that only another command makes.
PLACEHOLDERS = {"pe=NAME": "pe=alibi"}
NEEDS_A_RUN = ("init_from=", "init_optimizer=", "init_partial=")
# Makes bash write down what it would call.
RECORD = r"""exec 3>&1 >/dev/null; command_not_found_handle() { printf '%s\n' "$@" '' >&3; }; PATH=/nowhere; """


def anchors(page):
    """The anchors of a page, as GitHub makes them of its headings."""
    found = []
    for heading in re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        again = found.count(anchor)
        found.append(f"{anchor}-{again}" if again else anchor)
    return found


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


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


def commands():
    """The commands in the pages' blocks of code and in scripts, as the shell would call them: {command: arguments}."""
    found = {}
    for page in PAGES:
        for fenced, indented in re.findall(
            r"^```(?:sh|bash)\n(.*?)^```$|((?:^    [^\n]*\n)+)", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            if indented and not re.match(r"    (python|pip|bash|make) ", indented):
                continue
            for arguments in said(fenced or indented):
                found[" ".join(arguments)] = arguments
    for script in ROOT.glob("docs/log/*.sh"):
        # Most of their commands differ only in values.
        kinds = {}
        for arguments in said(script.read_text()):
            kinds[tuple(argument.partition("=")[0] for argument in arguments)] = arguments
        found |= {" ".join(arguments): arguments for arguments in kinds.values()}
    return found


def said(block):
    """The commands that bash calls for a block of code, none of which is run."""
    block = block.replace(". .venv/bin/activate", ":")
    shell = ["/bin/bash", "-c", RECORD + block]
    with TemporaryDirectory() as folder:
        output = subprocess.run(shell, cwd=folder, capture_output=True, text=True, check=False).stdout
    return [lines.split("\n") for lines in output.removesuffix("\n\n").split("\n\n") if lines]


def single_jobs(overrides):
    """The jobs of a command: for several swept keys each value once, with the first ones of the others."""
    choices = []
    for override in OverridesParser.create().parse_overrides(overrides):
        values = [override.input_line]
        if override.is_sweep_override():
            key = override.input_line.partition("=")[0]
            values = [f"{key}={value}" for value in override.sweep_string_iterator()]
        choices.append(values)
    firsts = [values[0] for values in choices]
    for job in zip_longest(*choices):
        yield [value or first for value, first in zip(job, firsts, strict=True)]


COMMANDS = commands()


def test_a_list_of_commands_that_are_not_checked_has_no_more_than_there_are():
    assert [start for start in NOT_CHECKED if not any(command.startswith(start) for command in COMMANDS)] == []


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_valid(command):
    """Every command composes, and its configuration passes the checks that come before any work."""
    program, *arguments = COMMANDS[command]
    if program in LAUNCHERS:
        program, *arguments = arguments[next(i for i, a in enumerate(arguments) if not a.startswith("-")) :]
        program, arguments = ("python", [program, *arguments]) if program.endswith(".py") else (program, arguments)
    if command.startswith(tuple(NOT_CHECKED)):
        return
    assert program == "python", f"{command} is neither checked nor listed"
    script, *arguments = arguments
    flags = ("-m", "\\", "--cfg", "job")
    given = [PLACEHOLDERS.get(a, a) for a in arguments if a not in flags and not a.startswith("hydra")]
    given = [a.replace("NAME", "alibi") for a in given if a != "..."]
    for overrides in single_jobs(given):
        if script == "train.py":
            from_scratch = [a for a in overrides if not a.startswith(NEEDS_A_RUN)]
            check(train_values(*from_scratch))
            continue
        name = script.removeprefix("scripts/").removesuffix(".py")
        module = import_module(f"scripts.{name}")
        if name == "judge":  # its other keys are those of train.py
            with composed(name, *overrides) as config:
                values = plain(config)
                module.configurations(
                    parse(module.Arguments, {key: values[key] for key in module.Arguments.model_fields})
                )
            continue
        with composed(name, *overrides) as config:
            parse(module.main.schema, plain(config))


@pytest.mark.long
def test_tables_and_picture_follow_from_the_results(tmp_path):
    spec = importlib.util.spec_from_file_location("docs_results", ROOT / "docs/results.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    for name in RESULTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs/gain.svg").unlink()
    for page in [name for name in RESULTS if name.endswith(".md")]:
        text = (tmp_path / page).read_text()
        (tmp_path / page).write_text(re.sub("(-- made by .*? -->).*?(?=<!-- end)", r"\1\n", text, flags=re.DOTALL))
    program.main([], tmp_path)
    for name in RESULTS:
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes(), f"run python docs/results.py: {name}"


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch):
    """In the folder it lies in; what it claims is asserted in its cells."""
    monkeypatch.chdir(ROOT / "docs")
    names = {}
    for cell in json.loads((ROOT / "docs/tour.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert list(names["table"].index) == ["best possible", "kerple", "rope"]
