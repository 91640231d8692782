"""The network: a pre-norm decoder-only transformer, its initialisation, its counts, and generation."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn

from model import position
from model.attention import KVCache
from model.position import Context, PositionEncoding, Shape


class GPTConfig(BaseModel):
    """Architecture. Widths are in channels; a field left null takes the usual value beside it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    n_layer: int = Field(4, ge=1)
    n_head: int = Field(4, ge=1)
    n_kv_head: int | None = Field(None, ge=1)  # n_head; fewer: grouped-query attention
    dim: int = Field(128, ge=1)
    head_dim: int | None = Field(None, ge=1)  # dim / n_head
    hidden_dim: int | None = Field(None, ge=1)  # 4 dim, or 8/3 dim for swiglu, which has three matrices
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = Field(1e-5, gt=0)
    mlp: Literal["gelu", "gelu_exact", "swiglu"] = "gelu"  # gelu is its tanh approximation, as in GPT-2
    bias: bool | Literal["qkv", "attention"] = False  # of linear layers and LayerNorm, or of those projections alone
    qk_norm: bool = False  # RMSNorm of every query and key, before the rotation
    tie_embeddings: bool = True
    dropout: float = Field(0.0, ge=0, lt=1)  # of the embedding and of each branch, not of attention weights
    init_std: float = Field(0.02, gt=0)
    vocab_multiple: int = Field(1, ge=1)  # the vocabulary is padded to a multiple of this; 64 suits GPUs

    @model_validator(mode="after")
    def _divisible(self) -> "GPTConfig":
        if self.head_dim is None and self.dim % self.n_head:
            near = [h for h in range(1, self.dim + 1) if self.dim % h == 0]
            best = min(near, key=lambda h: abs(h - self.n_head))
            raise ValueError(
                f"model.n_head={self.n_head} does not divide model.dim={self.dim}; try model.n_head={best}"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}")
        return self

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.n_head

    @property
    def hidden(self) -> int:
        if self.hidden_dim:
            return self.hidden_dim
        return -(-8 * self.dim // 3 // 8) * 8 if self.mlp == "swiglu" else 4 * self.dim  # to a multiple of 8

    def shape(self, train_len: int) -> Shape:
        """What the position encoding may know of the network."""
        return Shape(self.dim, self.n_head, self.head_width, train_len, n_layer=self.n_layer, n_kv_head=self.kv_heads)

    def padded(self, vocab_size: int) -> int:
        return math.ceil(vocab_size / self.vocab_multiple) * self.vocab_multiple


def parse_config(values: Any) -> GPTConfig:
    """The architecture that a file describes. Raises ValueError: names the first field that is wrong."""
    try:
        return GPTConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = f"{first['loc'][0]}={first['input']!r}: " if first["loc"] else ""
        raise ValueError(f"{where}{first['msg']}") from None


def _norm(cfg: GPTConfig, dim: int) -> nn.Module:
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(dim, eps=cfg.norm_eps)
    return nn.LayerNorm(dim, eps=cfg.norm_eps, bias=cfg.bias is True)


class Attention(nn.Module):
    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.heads = [cfg.n_head, cfg.kv_heads, cfg.kv_heads]
        self.qkv = nn.Linear(cfg.dim, sum(self.heads) * cfg.head_width, bias=cfg.bias is not False)
        self.out = nn.Linear(cfg.n_head * cfg.head_width, cfg.dim, bias=cfg.bias in (True, "attention"))
        self.q_norm = nn.RMSNorm(cfg.head_width, eps=cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(cfg.head_width, eps=cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(self, x: Tensor, pe: PositionEncoding, ctx: Context, cache: KVCache | None, layer: int) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (sum(self.heads), -1)).transpose(1, 2)  # [B, H + 2 Hkv, T, D]
        q, k, v = qkv.split(self.heads, dim=1)
        q, k = pe.rotate(self.q_norm(q), ctx.rot_q), self.k_norm(k)
        if pe.cache_rotated:
            k = pe.rotate_key(k, ctx.rot_k)
        k = pe.cached_keys(k, x)
        if cache is not None:
            k, v = cache.append(layer, k, v)  # [B, Hkv, Tk, D]
        if not pe.cache_rotated:
            k = pe.rotate_key(k, ctx.rot_k)
        return self.out(pe.attention(q, k, v, ctx).transpose(1, 2).flatten(-2))  # [B, T, C]


class MLP(nn.Module):
    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.gated = cfg.mlp == "swiglu"
        self.approximate = "none" if cfg.mlp == "gelu_exact" else "tanh"
        self.up = nn.Linear(cfg.dim, cfg.hidden * (2 if self.gated else 1), bias=cfg.bias is True)
        self.down = nn.Linear(cfg.hidden, cfg.dim, bias=cfg.bias is True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            return self.down(F.silu(gate) * x)
        return self.down(F.gelu(x, approximate=self.approximate))


class Block(nn.Module):
    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.attn_norm, self.attn = _norm(cfg, cfg.dim), Attention(cfg)
        self.mlp_norm, self.mlp = _norm(cfg, cfg.dim), MLP(cfg)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, pe: PositionEncoding, ctx: Context, cache: KVCache | None, layer: int) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), pe, ctx, cache, layer))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Decoder-only transformer.

    Args:
        cfg: the architecture.
        pe: configuration of the position encoding, see `model.position.build`.
        vocab_size: tokens of the tokenizer; the embedding may be padded beyond it.
        train_len: tokens of a training sequence.
        seed: of the initial weights.
    """

    def __init__(
        self, cfg: GPTConfig, pe: Mapping[str, Any], *, vocab_size: int, train_len: int, seed: int = 0
    ) -> None:
        super().__init__()
        self.cfg, self.vocab_size, self.train_len = cfg, vocab_size, train_len
        self.embedding = nn.Embedding(cfg.padded(vocab_size), cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = _norm(cfg, cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.padded(vocab_size), bias=False)
        if cfg.tie_embeddings:
            self.head.weight = self.embedding.weight
        shape = cfg.shape(train_len)
        first = position.build(pe, shape)
        own = cfg.n_layer if first.per_layer else 1
        others = [position.build(pe, shape._replace(layer=i)) for i in range(1, own)]
        self.positions = nn.ModuleList([first, *others])
        if not self.embedding.weight.is_meta:
            self.init_weights(seed)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter in place.

        Each draws from a generator of its own, seeded by (seed, name): another encoding, or one layer more, leaves
        the other initial tensors bit for bit as they were, on every device.
        """

        def generator(name: str) -> torch.Generator:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

        residual_std = self.cfg.init_std / math.sqrt(2 * self.cfg.n_layer)  # GPT-2: keeps the stream's variance
        if self.cfg.tie_embeddings:
            self.head.weight = self.embedding.weight  # `to_empty` unties them
        with torch.no_grad():
            for name, p in self.named_parameters():
                if name.startswith("positions."):
                    continue
                if p.ndim == 1:  # norms start as the identity, biases at zero
                    p.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    std = residual_std if name.endswith(("attn.out.weight", "mlp.down.weight")) else self.cfg.init_std
                    p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=generator(name)))
            for i, pe in enumerate(self.encodings):
                pe.reset_parameters(generator(f"positions.{i}"))

    @property
    def encodings(self) -> list[PositionEncoding]:
        """The position encoding's instances: one, or one for each block."""
        return cast(list[PositionEncoding], list(self.positions))

    def hidden(self, idx: Tensor, cache: KVCache | None = None, *, offset: int = 0) -> Tensor:
        """Final hidden states [B, T, C] of token ids `idx` [B, T], which continue the text in `cache`.

        `offset` shifts all positions: a relative encoding must not notice.
        """
        past = 0 if cache is None else cache.length
        length = past + idx.size(1)
        pos_k = torch.arange(offset, offset + length, device=idx.device)
        pos_q = pos_k[past:]
        contexts = [pe.context(pos_q, pos_k, length, whole=past == 0) for pe in self.encodings]
        x = self.dropout(self.encodings[0].embed(self.embedding(idx), pos_q))
        for i, block in enumerate(self.blocks):
            own = i if len(contexts) > 1 else 0
            x = block(x, self.positions[own], contexts[own], cache, i)
        return self.norm(x)

    def forward(
        self, idx: Tensor, cache: KVCache | None = None, *, offset: int = 0, targets: Tensor | None = None
    ) -> Tensor:
        """Logits [B, T, padded vocabulary] of token ids `idx` int64 [B, T]; with a cache, of its continuation.

        With `targets` int64 [B, T] the mean cross-entropy in nats over those that are scored: -100, as in torch, is
        not. It is part of the forward so that it is compiled with it.
        """
        logits = self.head(self.hidden(idx, cache, offset=offset))
        if targets is None:
            return logits
        return F.cross_entropy(logits[..., : self.vocab_size].flatten(0, 1).float(), targets.flatten())

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of `targets`, see `forward`."""
        return self(idx, targets=targets)

    @contextmanager
    def reading(self, choose: Callable[[PositionEncoding], PositionEncoding]) -> Iterator[PositionEncoding]:
        """Within it the network reads as `choose` tells, one of `PositionEncoding.readings`; gives its instance."""
        trained = self.positions
        self.positions = nn.ModuleList(choose(pe) for pe in self.encodings)
        try:
            yield self.encodings[0]
        finally:
            self.positions = trained

    def position_metrics(self) -> dict[str, Tensor]:
        """The metrics of the position encoding, averaged over its instances."""
        found = [pe.metrics() for pe in self.encodings]
        names = {name for metrics in found for name in metrics}
        return {name: torch.stack([m[name] for m in found if name in m]).mean() for name in sorted(names)}

    def new_cache(self) -> KVCache:
        return KVCache(self.cfg.n_layer)

    def check_tokens(self, idx: Tensor) -> None:
        """Raise ValueError if an id of `idx` is outside of the vocabulary."""
        low, high = int(idx.min()), int(idx.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(
                f"token id {bad} is outside of the vocabulary 0..{self.vocab_size - 1}: another tokenizer?"
            )

    @torch.inference_mode()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        chunk: int = 1024,
    ) -> Iterator[Tensor]:
        """Continue the prompts `idx` int64 [B, T], yielding one int64 [B] at a time.

        Args:
            temperature: 0 takes the most probable token.
            top_k: keep the k most probable tokens. top_p: keep the smallest set with this probability.
            chunk: tokens of the prompt read in one pass, which bounds the memory.

        Raises:
            ValueError: an empty prompt, an id outside of the vocabulary, an option out of range, or a text longer
                than the encoding is defined for.
        """
        if idx.numel() == 0:
            raise ValueError("the prompt is empty: give at least one token")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        if temperature < 0:
            raise ValueError(f"temperature={temperature:g} must not be negative")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k={top_k} must be at least 1")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p:g} must be in (0, 1]")
        self.check_tokens(idx)
        limit = self.encodings[0].max_len
        if limit is not None and idx.size(1) + max_new_tokens > limit:
            raise ValueError(
                f"{idx.size(1)} prompt tokens and {max_new_tokens} new ones exceed the encoding's {limit} positions"
            )
        generator = torch.Generator(idx.device).manual_seed(seed)
        cache = self.new_cache()
        for piece in idx.split(chunk, dim=1):
            hidden = self.hidden(piece, cache)
        for i in range(max_new_tokens):
            logits = self.head(hidden[:, -1])[:, : self.vocab_size].float()
            token = _sample(logits, temperature, top_k, top_p, generator)  # [B]
            yield token
            if i + 1 < max_new_tokens:
                hidden = self.hidden(token[:, None], cache)

    def n_parameters(self) -> dict[str, int]:
        """Parameter counts: "total"; "embedding", token tables; "position", the encoding's; "body", the rest."""
        total = sum(p.numel() for p in self.parameters())
        embedding = sum(p.numel() for p in {self.embedding.weight, self.head.weight})
        pe = sum(p.numel() for p in self.positions.parameters())
        return {"total": total, "embedding": embedding, "position": pe, "body": total - embedding - pe}

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of forward and backward for each token of a causal sequence of `length` tokens.

        Six for each weight of a matrix product (PaLM, arXiv 2204.02311, appendix B), and for the two products of
        attention 6 * length in each layer and channel of its heads, half of the square because a token sees its past
        only. What an encoding adds is left out, so that utilisations compare.
        """
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * matrices + 6 * self.cfg.n_layer * self.cfg.n_head * self.cfg.head_width * length


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """One token for each row of `logits` [B, V]: int64 [B]."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the tokens before it reach top_p already
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
