"""Small models of transformers with random weights."""

import json
from pathlib import Path

import torch
import transformers

from model.pretrained import export, load_pretrained

TOKENS, VOCAB = 32, 61  # original length; vocabulary
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=TOKENS,
)
GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=2 * TOKENS)


def hf_model(kind: str, **options):
    """A small model of transformers with random weights, norms and biases too, large enough to matter."""
    config = transformers.AutoConfig.for_model(kind, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.2)
    return model.eval()


def tokens(length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


def edit(folder: Path, **changes) -> None:
    """Change keys of config.json; `...` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@torch.no_grad()
def assert_same_logits(net, model, length: int) -> None:
    theirs = model(tokens(length)).logits
    assert theirs.std() > 0.3
    torch.testing.assert_close(net(tokens(length)), theirs, rtol=1e-5, atol=1e-5)


def assert_round_trip(pretrained, folder: Path) -> None:
    export(pretrained.net, folder)
    again = load_pretrained(f"hf:{folder}")
    assert again.describe() | {"tokenizer": None} == pretrained.describe() | {"tokenizer": None}
    ours, theirs = again.net.state_dict(), pretrained.net.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
