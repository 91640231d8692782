"""Pictures of encodings: what they show equals the formulas, and docs/ has the picture of every encoding."""

import math
import re

import numpy as np
import pytest
import torch
from conftest import ENCODINGS, PRESETS, ROOT, build_gpt, build_pe, pe_options

from lab.pictures import pictures
from lab.pictures.attention_weights import weights_of
from model.position import Shape
from model.position.layer import make_context
from scripts import draw as program

PICTURES = ROOT / "docs" / "pictures"
PAGES = {name: (ROOT / "docs" / name).read_text() for name in ("positions.md", "from_angles_to_context.md")}
SHAPE = Shape(128, 4, 4, 32, 128, 1)
DISTANCES = torch.arange(512)


def built(name, **options):
    return pictures.built(pe_options(name, **options), SHAPE)[0][1]


def assert_close(scores, expected):
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)


def test_pairs_that_turn_and_meet_new_angles():
    """With base 10,000 and 32 channels, pair i turns 128 / (2 pi 10000^(i/16)) times in 128 tokens."""
    by_hand = 128 / (2 * math.pi * 10000 ** (np.arange(16) / 16))
    seen = pictures.turns(built("rope"), 128, scaled=False)
    np.testing.assert_allclose(seen, by_hand)
    assert (by_hand >= 1).sum() == 6
    new = {"rope": 10, "linear": 0, "yarn": 0, "ntk_by_parts": 0}
    for name, pairs in new.items():
        assert pictures.new_angles(seen, pictures.turns(built(name), 512, scaled=True)) == pairs, name


def test_scores_of_alibi_fall_with_the_slopes_of_its_heads():
    distances = DISTANCES[:40]
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    assert_close(pictures.scores(built("alibi"), distances), -slopes[:, None] * distances)


def test_scores_of_rotations_are_mean_cosines():
    frequency = 10000 ** -(torch.arange(16) / 16)
    cosines = (DISTANCES[:, None] * frequency).cos()
    decay = 4 * (cosines.mean(1) - 1)
    assert_close(pictures.scores(built("rope"), DISTANCES), decay.expand(4, -1))
    rerope = pictures.scores(built("rerope"), DISTANCES)
    assert_close(rerope[0], decay[DISTANCES.clamp(max=64)])


@pytest.mark.parametrize("name", ["alibi", "gemma3", "yarn"])
def test_a_picture_made_again_is_the_one_in_docs(script, tmp_path, name):
    assert script(program, f"encodings=[{name}]", f"out={tmp_path}", "formats=[svg]").code == 0
    files = list(tmp_path.iterdir())
    assert len(files) == (2 if name == "yarn" else 1)
    for path in files:
        made, committed = (numbers_and_words(folder / path.name) for folder in (tmp_path, PICTURES))
        assert made[1] == committed[1]
        np.testing.assert_allclose(made[0], committed[0], atol=0.5)


def numbers_and_words(path):
    """The coordinates of a picture, and what stands between them; the names of shapes are hashes of coordinates."""
    text = re.sub(r"(#|id=\")\w+", "", path.read_text())
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text)], re.sub(r"-?\d+\.?\d*", "", text)


def test_every_encoding_has_its_picture_and_its_lines():
    used = set()
    for page in PAGES.values():
        used.update(re.findall(r'src="pictures/([\w-]+)\.svg"', page))
    assert used == {path.stem for path in PICTURES.iterdir()}
    assert {*ENCODINGS, *PRESETS} <= used
    for name in (*ENCODINGS, *PRESETS):
        assert f"`{name}`" in PAGES["positions.md"], name
    assert sum(path.stat().st_size for path in PICTURES.iterdir()) < 650_000


def test_the_code_of_the_explanation_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["from_angles_to_context.md"], re.DOTALL)
    exec(code, {})


def test_gates_of_fox_are_what_it_forgets():
    """A weight is that without position, times what each token after the key has left of it."""
    (layer, _) = pictures.attention_of(build_gpt("fox"), torch.arange(40))
    nope = build_pe("nope", n_kv_head=2)
    ctx = make_context(nope, torch.arange(40), 40, 40)
    plain = weights_of(lambda v: nope.attend(layer.q, layer.k, v, {}, ctx), layer.k, [39])[0, :, 0]
    left = 1 - pictures.gates_of(layer)  # [H, T]
    for head in range(4):
        expected = plain[head].clone()
        for key in range(40):
            expected[key] *= left[head, key + 1 :].prod()
        expected /= expected.sum()
        torch.testing.assert_close(layer.weights[0, head, -1], expected, rtol=1e-4, atol=1e-6)


def test_a_run_and_a_page(script, straight, tmp_path):
    run = straight("pe=fox", "eval.lengths=[1]", "eval.variants=[]", "trainer.max_steps=2")
    outcome = script(program, f"run={run}", "length=32", f"out={tmp_path}", f"cache_dir={tmp_path / 'cache'}")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "attention-16.svg").is_file()
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 2
    assert "what its gates forget" in page
    assert "http" not in re.sub(r'xmlns(:xlink)?="http://www.w3.org/[^"]*"', "", page)  # names of formats are no links
    wrong = script(program, "encodings=[yarm]", f"out={tmp_path}")
    assert (wrong.code, wrong.out) == (2, "")
    assert "did you mean yarn" in wrong.err
