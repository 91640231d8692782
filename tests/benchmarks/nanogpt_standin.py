"""The interface of nanoGPT's model.py, written anew: what `benchmarks.peers` needs of a checkout."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

SOURCE = __file__


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_head = c.n_head
        self.ln_1, self.ln_2 = (nn.LayerNorm(c.n_embd, bias=c.bias) for _ in range(2))
        widths = {"c_attn": (c.n_embd, 3 * c.n_embd), "c_proj": (c.n_embd, c.n_embd)}
        self.attn = nn.ModuleDict({name: nn.Linear(*width, bias=c.bias) for name, width in widths.items()})
        widths = {"c_fc": (c.n_embd, 4 * c.n_embd), "c_proj": (4 * c.n_embd, c.n_embd)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*width, bias=c.bias) for name, width in widths.items()})

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for part in self.attn.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        scores = q @ k.mT / q.size(-1) ** 0.5
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.attn.c_proj(y.transpose(1, 2).flatten(-2))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        print("number of parameters: no one should see this")
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(c.vocab_size, c.n_embd),
                "wpe": nn.Embedding(c.block_size, c.n_embd),
                "h": nn.ModuleList(Block(c) for _ in range(c.n_layer)),
                "ln_f": nn.LayerNorm(c.n_embd, bias=c.bias),
            }
        )
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
