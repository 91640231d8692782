"""Only the files of the example in docs/positions.md are added to the project: the universal tests cover it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

DOC = (ROOT / "docs" / "positions.md").read_text().partition("## Add your own")[2]
UNIVERSAL = "tests/model/test_encodings.py"


@pytest.fixture
def project(tmp_path):
    """A copy of the project's sources with the files of the example."""
    for name in ("model", "conf", "data", "tests/conftest.py", UNIVERSAL):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target)
    files = dict(re.findall(r"`([\w/]+\.\w+)`\n\n```\w+\n(.*?)```", DOC, flags=re.DOTALL))
    assert {Path(path).name for path in files} == {"triangle.py", "triangle.yaml"}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def universal_tests(project, which="triangle"):
    """Outcome of the universal tests for the example: {(encoding, test): whether it passed in every case}."""
    plugins = {path.relative_to(project).parts[0] for path in project.rglob("triangle.py")} - {"model"}
    command = [
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        ".",
        "-k",
        which,
        UNIVERSAL,
    ]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(project), "ROPEWALK_PLUGINS": ",".join(plugins)},
        capture_output=True,
        text=True,
    )
    found = re.findall(r"::(\w+)\[[^\]]*(triangle[a-z]*)[^\]]*\] ([A-Z]+)", done.stdout)
    assert found, done.stdout + done.stderr
    return {(name, test): all(o == "PASSED" for t, n, o in found if (n, t) == (name, test)) for test, name, _ in found}


def test_the_example_passes_every_universal_test(project):
    defined = re.findall(r"^def (test_\w+)\((?:encoding|placed|name)\b", (ROOT / UNIVERSAL).read_text(), re.M)
    assert universal_tests(project) == {("triangle", test): True for test in defined}


def test_the_universal_tests_see_what_is_wrong_with_it(project):
    wrong = {  # a horizon that depends on how the text is cut; a bias that is absolute; an option without effect
        "cut": (
            "self.horizon)  #",
            "ctx.pos_q.size(0))  #",
            "test_decoding_and_chunked_prefill_equal_the_full_forward",
        ),
        "absolute": (
            "return -self",
            "return ctx.pos_k * -self",
            "test_absolute_encodings_and_only_they_notice_a_shift_of_all_positions",
        ),
        "ignored": (".clamp(0, self.horizon)", ".clamp(0, 7)", "test_no_option_is_accepted_and_ignored"),
    }
    (module,), (config,) = project.rglob("triangle.py"), project.rglob("triangle.yaml")
    text, options = module.read_text().replace("1 / self.horizon", "1.0"), config.read_text()
    for name, (old, new, _) in wrong.items():
        assert old in text
        (module.parent / f"triangle{name}.py").write_text(text.replace(old, new))
        renamed = options.replace(".triangle.", f".triangle{name}.").replace("name: triangle", f"name: triangle{name}")
        (config.parent / f"triangle{name}.yaml").write_text(renamed)
    which = " or ".join(f"(triangle{name} and {blame})" for name, (*_, blame) in wrong.items())
    assert universal_tests(project, which) == {(f"triangle{n}", blame): False for n, (*_, blame) in wrong.items()}
