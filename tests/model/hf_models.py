"""Small models of transformers with random weights."""

import json
from pathlib import Path

import torch
import transformers

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
