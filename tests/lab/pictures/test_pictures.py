"""Pictures of encodings: what they show equals the formulas, and docs/ has the picture of every encoding."""

import math
import re

import numpy as np
import pytest
import torch
from conftest import ENCODINGS, PRESETS, ROOT, build_gpt, build_pe, pe_options

from lab.pictures import pictures
from lab.pictures.attention_weights import attended, weights_of
from model.position import Shape
from model.position.layer import make_context
from scripts import draw as program

PICTURES = ROOT / "docs" / "pictures"
DISTANCES = torch.arange(512)
TOKENS = 16  # as many as channels of a head


def built(name):
    (part,) = pictures.built(pe_options(name), Shape(128, 4, 4, 32, 128, 1))
    return part[1]


def test_pairs_that_turn_and_meet_new_angles():
    """With base 10,000 and 32 channels, pair i turns 128 / (2 pi 10000^(i/16)) times in 128 tokens."""
    by_hand = 128 / (2 * math.pi * 10000 ** (np.arange(16) / 16))
    seen = pictures.turns(built("rope"), 128, scaled=False)
    np.testing.assert_allclose(seen, by_hand)
    n_slow = (by_hand < 1).sum()
    for name, pairs in {"rope": n_slow, "linear": 0, "yarn": 0, "ntk_by_parts": 0}.items():
        assert pictures.new_angles(seen, pictures.turns(built(name), 512, scaled=True)) == pairs, name


def test_scores_of_rotations_are_mean_cosines_and_those_of_alibi_fall_with_its_slopes():
    angles = DISTANCES[:, None] * 10000 ** -(torch.arange(16) / 16)
    cosines = 4 * (angles.cos().mean(1) - 1)
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    first = DISTANCES[:40]
    expected = {
        "rope": (DISTANCES, cosines.expand(4, -1)),
        "rerope": (DISTANCES, cosines[DISTANCES.clamp(max=64)].expand(4, -1)),
        "alibi": (first, -slopes[:, None] * first),
    }
    for name, (distances, by_hand) in expected.items():
        torch.testing.assert_close(pictures.scores(built(name), distances), by_hand, rtol=0, atol=1e-4)


def test_weights_are_the_output_for_values_that_name_their_token(encoding):
    torch.manual_seed(0)
    pe = build_pe(encoding, n_kv_head=2)
    q = torch.randn(2, 4, TOKENS, 16)
    k = torch.randn(2, 2, TOKENS, 16)
    state = pe.state(torch.randn(2, TOKENS, 64))
    ctx = make_context(pe, torch.arange(TOKENS), TOKENS, TOKENS)

    def attend(v):
        return pe.attend(q, k, v, state, ctx)

    # Channel j of the output is the weight of token j. What an encoding adds to the values is not read from them.
    zeros = torch.zeros_like(k)
    weights = (attend(torch.eye(TOKENS).expand_as(k)) - attend(zeros)).abs()
    found = weights_of(attend, torch.randn_like(k), [5, 15])
    torch.testing.assert_close(found, weights[:, :, [5, 15]], rtol=1e-5, atol=1e-6)


def test_gates_made_of_the_values_are_refused():
    net = build_gpt("cope", pe={"gates": "values"})
    with pytest.raises(ValueError, match=r"pe\.gates=values"):
        attended(net, torch.arange(8)[None], [7])


def numbers_and_words(path):
    """The coordinates of a picture, and what stands between them; the names of shapes are hashes of coordinates."""
    number = r"-?\d+\.?\d*"
    text = re.sub(r"(#|id=\")\w+", "", path.read_text())
    return [float(found) for found in re.findall(number, text)], re.sub(number, "", text)


def test_pictures_made_again_are_those_in_docs(script, tmp_path):
    assert script(program, "encodings=[alibi,gemma3,yarn]", f"out={tmp_path}", "formats=[svg]").code == 0
    made = sorted(tmp_path.iterdir())
    assert [path.name for path in made] == ["alibi.svg", "gemma3.svg", "yarn-turns.svg", "yarn.svg"]
    for path in made:
        numbers, words = numbers_and_words(path)
        committed, same_words = numbers_and_words(PICTURES / path.name)
        assert words == same_words
        np.testing.assert_allclose(numbers, committed, atol=0.5)


def test_every_encoding_has_its_picture_and_its_lines():
    positions, explanation = (
        (ROOT / "docs" / name).read_text() for name in ("positions.md", "from_angles_to_context.md")
    )
    used = set(re.findall(r'src="pictures/([\w-]+)\.svg"', positions + explanation))
    assert used == {path.stem for path in PICTURES.iterdir()}
    for name in (*ENCODINGS, *PRESETS):
        assert name in used
        assert f"`{name}`" in positions
    (code,) = re.findall(r"```python\n(.*?)```", explanation, re.DOTALL)
    exec(code, {})  # it runs


def test_a_run_and_a_page(script, straight, tmp_path):
    run = straight("pe=fox", "eval.lengths=[1]", "eval.variants=[]", "trainer.max_steps=2")
    outcome = script(program, f"run={run}", "length=32", f"out={tmp_path}", f"cache_dir={tmp_path / 'cache'}")
    assert outcome.code == 0, outcome.err
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 2
    assert "what its gates forget" in page
    assert "http" not in re.sub(r'xmlns(:xlink)?="http://www.w3.org/[^"]*"', "", page)  # names of formats are no links
