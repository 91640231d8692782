"""How large a network is: its parameters and its work."""

from torch import nn

from model.gpt import GPT


def n_parameters(net: GPT) -> dict[str, int]:
    """Parameter counts: "total"; "embedding", token tables; "position", the encoding's; "body", the rest."""
    total = sum(p.numel() for p in net.parameters())
    # A set, since tied weights are one tensor under two names.
    embedding = sum(p.numel() for p in {net.embedding.weight, net.head.weight})
    position = sum(p.numel() for p in nn.ModuleList(net.distinct_encodings).parameters())
    body = total - embedding - position
    return {"total": total, "embedding": embedding, "position": position, "body": body}


def flops_per_token(net: GPT, length: int) -> int:
    """Floating-point operations of forward and backward for each token of a causal sequence of `length` tokens.

    Counted as in PaLM (arXiv 2204.02311, appendix B): 6 for each weight of a matrix product; attention counts half of
    the T x T scores, since it is causal. Those of an encoding are left out, so that networks compare.
    """
    weights = sum(m.weight.numel() for m in net.modules() if isinstance(m, nn.Linear))
    attention = net.cfg.n_layer * net.cfg.n_head * net.cfg.head_width * length
    return 6 * weights + 6 * attention
