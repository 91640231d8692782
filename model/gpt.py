"""The network: a decoder-only transformer, its initialisation and its counts."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import GPTConfig
from model import position
from model.attention import Context, KVCache, Positions, recomputed
from model.documents import Documents, PackedContext, find_documents, packed_contexts
from model.position import PositionEncoding, Shape

R = TypeVar("R")
LOGITS = 2**24  # most logits held at once, unless one position of the batch has more


def parse_config(values: Any) -> GPTConfig:
    """The architecture that a file describes. Raises ValueError: names the first field that is wrong."""
    return position.checked(GPTConfig, values)


def _norm(cfg: GPTConfig) -> nn.Module:
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
    return nn.LayerNorm(cfg.dim, eps=cfg.norm_eps, bias=cfg.bias is True)


class Attention(nn.Module):
    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.heads = [cfg.n_head, cfg.kv_heads, cfg.kv_heads]
        self.qkv = nn.Linear(cfg.dim, sum(self.heads) * cfg.head_width, bias=cfg.bias is not False)
        self.out = nn.Linear(cfg.n_head * cfg.head_width, cfg.dim, bias=cfg.bias in (True, "attention"))
        self.norms_heads = cfg.qk_norm != "projection"
        widths = [cfg.head_width * (1 if self.norms_heads else heads) for heads in self.heads[:2]]
        norms = [nn.RMSNorm(width, eps=cfg.norm_eps) if cfg.qk_norm else nn.Identity() for width in widths]
        self.q_norm, self.k_norm = norms
        self.sinks = nn.Parameter(torch.zeros(cfg.n_head)) if cfg.sinks else None

    def forward(
        self, x: Tensor, pe: PositionEncoding, ctx: Context | PackedContext, cache: KVCache | None, layer: int
    ) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (sum(self.heads), -1))  # [B, T, H + 2 Hkv, D]
        q, k, v = qkv.split(self.heads, dim=2)
        if self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        else:
            q, k = self.q_norm(q.flatten(-2)).view_as(q), self.k_norm(k.flatten(-2)).view_as(k)
        q, k = q.to(v.dtype), k.to(v.dtype)  # on CUDA autocast norms in fp32
        state = pe.state(x)
        if isinstance(ctx, PackedContext):
            return self.out(ctx.attend(pe, q, k, v, state, self.sinks).flatten(-2))  # [B, T, C]
        ctx = replace(ctx, sinks=self.sinks)
        if cache is not None:  # it keeps raw keys: a rotation may depend on the length of the text
            held = cache.append(layer, pe.cached_tokens, k=k, v=v, **state)
            k, v, state = held["k"], held["v"], {name: held[name] for name in state}
            ctx = replace(ctx, pos_k=ctx.pos_k[-k.size(1) :])
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # [B, H or Hkv, Tq or Tk, D]
        return self.out(pe(q, k, v, state, ctx).transpose(1, 2).flatten(-2))  # [B, T, C]


class MLP(nn.Module):
    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.gated, gelu = cfg.gated, nn.GELU("none" if cfg.mlp == "gelu_exact" else "tanh")
        self.activation = nn.SiLU() if cfg.mlp == "swiglu" else gelu
        self.up = nn.Linear(cfg.dim, cfg.hidden * (2 if self.gated else 1), bias=cfg.bias is True)
        self.down = nn.Linear(cfg.hidden, cfg.dim, bias=cfg.bias is True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            return self.down(self.activation(gate) * x)
        return self.down(self.activation(x))


class Block(nn.Module):
    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        before, after, self.parallel = cfg.norm_at != "after", cfg.norm_at != "before", cfg.parallel
        self.attn_norm, self.attn = _norm(cfg) if before else nn.Identity(), Attention(cfg)
        self.mlp_norm, self.mlp = _norm(cfg) if before and not cfg.parallel else nn.Identity(), MLP(cfg)
        self.attn_post_norm, self.mlp_post_norm = (_norm(cfg) if after else nn.Identity() for _ in range(2))
        self.dropout = nn.Dropout(cfg.dropout)
        self.position: PositionEncoding | None = None  # its encoding, unless it shares one with other layers

    def forward(
        self, x: Tensor, pe: PositionEncoding, ctx: Context | PackedContext, cache: KVCache | None, layer: int
    ) -> Tensor:
        h = self.attn_norm(x)
        x = x + self.dropout(self.attn_post_norm(self.attn(h, pe, ctx, cache, layer)))
        h = h if self.parallel else self.mlp_norm(x)
        return x + self.dropout(self.mlp_post_norm(self.mlp(h)))


class GPT(nn.Module):
    """Decoder-only transformer. `encodings` holds the position encoding of each layer; layers may share one.

    Args:
        pe: configuration of the position encoding, see `model.position.build_encodings`.
        vocab_size: tokens of the tokenizer; the embedding may be padded beyond it.
        train_len: tokens of a training sequence.
        seed: of the initial weights.
    """

    def __init__(
        self, cfg: GPTConfig, pe: Mapping[str, Any], *, vocab_size: int, train_len: int, seed: int = 0
    ) -> None:
        super().__init__()
        self.cfg, self.vocab_size, self.train_len = cfg, vocab_size, train_len
        self.checkpointing = False  # training keeps the input of each block alone, and computes the rest again
        self.document_end: int | None = None  # token after which no attention looks back; None: there is none
        self.encodings = position.build_encodings(pe, Shape.of(cfg, train_len))  # a list, which registers nothing
        if lacking := {type(pe).__name__ for pe in self.encodings if cfg.sinks and not pe.has_softmax}:
            raise ValueError(f"model.sinks=true takes part in a softmax, which {lacking.pop()} lacks: set it to false")
        rows = math.ceil(vocab_size / cfg.vocab_multiple) * cfg.vocab_multiple
        self.embedding = nn.Embedding(rows, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg) for _ in self.encodings)
        self.positions = nn.ModuleList(p for p in self.distinct_encodings if self.encodings.count(p) > 1)
        for block, encoding in zip(self.blocks, self.encodings, strict=True):
            if encoding not in self.positions:
                block.position = encoding
        self.norm = _norm(cfg)
        self.head = nn.Linear(cfg.dim, rows, bias=False)
        if cfg.tie_embeddings:
            self.head.weight = self.embedding.weight
        if not self.embedding.weight.is_meta:
            self.init_weights(seed)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter in place, each from a generator of its own, seeded by (seed, name): another encoding, or
        one layer more, leaves the other initial tensors bit for bit as they were. They are on the CPU."""

        def generator(name: str) -> torch.Generator:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

        residual_std = self.cfg.init_std / math.sqrt(2 * self.cfg.n_layer)  # GPT-2: keeps the stream's variance
        if self.cfg.tie_embeddings:
            self.head.weight = self.embedding.weight  # `to_empty` unties them
        own = {id(p) for pe in self.encodings for p in pe.parameters()}
        for name, p in self.named_parameters():
            if id(p) in own:
                continue
            if p.ndim == 1:  # norms start as the identity, biases and sinks at zero
                nn.init.constant_(p, 0.0 if name.endswith(("bias", "sinks")) else 1.0)
            else:
                std = residual_std if name.endswith(("attn.out.weight", "mlp.down.weight")) else self.cfg.init_std
                nn.init.normal_(p, 0.0, std, generator(name))
        for pe in self.distinct_encodings:
            pe.init_weights(generator(f"positions.{self.encodings.index(pe)}"))

    @property
    def distinct_encodings(self) -> list[PositionEncoding]:
        """Each instance in `encodings` once."""
        return list(dict.fromkeys(self.encodings))

    @property
    def scales(self) -> tuple[float, ...]:
        """The scales to evaluate at; (1.0,) without a scaled encoding. The first is the one it trains at."""
        return next((pe.scales for pe in self.encodings if len(pe.scales) > 1), self.encodings[0].scales)

    @property
    def max_len(self) -> int | None:
        """Longest text, in tokens, that is defined at the active scale; None: no limit."""
        return min((pe.max_len for pe in self.encodings if pe.max_len is not None), default=None)

    @property
    def family(self) -> str:
        """Networks of one family can read each other's weights without training."""
        return ", ".join(dict.fromkeys(pe.family + ", SSMax" * (pe.temperature == "ssmax") for pe in self.encodings))

    def scale_for(self, length: int) -> float:
        """The scale meant for a text of `length` tokens: beyond train_len the largest."""
        return max(self.scales) if length > self.train_len else self.scales[0]

    @contextmanager
    def at_scale(self, scale: float) -> Iterator[None]:
        """Within it the scaled encodings read at `scale`, one of `scales`, or at their own in its place if they have
        others. One whose window training has filled keeps its scale."""
        scaled = [pe for pe in self.distinct_encodings if len(pe.scales) > 1]
        before = {pe: pe.active_scale for pe in scaled if pe.window is None or pe.window > self.train_len}
        try:
            for pe in before:
                pe.active_scale = dict(zip(self.scales, pe.scales, strict=False)).get(scale, scale)
            yield
        finally:
            for pe, old in before.items():
                pe.active_scale = old

    @contextmanager
    def with_options(self, encodings: list[PositionEncoding]) -> Iterator[None]:
        """Within it each layer's encoding has the options of that in `encodings`, and its own parameters."""
        others = {pe: other for pe, other in zip(self.encodings, encodings, strict=True) if pe is not other}
        before = {pe: dict(vars(pe)) for pe in others}
        for pe, other in others.items():
            vars(pe).update({name: value for name, value in vars(other).items() if name not in vars(nn.Module())})
        try:
            yield
        finally:
            for pe, old in before.items():
                vars(pe).update(old)

    def hidden_states(
        self, idx: Tensor, cache: KVCache | None = None, *, positions: Positions | None = None,
        documents: Documents | None = None,
    ) -> Tensor:  # fmt: skip
        """Final hidden states [B, T, C] of token ids `idx` [B, T], which continue the text in `cache`.

        With `positions` the tokens stand at these places of a longer text of which the others are missing. With
        `documents`, see the method of this name, each is read as if it were alone.
        """
        new = idx.size(1)
        length = new + (0 if cache is None else cache.length)
        pos, length = positions or (torch.arange(length, device=idx.device), length)
        contexts: dict[PositionEncoding, Any]
        if documents is None:
            contexts = {pe: pe.context(pos, new, length) for pe in self.distinct_encodings}
        else:
            assert (cache, positions) == (None, None)
            pos, contexts = packed_contexts(self.distinct_encodings, documents, idx.device)
        x = self.embedding(idx)
        for pe in contexts:
            x = pe.embed(x, pos[..., -new:])
        x = self.dropout(x)
        for i, (block, pe) in enumerate(zip(self.blocks, self.encodings, strict=True)):
            x = (recomputed(block) if self.checkpointing else block)(x, pe, contexts[pe], cache, i)
        return self.norm(x)

    def forward(
        self, idx: Tensor, cache: KVCache | None = None, *, positions: Positions | None = None,
        documents: Documents | None = None, targets: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits [B, T, padded vocabulary] of token ids `idx` int64 [B, T], which continue the text in `cache`.

        With `targets` int64 [B, T] the mean cross-entropy in nats over all but -100: here, to be compiled too.
        """
        hidden = self.hidden_states(idx, cache, positions=positions, documents=documents)
        if targets is None:
            return self.head(hidden)

        def nats(logits: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

        return torch.stack(self.in_pieces(nats, hidden, targets)).sum() / (targets != -100).sum()

    def in_pieces(self, function: Callable[[Tensor, Tensor], R], hidden: Tensor, targets: Tensor) -> list[R]:
        """`function`(logits fp32 [B, t, vocabulary], targets [B, t]) of one piece of the T positions after the other.

        `hidden` is [B, T, C], `targets` [B, T]. A piece has at most LOGITS logits, or one position; without
        `checkpointing`, where gradients are wanted, all positions are one piece.
        """

        def piece(hidden: Tensor, targets: Tensor) -> R:
            return function(self.head(hidden)[..., : self.vocab_size].float(), targets)

        size = hidden.size(1)
        if self.checkpointing or not torch.is_grad_enabled():
            size = max(1, LOGITS // (hidden.size(0) * self.head.out_features))
        one = recomputed(piece) if self.checkpointing else piece
        return [one(*parts) for parts in zip(hidden.split(size, dim=1), targets.split(size, dim=1), strict=True)]

    def documents(self, idx: Tensor) -> Documents | None:
        """The documents in `idx` int64 [B, T], on the CPU, if attention is to stay within them: see `document_end`."""
        return None if self.document_end is None else find_documents(idx, self.document_end)

    def position_metrics(self) -> dict[str, Tensor]:
        """The metrics of the position encoding, averaged over its instances."""
        found = [pe.metrics() for pe in self.distinct_encodings]
        names = {name for metrics in found for name in metrics}
        return {name: torch.stack([m[name] for m in found if name in m]).mean() for name in sorted(names)}

    def new_cache(self) -> KVCache:
        return KVCache(self.cfg.n_layer)

    def n_parameters(self) -> dict[str, int]:
        """Parameter counts: "total"; "embedding", token tables; "position", the encoding's; "body", the rest."""
        total = sum(p.numel() for p in self.parameters())
        embedding = sum(p.numel() for p in {self.embedding.weight, self.head.weight})
        pe = sum(p.numel() for encoding in self.distinct_encodings for p in encoding.parameters())
        return {"total": total, "embedding": embedding, "position": pe, "body": total - embedding - pe}

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of forward and backward for each token of a causal sequence of `length` tokens.

        As PaLM counts (arXiv 2204.02311, appendix B): 6 for each weight of a matrix product, and half of the square of
        attention. What an encoding adds is left out, so that utilisations compare.
        """
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * matrices + 6 * self.cfg.n_layer * self.cfg.n_head * self.cfg.head_width * length
