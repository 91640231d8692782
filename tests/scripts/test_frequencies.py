"""The picture of the frequencies, and what its command line answers to mistakes."""

import subprocess
import sys

import matplotlib.image
import pytest
from conftest import ROOT


def run(*arguments):
    return subprocess.run(
        [sys.executable, "scripts/frequencies.py", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_draws_a_picture(tmp_path):
    out = tmp_path / "frequencies.png"
    done = run("pe=rope,linear,ntk,dynamic_ntk,yarn,llama3,longrope,p_rope", "head_dim=32", "scale=4", f"out={out}")
    assert (done.returncode, done.stderr) == (0, "")
    height, width, _ = matplotlib.image.imread(out).shape
    assert width > height > 500


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("pe=rop", "did you mean rope?"),
        ("pe=alibi", "pe=alibi has no frequencies to draw"),
        ("head_dim=3", "even number of channels"),
        ("scale=1", "scale='1'"),
        ("scal=3", "did you mean scale?"),
        ("out=picture.pdf", "must end in .png"),
        ("out=no/such/folder/picture.png", "there is no such directory"),
    ],
)
def test_mistakes_are_one_message(argument, message):
    done = run(argument)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
