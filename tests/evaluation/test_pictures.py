"""Pictures of encodings: what they show equals the formulas, and docs/ has the picture of every encoding."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from conftest import ENCODINGS, PRESETS, ROOT, build_gpt, pe_options

from evaluation import pictures
from model.position import Shape
from scripts import draw as program

PICTURES = ROOT / "docs" / "pictures"
PAGES = {name: (ROOT / "docs" / name).read_text() for name in ("positions.md", "from_angles_to_context.md")}
SHAPE = Shape(128, 4, 4, 32, 128, 1)
DISTANCES = torch.arange(512)


def built(name, **options):
    return pictures.built(pe_options(name, **options), SHAPE)[0][1]


def test_pairs_that_turn_and_meet_new_angles():
    """With base 10,000 and 32 channels, pair i turns 128 / (2 pi 10000^(i/16)) times in 128 tokens."""
    by_hand = [128 / (2 * math.pi * 10000 ** (i / 16)) for i in range(16)]
    seen = pictures.turns(built("rope"), 128, scaled=False)
    np.testing.assert_allclose(seen, by_hand)
    assert sum(turns >= 1 for turns in by_hand) == 6
    new = {"rope": 10, "linear": 0, "yarn": 0, "ntk_by_parts": 0}
    for name, pairs in new.items():
        assert pictures.new_angles(seen, pictures.turns(built(name), 512, scaled=True)) == pairs, name
    assert ">6 of 16 pairs turn within 128 tokens<" in (PICTURES / "rope-turns.svg").read_text()


def test_bands_of_llama3():
    """Llama 3.1: wavelengths below 8192/4 are kept, those above 8192 divided by 8, by its released code."""
    shape = SHAPE._replace(dim=512, head_dim=128, train_len=8192)
    ((_, pe),) = pictures.built(pe_options("llama3", base=500000.0, scale=8.0), shape)
    ratio = pictures.turns(pe, 65536, scaled=True) / pictures.turns(pe, 65536, scaled=False)
    wavelength = np.array([2 * math.pi * 500000 ** (i / 64) for i in range(64)])
    np.testing.assert_allclose(ratio[wavelength < 2048], 1)
    np.testing.assert_allclose(ratio[wavelength > 8192], 1 / 8)
    between = (wavelength > 2048) & (wavelength < 8192)
    assert between.any()
    assert ((ratio[between] > 1 / 8) & (ratio[between] < 1)).all()


def test_scores_by_their_formulas():
    alibi = pictures.scores(built("alibi"), DISTANCES[:40])
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    torch.testing.assert_close(alibi, -slopes[:, None] * DISTANCES[:40], rtol=0, atol=1e-4)

    frequency = torch.tensor([10000 ** -(i / 16) for i in range(16)])
    decay = 4 * ((DISTANCES[:, None] * frequency).cos().mean(1) - 1)
    rope = pictures.scores(built("rope"), DISTANCES)
    torch.testing.assert_close(rope, decay.expand(4, -1), rtol=0, atol=1e-4)
    rerope = pictures.scores(built("rerope"), DISTANCES)
    torch.testing.assert_close(rerope[0], decay[DISTANCES.clamp(max=64)], rtol=0, atol=1e-4)

    # CoPE: a gate of 1/2 for every key, so a position for every two tokens, up to the last of 64.
    half = pictures.scores(built("cope"), DISTANCES)[1]
    position = ((DISTANCES + 1) / 2).clamp(max=63)
    torch.testing.assert_close(half, -(position - position[0]) / 10, rtol=0, atol=1e-4)

    hidden = pictures.scores(built("nope", window=32), DISTANCES[:40])[0]
    assert hidden[:32].tolist() == [0] * 32
    assert hidden[32:].isneginf().all()


@pytest.mark.parametrize("name", ["alibi", "cope_rope", "gemma3", "yarn"])
def test_a_picture_made_again_is_the_one_in_docs(script, tmp_path, name):
    assert script(program, f"encodings=[{name}]", f"out={tmp_path}", "formats=[svg]").code == 0
    files = list(tmp_path.iterdir())
    assert len(files) == (2 if name == "yarn" else 1)
    for path in files:
        made, committed = (ElementTree.parse(folder / path.name).getroot() for folder in (tmp_path, PICTURES))
        assert [e.text for e in made.iter()] == [e.text for e in committed.iter()]
        assert len(list(made.iter())) == len(list(committed.iter()))
        for one, other in zip(made.iter(), committed.iter(), strict=True):
            if re.fullmatch(r"M[-\d. ]+", one.get("d", "")):
                # As curves, since rounding decides which points are left out.
                xy, ab = (np.array(e.get("d")[1:].split(), float).reshape(-1, 2) for e in (one, other))
                at = np.linspace(xy[0, 0], min(xy[-1, 0], ab[-1, 0]), 500)
                np.testing.assert_allclose(np.interp(at, *xy.T), np.interp(at, *ab.T), atol=0.5)
            else:
                numbers = [float(one.get(k, 0)) - float(other.get(k, 0)) for k in ("cx", "cy", "x", "y")]
                np.testing.assert_allclose(numbers, 0, atol=0.3)


def test_every_encoding_has_its_picture_and_its_lines():
    used = {name for page in PAGES.values() for name in re.findall(r'src="pictures/([\w-]+)\.svg"', page)}
    assert used == {path.stem for path in PICTURES.iterdir()}
    assert {*ENCODINGS, *PRESETS} <= used
    for name in (*ENCODINGS, *PRESETS):
        assert f"\n**`{name}`**: " in PAGES["positions.md"], name
    assert sum(path.stat().st_size for path in PICTURES.iterdir()) < 400_000


def test_the_code_of_the_explanation_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["from_angles_to_context.md"], re.DOTALL)
    namespace = {}
    exec(code, namespace)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(namespace["rotation"](7) @ namespace["rotation"](3), namespace["rotation"](-4))


@pytest.mark.parametrize("name", ["rope", "fox", "cope_rope"])
def test_attention_of_a_network(name):
    """The weights times the values are the layer's output, before its projection."""
    net = build_gpt(name)
    ids = torch.arange(40) % 50
    heard = {}
    attention = net.blocks[0].attn
    attention.register_forward_hook(lambda _, inputs, out: heard.update(x=inputs[0], out=out))
    weights, gates = pictures.attention_of(net, ids)
    assert len(weights) == 2
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(4, 40))
    v = attention.split(attention.qkv(heard["x"]))[2][0].repeat_interleave(2, dim=1).transpose(0, 1)  # [H, T, D]
    expected = attention.out((weights[0] @ v).transpose(0, 1).flatten(1))
    torch.testing.assert_close(heard["out"][0], expected, rtol=1e-4, atol=1e-4)
    assert (gates[0] is None) == (name == "rope")
    if gates[0] is not None:
        assert gates[0].shape == (4, 40)
        assert ((gates[0] >= 0) & (gates[0] <= 1)).all()
    assert "attend" not in vars(net.encodings[0])


def test_shares_by_distance():
    """A network that gives half to the first token, a quarter to itself and a quarter to the token before."""
    weights = torch.zeros(1, 8, 8)
    weights[0, :, 0] += 0.5
    weights[0] += 0.25 * torch.eye(8) + 0.25 * torch.eye(8).roll(-1, 1)
    names, shares = pictures.by_distance(weights)
    assert dict(zip(names, shares.tolist(), strict=True)) == {"first": 0.5, "self": 0.25, "1": 0.25, "2": 0, "4": 0}


def test_a_run_and_a_page(script, straight, tmp_path):
    run = straight("pe=fox", "eval.lengths=[1]", "eval.variants=[]", "trainer.max_steps=2")
    outcome = script(program, f"run={run}", "length=32", f"out={tmp_path}", f"cache_dir={tmp_path / 'cache'}")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "attention-16.svg").is_file()
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 2
    assert "what its gates forget" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    wrong = script(program, "encodings=[yarm]", f"out={tmp_path}")
    assert (wrong.code, wrong.out) == (2, "")
    assert "did you mean yarn" in wrong.err
