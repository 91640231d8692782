"""The interface of nanoGPT's model.py, written anew: what `benchmarks.training` needs of a checkout."""

from types import SimpleNamespace as GPTConfig  # noqa: F401

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_head, n = c.n_head, c.n_embd
        self.ln_1, self.ln_2 = (nn.LayerNorm(n, bias=c.bias) for _ in range(2))
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(n, 3 * n, bias=c.bias), "c_proj": nn.Linear(n, n, bias=c.bias)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(n, 4 * n, bias=c.bias), "c_proj": nn.Linear(4 * n, n, bias=c.bias)})

    def forward(self, x):
        qkv = self.attn.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.c_proj(y.transpose(1, 2).flatten(-2))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        print("number of parameters: no one should see this")
        parts = {"wte": nn.Embedding(c.vocab_size, c.n_embd), "wpe": nn.Embedding(c.block_size, c.n_embd)}
        parts |= {"h": nn.ModuleList(Block(c) for _ in range(c.n_layer)), "ln_f": nn.LayerNorm(c.n_embd, bias=c.bias)}
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
