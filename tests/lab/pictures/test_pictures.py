"""Pictures of encodings: what they show equals the formulas, and docs/ has the picture of every encoding."""

import itertools
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from conftest import ENCODINGS, PRESETS, ROOT, attend, build_gpt, build_pe, data_options, normal, pe_options

from data.base import build_data
from lab.pictures import pictures
from lab.pictures.attention_weights import attended, weights_of
from model.position import Shape
from model.position.network import view
from scripts import draw as program

DOCS = ROOT / "docs"


def built(name):
    (part,) = pictures.built(pe_options(name), Shape(128, 4, 4, 32, 128, 1))
    return part[1]


def test_pairs_turn_as_the_formula_says_and_scaling_spares_them_new_angles():
    """With base 10,000 and 32 channels, pair i turns 128 / (2 pi 10000^(i/16)) times in 128 tokens."""
    by_hand = 128 / (2 * math.pi * 10000 ** (np.arange(16) / 16))
    seen = pictures.turns(built("rope"), 128, scaled=False)
    np.testing.assert_allclose(seen, by_hand)
    n_slow = (by_hand < 1).sum()
    pairs = {
        "rope": n_slow,
        "linear": 0,
        "yarn": 0,
        "ntk_by_parts": 0,
    }
    for name, expected in pairs.items():
        met = pictures.turns(built(name), 512, scaled=True)
        assert pictures.new_angles(seen, met) == expected, name


def test_scores_of_rotations_are_mean_cosines_and_those_of_alibi_fall_with_its_slopes():
    distances = torch.arange(512)
    angles = distances[:, None] * 10000 ** -(torch.arange(16) / 16)
    cosines = 4 * (angles.cos().mean(1) - 1)
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    expected = {
        "rope": cosines.expand(4, -1),
        "rerope": cosines[distances.clamp(max=64)].expand(4, -1),
        "alibi": -slopes[:, None] * distances[:40],
    }
    for name, by_hand in expected.items():
        found = pictures.scores(built(name), distances[: by_hand.size(1)])
        torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-4)


def test_weights_are_the_output_for_values_that_name_their_token(encoding):
    pe = build_pe(encoding, n_kv_head=2)
    q, k, v, x = normal(
        (2, 4, 16, 16),
        (2, 2, 16, 16),
        (2, 2, 16, 16),
        (2, 16, 64),
    )
    read = partial(attend, pe, q, k, x=x)
    # Channel j of the output is the weight of token j. What an encoding adds to the values is not read from them.
    names = torch.eye(16).expand_as(v)
    weights = (read(names) - read(torch.zeros_like(v))).abs()
    found = weights_of(read, v, [5, 15])
    torch.testing.assert_close(found, weights[:, :, [5, 15]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["cope", "fox", "fox_rope"])
def test_what_is_counted_and_kept_is_as_the_formulas_say(name):
    """The gates of CoPE are sigmoid(q.k / sqrt(D)); FoX multiplies the gates after a key."""
    net = build_gpt(name)
    seen = []

    def recorder(pe):
        def record(q, k, v, state, ctx):
            seen.append((q, k, state))
            return type(pe).attend(pe, q, k, v, state, ctx)

        return record

    ids = torch.arange(12)
    net.hidden_states(ids[None], encodings=[view(pe, attend=recorder(pe)) for pe in net.encodings])
    found = pictures.counted(net, ids)

    assert [layer for layer, _, _ in found] == [1, 2]
    for (q, k, state), (_, kind, shares) in zip(seen, found, strict=True):
        for head, key in itertools.product(range(4), range(12)):
            if name == "cope":
                expected = torch.sigmoid(q[0, head, -1] @ k[0, head // 2, key] / 4)
            else:
                expected = state["log_gates"][0, key + 1 :, head].exp().prod()
            torch.testing.assert_close(shares[head, key].float(), expected)
        assert kind == ("gates" if name == "cope" else "left")


def test_a_question_of_a_task_ends_where_the_answer_is_asked_for():
    data = build_data(data_options("counting"))
    ids = pictures.question(data, 64)
    assert data.decode(ids[-1:].tolist()) == "a?"
    assert len(ids) == 64


def test_gates_made_of_the_values_are_refused():
    net = build_gpt("cope", pe={"gates": "values"})
    with pytest.raises(ValueError, match=r"pe\.gates=values"):
        attended(net, torch.arange(8)[None], [7])


def test_the_docs_name_every_encoding_and_show_every_picture():
    positions = (DOCS / "positions.md").read_text()
    explanation = (DOCS / "from_angles_to_context.md").read_text()
    shown = set(re.findall(r"pictures/([\w-]+)\.svg", positions + explanation))
    named = set(re.findall(r"`(\w+)`", positions))
    assert shown == {path.stem for path in (DOCS / "pictures").iterdir()}
    assert (shown & named).issuperset([*ENCODINGS, *PRESETS])


def test_a_picture_of_a_run_shows_its_attention_and_needs_nothing(script, straight, tmp_path):
    run = straight("pe=fox", "eval.lengths=[1]", "eval.variants=[]", "trainer.max_steps=2")
    outcome = script(
        program,
        f"run={run}",
        "length=32",
        f"out={tmp_path}",
        f"cache_dir={tmp_path}/cache",
    )
    assert outcome.code == 0, outcome.err
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 3
    assert "how much of a key is left" in page
    assert "http" not in re.sub(r'xmlns(:xlink)?="http://www.w3.org/[^"]*"', "", page)  # names of formats are no links
