"""Random inputs for CoPE attention, its definition, and what to compare: shared by the tests of the kernel."""

import torch

from model.position import cope as plain

NAMES = ("out", "q", "k", "v", "table", "position_q", "gate_keys")


def inputs(
    *, length, batch=2, heads=2, kv_heads=2, dim=8, npos=6, gate=0.0, dtype=torch.float64, extra=(), seed=0
) -> dict:
    """Random inputs; `gate` is about the mean logit of the gates made of q and k."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = {
        "q": normal(batch, heads, length, dim),
        "k": normal(batch, kv_heads, length, dim),
        "v": normal(batch, kv_heads, length, dim),
        "table": normal(dim, npos),
        "position_q": normal(batch, heads, length, dim),
        "gate_keys": normal(batch, kv_heads, length, dim),
    }
    x["q"][..., 0], x["k"][..., 0] = dim**0.5, gate
    return {n: t.to(dtype).requires_grad_() for n, t in x.items() if n in NAMES[:5] or n in extra}


def by_definition(q, k, v, table, *, scale, **gates):
    """The plain version."""
    visible = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril()
    return plain.cope_attention(q, k, v, table, scale=scale, visible=visible, **gates)


def results(attention, x: dict, scale=None) -> dict:
    """Output and gradients, by name."""
    out = attention(**x, scale=scale or x["q"].size(-1) ** -0.5)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return {"out": out.detach()} | dict(zip(x, torch.autograd.grad(out, list(x.values()), weights), strict=True))


def assert_same(found: dict, expected: dict, tolerance: float) -> None:
    """Equal in relative norm; where the truth is zero, absolutely."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        norm = value.double().norm().item()
        error = (found[name].double() - value.double()).norm().item()
        assert error <= tolerance * (norm if norm > 1e-8 else 1.0), f"{name}: {error:.1e} of {norm:.1e}"
