"""The network: a decoder-only transformer and its initial weights."""

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import GPTConfig
from model import position
from model.attention import Context, exactly, recomputed
from model.cache import Cache
from model.layout import IGNORE_INDEX, WHOLE, Layout
from model.mix import CONV_OLD_NAME, Mix
from model.position import PositionEncoding, Shape
from model.position.layer import init_parameters

R = TypeVar("R")
# The most logits that are held at once, 64 MiB in fp32, unless a single position of the batch has more.
MAX_LOGITS = 2**24


def _norm(cfg: GPTConfig) -> nn.Module:
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
    return nn.LayerNorm(cfg.dim, eps=cfg.norm_eps, bias=cfg.bias is True)


class Attention(nn.Module):
    """One layer's attention: projections, norms of queries and keys, sinks. Context and encoding do the rest."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.head_counts = [cfg.n_head, cfg.kv_heads, cfg.kv_heads]  # of q, k and v
        self.qkv = nn.Linear(cfg.dim, sum(self.head_counts) * cfg.head_width, bias=cfg.bias is not False)
        self.out = nn.Linear(cfg.n_head * cfg.head_width, cfg.dim, bias=cfg.bias in (True, "attention"))
        self.mix = Mix(cfg, self.qkv.out_features)
        # Each head is normed by itself, as in Gemma 3; or all heads of a token together, as in OLMo 2.
        self.norm_per_head = cfg.qk_norm != "projection"

        def norm(heads: int) -> nn.Module:
            if not cfg.qk_norm:
                return nn.Identity()
            normed_heads = 1 if self.norm_per_head else heads
            return nn.RMSNorm(normed_heads * cfg.head_width, eps=cfg.norm_eps)

        self.q_norm = norm(cfg.n_head)
        self.k_norm = norm(cfg.kv_heads)
        self.sinks = nn.Parameter(torch.zeros(cfg.n_head)) if cfg.sinks else None

    def forward(self, x: Tensor, pe: PositionEncoding, ctx: Context) -> Tensor:
        qkv = self.mix.convolved(self.qkv(x), ctx)  # [B, T, (H + 2 Hkv) D]
        q, k, v = self.split(qkv)
        k = self.mix.with_offset(k, ctx)
        heads = ctx.attend(pe, q, k, v, pe.state(x), layer=self, sinks=self.sinks)  # [B, T, H, D]
        return self.out(heads.flatten(2))

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, Hkv, D] of the projections `qkv` [B, T, (H + 2 Hkv) D]."""
        qkv = qkv.unflatten(-1, (sum(self.head_counts), -1))  # [B, T, H + 2 Hkv, D]
        q, k, v = qkv.split(self.head_counts, dim=2)  # [B, T, H, D], twice [B, T, Hkv, D]
        if self.norm_per_head:
            q = self.q_norm(q)
            k = self.k_norm(k)
        else:
            q = self.q_norm(q.flatten(2)).view_as(q)  # normed as [B, T, H D]
            k = self.k_norm(k.flatten(2)).view_as(k)
        # On CUDA autocast computes norms in fp32. Without the casts all of attention would follow in fp32.
        return q.to(v.dtype), k.to(v.dtype), v


class MLP(nn.Module):
    """One layer's feed-forward network, gated or not."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.gated = cfg.gated
        if cfg.mlp == "swiglu":
            self.activation: nn.Module = nn.SiLU()
        else:
            self.activation = nn.GELU("none" if cfg.mlp == "gelu_exact" else "tanh")
        self.up = nn.Linear(cfg.dim, cfg.hidden * (2 if self.gated else 1), bias=cfg.bias is True)
        self.down = nn.Linear(cfg.hidden, cfg.dim, bias=cfg.bias is True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if not self.gated:
            return self.down(self.activation(x))
        gate, x = x.chunk(2, dim=-1)  # [B, T, hidden] each
        return self.down(self.activation(gate) * x)


class Block(nn.Module):
    """One layer: attention and feed-forward network, each added to the residual stream."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()

        def norm_if(wanted: bool) -> nn.Module:
            return _norm(cfg) if wanted else nn.Identity()

        before = cfg.norm_at != "after"
        after = cfg.norm_at != "before"
        self.attn_norm = norm_if(before)
        self.attn = Attention(cfg)
        self.mlp_norm = norm_if(before)
        self.mlp = MLP(cfg)
        self.attn_post_norm = norm_if(after)
        self.mlp_post_norm = norm_if(after)
        self.dropout = nn.Dropout(cfg.dropout)
        self.position: PositionEncoding | None = None  # the layer's encoding, unless several layers share it: see GPT

    def forward(self, x: Tensor, pe: PositionEncoding, ctx: Context) -> Tensor:
        # Norms that `norm_at` leaves out are identities, so one formula serves all architectures.
        x = x + self.dropout(self.attn_post_norm(self.attn(self.attn_norm(x), pe, ctx)))
        return x + self.dropout(self.mlp_post_norm(self.mlp(self.mlp_norm(x))))


