"""The interface of nanoGPT's model.py over the GPT-2 of transformers: what a benchmark needs of a checkout."""

from types import SimpleNamespace as GPTConfig  # noqa: F401

import torch
import torch.nn.functional as F
import transformers


class GPT(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        print("number of parameters: no one should see this")
        sizes = dict(vocab_size=c.vocab_size, n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer)
        rest = dict(n_head=c.n_head, activation_function="gelu", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        special = dict(bos_token_id=None, eos_token_id=None)
        self.net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rest, **special))
        for name, p in self.net.named_parameters():
            p.requires_grad_(not name.endswith("bias"))  # they are zero

    def load_state_dict(self, weights):
        """Linear layers are [out, in] in nanoGPT and [in, out] in transformers."""
        weights = {name: w.T if ".h." in name and w.ndim == 2 else w for name, w in weights.items()}
        assert not self.net.load_state_dict(weights, strict=False).unexpected_keys

    def forward(self, idx, targets):
        logits = self.net(idx).logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
