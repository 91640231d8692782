"""Only the files of the example in docs/positions.md are added to the project: the universal tests cover it."""

import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from conftest import ROOT, build_gpt, gradients_of, pe_options, tokens
from process_helpers import live

from model import position
from model.position.base import PositionEncoding
from model.position.network import with_parameters_of
from model.position.ops import reset_as_linear

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


def run_tests(project: Path, options: list[str]) -> NoReturn:
    """Run pytest in `project`, as a process that has imported none of our sources, and end."""
    ours = {path.stem for path in ROOT.iterdir()} | {"conftest"}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    os.chdir(project)
    sys.path.insert(0, str(project))
    sys.exit(pytest.main(options))


@pytest.mark.long
def test_the_example_passes_every_universal_test(project):
    options = ["-v", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "-k", "triangle", UNIVERSAL]
    live([], partial(run_tests, project, options), f"{project}/said")
    said = (project / "said").read_text()
    found = re.findall(r"::(\w+)\[[^\]]*triangle[^\]]*\] ([A-Z]+)", said)
    tests = re.findall(
        r"^def (test_\w+)\((?:encoding|placed|name)\b",
        (ROOT / UNIVERSAL).read_text(),
        re.M,
    )

    assert {outcome for _, outcome in found} == {"PASSED"}, said
    assert {test for test, _ in found} == set(tests)


class Projected(PositionEncoding):
    """NoPE whose queries go through a module of the encoding's own."""

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        self.proj = torch.nn.Linear(shape.head_dim, shape.head_dim)

    def reset_parameters(self, generator):
        reset_as_linear(self.proj.weight, generator, self.proj.bias)

    def rotate(self, q, k, ctx):
        return self.proj(q), k


class Forgetful(PositionEncoding):
    """NoPE with an option that it leaves open."""

    def __init__(self, shape, *, reach: int | None = None, **options):
        super().__init__(shape, **options)


class Unshared(PositionEncoding):
    """Adds to the token embeddings, with parameters of each layer's own."""

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        self.added = torch.nn.Parameter(torch.zeros(shape.dim))

    def embed(self, x, layout):
        return x + self.added


@pytest.mark.parametrize(
    ("cls", "message"),
    [(Forgetful, "Forgetful must keep what it has chosen as attributes: reach"), (Unshared, "shared = True")],
)
def test_what_a_class_forgets_is_said(cls, message, monkeypatch):
    monkeypatch.setenv("ROPEWALK_PLUGINS", __name__)
    with pytest.raises(ValueError, match=message):
        build_gpt("nope", pe={"_target_": f"{__name__}.{cls.__name__}"})


def test_the_encodings_of_a_stage_train_the_parameters_of_the_network(monkeypatch):
    """Also those of a module of their own."""
    monkeypatch.setenv("ROPEWALK_PLUGINS", __name__)
    options = {"_target_": f"{__name__}.Projected"}
    net = build_gpt("nope", pe=options)
    of_stage = position.build_encodings(pe_options("nope", **options), position.Shape.of(net.cfg, 64))
    idx = tokens(16)

    loss = net(idx, encodings=with_parameters_of(of_stage, net.encodings), targets=idx)

    assert all(gradient.any() for gradient in gradients_of(loss, net))