class GPT(nn.Module):
    """Decoder-only transformer. `encodings` holds the position encoding of each layer; layers may share one.

    Args:
        pe: configuration of the position encoding, see `model.position.build_encodings`.
        vocab_size: tokens of the tokenizer; the embedding may be padded beyond it.
        train_len: tokens of a training sequence.
        seed: of the initial weights.
        checkpointing: whether the backward pass computes the activations of each block again from its input.
    """

    def __init__(
        self, cfg: GPTConfig, pe: Mapping[str, Any], *, vocab_size: int, train_len: int, seed: int = 0,
        checkpointing: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if type(vocab_size) is not int or vocab_size < 1:
            raise ValueError(f"vocab_size={vocab_size!r} must be a whole number of at least 1")
        self.cfg = cfg
        self.vocab_size = vocab_size
        self.train_len = train_len
        self.checkpointing = checkpointing
        self.encodings = position.build_encodings(pe, Shape.of(cfg, train_len))
        for encoding in self.encodings:
            if cfg.sinks and not encoding.has_softmax:
                name = type(encoding).__name__
                raise ValueError(f"model.sinks=true needs a softmax, which {name} lacks: set it to false")

        # Padded to a multiple of `vocab_multiple`, since GPUs multiply matrices of round sizes faster.
        padded_vocab_size = math.ceil(vocab_size / cfg.vocab_multiple) * cfg.vocab_multiple
        self.embedding = nn.Embedding(padded_vocab_size, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg) for _ in self.encodings)
        # `encodings` is a plain list, which registers no parameters. A block's `position` registers an encoding of that
        # layer alone, and `positions` those that several layers share. So a state dict has no tensor twice. The file
        # format has both names.
        self.positions = nn.ModuleList(pe for pe in self.distinct_encodings if self.encodings.count(pe) > 1)
        for block, encoding in zip(self.blocks, self.encodings, strict=True):
            if encoding not in self.positions:
                block.position = encoding
        self.norm = _norm(cfg)
        self.head = nn.Linear(cfg.dim, padded_vocab_size, bias=False)
        if cfg.tie_embeddings:
            self.head.weight = self.embedding.weight
        # On "meta" tensors have no values: the caller loads a state dict, or calls `materialise` and `init_weights`.
        if not self.embedding.weight.is_meta:
            self.init_weights(seed)

    @property
    def distinct_encodings(self) -> list[PositionEncoding]:
        """Each instance in `encodings` once."""
        return list(dict.fromkeys(self.encodings))

    def hidden_states(
        self, idx: Tensor, layout: Layout = WHOLE, *, encodings: Sequence[PositionEncoding] | None = None,
        cache: Cache | None = None,
    ) -> Tensor:  # fmt: skip
        """Final hidden states [B, T, C] of token ids `idx` int64 [B, T].

        Args:
            layout: what the rows are: texts, packed documents, or texts that several ranks share, of which each gets
                the hidden states of its own part.
            encodings: one for each layer, instead of the network's own: an evaluation passes those of another scale
                (`model.position.network.at_scale`) or others that read the same weights, training those of a stage or
                with shorter windows. They have the same parameters.
            cache: holds the text before `idx`, and gets `idx` too.
        """
        if idx.dim() != 2 or idx.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"token ids must be int64 or int32 of shape [B, T], not {idx.dtype} {tuple(idx.shape)}")
        encodings = encodings or self.encodings
        # A context for each distinct encoding, with its tables, softmax scale and temperature, made by
        # `model.position.layer.make_context`. The positions [B, T] of packed documents begin anew in each. Where ranks
        # share a text, `idx` and `pos` become those of this rank's part.
        idx, pos, contexts = layout.contexts(dict.fromkeys(encodings), idx, cache)
        x = self.embedding(idx)  # [B, T, C]
        for pe in contexts:
            x = pe.embed(x, pos)
        x = self.dropout(x)
        for block, pe in zip(self.blocks, encodings, strict=True):
            run = recomputed(block) if self.checkpointing else block
            x = run(x, pe, contexts[pe])
        if cache is not None:
            cache.length += idx.size(1)
        return self.norm(x)

    def forward(
        self, idx: Tensor, layout: Layout = WHOLE, *, encodings: Sequence[PositionEncoding] | None = None,
        cache: Cache | None = None, targets: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits [B, T, padded vocabulary] of token ids `idx` int64 [B, T]: see `hidden_states`.

        With `targets` int64 [B, T] it returns the mean cross-entropy in nats instead, over all targets but
        IGNORE_INDEX. Where ranks share a text, each returns a part, and the mean over the ranks is this number.
        """
        hidden = self.hidden_states(idx, layout, encodings=encodings, cache=cache)
        if targets is None:
            return self.head(hidden)
        return self.loss(hidden, *layout.scored(targets))  # the targets of `hidden`, and what divides their sum

    def loss(self, hidden: Tensor, targets: Tensor, n_targets: Tensor) -> Tensor:
        """The sum of the cross-entropies, in nats, of hidden states [B, T, C] and targets [B, T], over `n_targets`.

        Args:
            n_targets: number of targets that count, a scalar tensor: see `Layout.scored`.
        """

        def nats(logits: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

        # A compiler fuses what follows the logits by itself.
        in_one_piece = self._piece_size(hidden) >= hidden.size(1) or torch.compiler.is_compiling()
        if in_one_piece or not (torch.is_grad_enabled() and self.head.weight.requires_grad):
            return torch.stack(self.in_pieces(nats, hidden, targets)).sum() / n_targets

        # Autograd would hold three tensors of the size of all logits. So the gradients of a piece are computed at once,
        # and its logits are dropped. Checkpointing would compute the products with the head twice.
        weight = exactly(self.head.weight.detach()).requires_grad_()  # sums up gradients in fp32, also of bf16 weights
        pieces = [piece.requires_grad_() for piece in hidden.detach().split(self._piece_size(hidden), dim=1)]
        total = torch.zeros((), device=hidden.device)
        for piece, piece_targets in zip(pieces, targets.split(self._piece_size(hidden), dim=1), strict=True):
            piece_nats = nats(self._logits(piece, weight.to(self.head.weight.dtype)), piece_targets)
            piece_nats.backward()
            total = total + piece_nats.detach()
        # This adds zero to the sum, and gives it its gradients.
        hidden_gradient = torch.cat([piece.grad for piece in pieces], dim=1)
        for x, gradient in ((hidden, hidden_gradient), (self.head.weight, weight.grad)):
            total = total + ((x - x.detach()) * gradient).sum()  # type: ignore[operator]
        return total / n_targets

    def in_pieces(self, function: Callable[[Tensor, Tensor], R], hidden: Tensor, targets: Tensor) -> list[R]:
        """Call `function`(logits fp32 [B, t, vocabulary], targets [B, t]) on pieces of the T positions, in order.

        A piece has at most MAX_LOGITS logits, or one position. Where gradients are wanted, all positions are one piece.

        Args:
            hidden: what `hidden_states` returned, [B, T, C].
            targets: [B, T].
        """
        # Logits are the largest tensor of a small network. In pieces they never exist all at once.
        size = hidden.size(1) if torch.is_grad_enabled() else self._piece_size(hidden)
        pieces = zip(hidden.split(size, dim=1), targets.split(size, dim=1), strict=True)
        return [function(self._logits(x, self.head.weight), wanted) for x, wanted in pieces]

    def _piece_size(self, hidden: Tensor) -> int:
        """The positions of a piece of `hidden` [B, T, C] with at most MAX_LOGITS logits, or one."""
        return max(1, MAX_LOGITS // (hidden.size(0) * self.head.out_features))

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] in fp32 or better, without the padding of the vocabulary."""
        return exactly(F.linear(hidden, weight)[..., : self.vocab_size])

    def materialise(self, device: torch.device | str) -> None:
        """Give the parameters of a network on "meta" memory on another device; they have no values yet."""
        self.to_empty(device=device)
        if self.cfg.tie_embeddings:
            self.head.weight = self.embedding.weight  # `to_empty` unties them

    @torch.no_grad()
    def init_weights(self, seed: int, assign: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """Fill every parameter in place with its initial values.

        Args:
            assign: takes a parameter, or a shard of one, and all of its initial values, fp32, on the CPU.
        """

        # Every parameter draws from a generator of its own, seeded by (seed, name), and never from the global one. So
        # another encoding, or one layer more, leaves the other initial tensors bit for bit as they were: comparisons
        # of encodings are paired, and their statistics rely on it.
        def generator(name: str) -> torch.Generator:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

        # GPT-2's rule: each layer adds to the residual stream twice. With this std the variance of the sum does not
        # grow with the number of layers.
        residual_std = self.cfg.init_std / math.sqrt(2 * self.cfg.n_layer)
        # Encodings initialise their own parameters, below.
        of_encodings = {*nn.ModuleList(self.encodings).parameters()}
        for name, p in self.named_parameters():
            if p in of_encodings:
                continue
            values = torch.zeros(p.shape)  # of one parameter at a time
            if name.endswith("mix.conv"):  # as PyTorch's Conv1d: uniform up to 1 / sqrt(tokens)
                nn.init.kaiming_uniform_(
                    values, math.sqrt(5), generator=generator(name.replace("mix.conv", CONV_OLD_NAME))
                )
            elif name.endswith(("attn.out.weight", "mlp.down.weight")):
                nn.init.normal_(values, 0.0, residual_std, generator(name))
            elif p.ndim > 1:
                nn.init.normal_(values, 0.0, self.cfg.init_std, generator(name))
            elif not name.endswith(("bias", "sinks")):  # norms start as the identity
                nn.init.ones_(values)
            assign(p, values)
        for pe in self.distinct_encodings:
            first_layer = self.encodings.index(pe)
            on_cpu = copy.deepcopy(pe).to("cpu", torch.float32)
            init_parameters(on_cpu, generator(f"positions.{first_layer}"))
            for p, values in zip(pe.parameters(), on_cpu.parameters(), strict=True):
                assign(p, values)
