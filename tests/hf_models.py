"""Small models of transformers with random weights, and our network with those of a folder."""

import math
from pathlib import Path

import torch
import transformers

from conf.schema import GPTConfig
from lab.ropecheck.rope import FULL, inv_freq, lengths, settings
from model.cache import Cache
from model.gpt import GPT
from model.position.rotary import Rotary
from ropewalk.hf import export, read_model

TOKENS = 32  # original length
VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TOKENS,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2 * TOKENS}


def hf_model(kind: str, **options):
    """A small model of transformers with random weights, norms and biases too, large enough to matter."""
    config = transformers.AutoConfig.for_model(kind, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.2)
    return model.eval()


def network(pretrained) -> GPT:
    """Our network with the weights of a model of transformers."""
    said = pretrained.describe()
    cfg = GPTConfig(**said["model"])
    net = GPT(
        cfg,
        said["pe"],
        vocab_size=said["vocab_size"],
        train_len=said["train_len"],
    )
    net.load_state_dict(pretrained.state_dict())
    return net.eval()


def exported(net, pe, folder: Path, **options):
    """The model of transformers in the folder that an export of our network writes."""
    export(net, {"pe": pe, "original_len": net.train_len}, folder, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def tokens(length: int) -> torch.Tensor:
    return torch.randint(
        VOCAB,
        (2, length),
        generator=torch.Generator().manual_seed(1),
    )


@torch.no_grad()
def assert_same_logits(net, model, length: int, encodings=None) -> None:
    """At once, and where angles do not depend on the length in two pieces through our cache."""
    idx = tokens(length)
    expected = model(idx).logits
    assert expected.std() > 0.3

    logits = net(idx, encodings=encodings)
    torch.testing.assert_close(logits[..., :VOCAB], expected, rtol=1e-5, atol=1e-5)

    if type(net.encodings[0]).__name__ in ("DynamicNTK", "LongRope"):
        return
    cache = Cache()
    first = net(idx[:, :-3], encodings=encodings, cache=cache)
    last = net(idx[:, -3:], encodings=encodings, cache=cache)
    logits = torch.cat([first, last], dim=1)
    torch.testing.assert_close(logits[..., :VOCAB], expected, rtol=1e-5, atol=1e-5)


def assert_rotates_by(config, encodings) -> None:
    """Each layer rotates and sharpens as ropecheck reads a config.json, both in float64."""
    kinds = config.get("layer_types") or [FULL] * len(encodings)
    for kind, pe in zip(kinds, encodings, strict=True):
        if not isinstance(pe, Rotary):
            continue
        for length in lengths(settings(config)["original"]):
            said = settings(config, kind, length)
            expected = torch.from_numpy(inv_freq(said))
            torch.testing.assert_close(pe.frequencies(length), expected, rtol=1e-12, atol=0)
            assert math.isclose(pe.logit_scale, said["attention_factor"] ** 2, rel_tol=1e-12)


def assert_both_ways(model, folder: Path) -> None:
    """A model of transformers, saved in `folder`, is read, written and read again; all have the same logits."""
    pretrained = read_model(f"hf:{folder}")
    net = network(pretrained)
    written = exported(net, pretrained.pe, folder.with_name("out"))
    for length in (TOKENS - 1, 2 * TOKENS):
        assert_same_logits(net, model, length)
        assert_same_logits(net, written, length)

    again = network(read_model(folder.with_name("out")))
    assert again.cfg == net.cfg
    torch.testing.assert_close(again.state_dict(), net.state_dict(), rtol=0, atol=0)
    assert_same_logits(again, model, 2 * TOKENS)
