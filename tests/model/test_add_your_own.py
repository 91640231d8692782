"""Only the two files of the example in docs/positions.md are added to the project: the universal tests cover it."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

DOC = (ROOT / "docs" / "positions.md").read_text().partition("## Add your own")[2]


@pytest.fixture
def project(tmp_path):
    """A copy of the project's sources with the files of the example."""
    sources = shutil.ignore_patterns(".*", "__pycache__", "runs", "prepared", "wandb", "build", "*.egg-info")
    shutil.copytree(ROOT, tmp_path, ignore=sources, dirs_exist_ok=True)
    files = dict(re.findall(r"`([\w/]+\.\w+)`\n\n```\w+\n(.*?)```", DOC, flags=re.DOTALL))
    assert set(files) == {"model/position/triangle.py", "conf/pe/triangle.yaml"}
    for path, text in files.items():
        (tmp_path / path).write_text(text)
    return tmp_path


def universal_tests(project, which=""):
    """Outcome of test_encodings.py for the example, of all or of one: {test: passed}."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-vv",
            "-p",
            "no:cacheprovider",
            "-k",
            f"triangle and {which}" if which else "triangle",
            "tests/model/test_encodings.py",
        ],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
    )
    outcomes = re.findall(r"::(\w+)\[triangle.*?\] (\w+)", done.stdout)
    assert outcomes, done.stdout + done.stderr
    return {test: all(o == "PASSED" for t, o in outcomes if t == test) for test, _ in outcomes}


def test_the_example_passes_every_universal_test(project):
    outcomes = universal_tests(project)
    defined = set(re.findall(r"^def (test_\w+)\(encoding", (ROOT / "tests/model/test_encodings.py").read_text(), re.M))
    assert outcomes == dict.fromkeys(defined, True)


def test_the_universal_tests_see_what_is_wrong_with_it(project):
    module = project / "model" / "position" / "triangle.py"
    text = module.read_text()
    chunked = text.replace("self.horizon)", "len(pos_q))")  # a horizon that depends on how the text is cut
    absolute = text.replace("return -self", "return pos_k * -self")
    ignored = text.replace(".clamp(0, self.horizon)", ".clamp(0)").replace("1 / self.horizon", "1.0")
    for broken, blame in (
        (chunked, "test_decoding_and_chunked_prefill_equal_the_full_forward"),
        (absolute, "test_relative_encodings_and_only_they_ignore_a_shift_of_all_positions"),
        (ignored, "test_no_option_is_accepted_and_ignored"),
    ):
        assert broken != text
        module.write_text(broken)
        assert universal_tests(project, blame) == {blame: False}


def test_the_example_is_short():
    module, yaml = re.findall(r"```(?:python|yaml)\n(.*?)```", DOC, flags=re.DOTALL)
    assert len(module.splitlines()) <= 30
    assert len(yaml.splitlines()) <= 5
