"""CoPE attention, exact, in memory linear in the sequence length: Triton kernels for CUDA.

Its specification is `model.position.cope.cope_attention`; `model.kernels.cope` is the same algorithm in PyTorch and
decides which of the two runs. A block of queries visits its keys tile by tile, from the diagonal to the past; once all
its queries have reached position P - 1, their position terms are t_{P-1} for every key left, and plain flash attention
reads those.

Positions. A gate is rounded to a multiple of 2^-SHIFT and summed as an integer (fixed point): such sums are exact in
any order, so that all kernels find the same floor, and the position before a key is that behind it minus its gate.
The position term lies between two entries of t = q e; t_n and the slope t_{n+1} - t_n of a query are one 64-bit word of
a table in global memory, read once for each score. A last slope of zero covers the clamp, the upper end and P = 1.
All logits are in base 2.

Backward. One kernel follows the queries (dq, dt), one the keys (dk, dv). Positions sum from the diagonal and their
gradients sum towards it: that of a gate is the sum over its own key and all behind it, which is the row's total minus
what has been visited. So the first kernel carries two sums along and leaves both at every tile for the second, and adds
the row's total, known only at the end, by linearity. The gradient of the table is made of running sums, stored where
the floor of the position changes: no atomics, hence deterministic. Tables and carried sums are held for PASS queries at
a time, which keeps memory linear in T.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

HEAD_DIMS = (16, 32, 64, 128)
PASS = 4096  # queries whose tables and carried sums are in memory at a time; a multiple of every BM
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HIDDEN = tl.constexpr(-1e30)  # a logit whose gate and weight are 0; an infinity would give NaN before the first key


class Tiling(NamedTuple):
    """How a kernel is cut: BM queries by BN keys, STEP of them at a time in a window, which begins at a multiple of BN;
    warps, and stages of the pipeline outside of windows."""

    BM: int
    BN: int
    STEP: int
    num_warps: int
    num_stages: int = 2


class Tilings(NamedTuple):
    forward: Tiling
    walk: Tiling  # its BN is that of `keys`, and divides its BM: it leaves the carried sums at those tiles
    queries: Tiling
    keys: Tiling  # its STEP is its BN


def tilings(head_dim: int, itemsize: int) -> Tilings:
    """Without a spilled register on sm_80 and sm_90: `python scripts/check_kernels.py`."""
    return Tilings(Tiling(64, 64, 32, 4), Tiling(64, 32, 16, 4), Tiling(64, 64, 16, 4), Tiling(64, 32, 32, 4))


@triton.jit
def _split(pair):
    """Value and slope, the low and the high half of a word."""
    return pair.to(tl.int32).to(tl.float32, bitcast=True), (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _load(X, at, stride, T, D: tl.constexpr, WHOLE: tl.constexpr):
    """Rows `at` of X, [n, D]; zeros from T on, unless WHOLE says that there are none."""
    pointers = X + at[:, None] * stride + tl.arange(0, D)[None, :]
    if WHOLE:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=at[:, None] < T, other=0.0)
    return x


@triton.jit
def _pointers(X, H, GROUPS, b_stride, h_stride, SHARED: tl.constexpr):
    """Of the program's head, or of the keys that it shares with others."""
    n = tl.program_id(1).to(tl.int64)
    h = n % H
    if SHARED:
        h = h // GROUPS
    return X + n // H * b_stride + h * h_stride


@triton.jit
def _logits(q, k, scale, PRECISION: tl.constexpr):
    return tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale


@triton.jit
def _window(z, carry, rows, columns, TABLE, table_row, P: tl.constexpr, SHIFT: tl.constexpr, DIAGONAL: tl.constexpr):
    """Scores over a tile from its logits [BM, BN], and what the gradients need of them.

    Args:
        carry: fixed-point position behind the tile's last key, at most P - 1, [BM].
        table_row: where the queries' rows of TABLE begin, [BM].

    Returns:
        score, gate, the step that the gate is in fixed point, position before the clamp in fixed point, its floor and
        rest after it, slope there; and the carry of the next tile
    """
    last: tl.constexpr = (P - 1) << SHIFT
    unit: tl.constexpr = 1 << SHIFT
    if DIAGONAL:
        z = tl.where(columns[None, :] <= rows[:, None], z, HIDDEN)
    gate = 1.0 / (1.0 + tl.exp2(-z))
    step = (gate * unit + 0.5).to(tl.int32)
    reached = tl.cumsum(step, 1, reverse=True) + carry[:, None]
    position = tl.minimum(reached, last)
    floor = position >> SHIFT
    rest = (position & (unit - 1)).to(tl.float32) * (1.0 / unit)
    value, slope = _split(tl.load(TABLE + table_row[:, None] + floor))
    carry = tl.minimum(carry + tl.sum(step, 1), last)
    return z + value + rest * slope, gate, step, reached, floor, rest, slope, carry


@triton.jit
def _attend(score, v, best, total, out, PRECISION: tl.constexpr):
    """Online softmax: add a tile's scores [BM, BN] and values [BN, D]."""
    new = tl.maximum(best, tl.max(score, 1))
    weight = tl.exp2(score - new[:, None])
    shrink = tl.exp2(best - new)
    out = tl.dot(weight.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    return new, total * shrink + tl.sum(weight, 1), out


@triton.jit
def forward_kernel(
    Q, K, V, TABLE, OUT, LSE, START,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    H, GROUPS, T, first, count, scale,
    D: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries first.. of a head: output, lse in base 2, and the first key visited as one of the window."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # those with most keys start first
    n = tl.program_id(1).to(tl.int64)
    Q = _pointers(Q, H, GROUPS, q_b, q_h, False)
    K = _pointers(K, H, GROUPS, k_b, k_h, True)
    V = _pointers(V, H, GROUPS, v_b, v_h, True)
    TABLE += n * count * P
    OUT += n * T * D
    rows = first + block * BM + tl.arange(0, BM)
    there = rows < T
    table_row = tl.minimum(rows, T - 1) - first
    table_row *= P
    q = _load(Q, rows, q_t, T, D, False)

    clamped: tl.constexpr = (P - 1) << SHIFT
    carry = tl.where(there, 0, clamped)
    best = tl.full((BM,), HIDDEN, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    start = (tl.minimum(first + block * BM + BM, T) - 1) // STEP * STEP
    while start + STEP > first + block * BM:
        at = start + tl.arange(0, STEP)
        k = _load(K, at, k_t, T, D, False)
        v = _load(V, at, v_t, T, D, False)
        z = _logits(q, k, scale, PRECISION)
        score, _, _, _, _, _, _, carry = _window(z, carry, rows, at, TABLE, table_row, P, SHIFT, True)
        best, total, out = _attend(score, v, best, total, out, PRECISION)
        start -= STEP
    while (start >= 0) & (((start + STEP) % BN != 0) | (tl.min(carry, 0) < clamped)):
        at = start + tl.arange(0, STEP)
        k = _load(K, at, k_t, T, D, True)
        v = _load(V, at, v_t, T, D, True)
        z = _logits(q, k, scale, PRECISION)
        score, _, _, _, _, _, _, carry = _window(z, carry, rows, at, TABLE, table_row, P, SHIFT, False)
        best, total, out = _attend(score, v, best, total, out, PRECISION)
        start -= STEP
    start += STEP
    tl.store(START + n * T + rows, tl.zeros((BM,), tl.int32) + start, mask=there)

    term = _split(tl.load(TABLE + table_row + P - 1))[0]
    best -= term  # rather than to add it to every score
    for i in range(0, start // BN):
        at = i * BN + tl.arange(0, BN)
        k = _load(K, at, k_t, T, D, True)
        v = _load(V, at, v_t, T, D, True)
        best, total, out = _attend(_logits(q, k, scale, PRECISION), v, best, total, out, PRECISION)
    out = out / total[:, None]
    tl.store(OUT + rows[:, None] * D + tl.arange(0, D)[None, :], out.to(OUT.dtype.element_ty), mask=there[:, None])
    tl.store(LSE + n * T + rows, best + term + tl.log2(total), mask=there)


@triton.jit
def walk_kernel(
    Q, K, V, TABLE, OUT, GRAD, LSE, START, CARRY, PASSED, SUMS, DELTA, TOTAL,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    H, GROUPS, T, first, count, scale, tiles,
    D: tl.constexpr, P: tl.constexpr, P2: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward, first: what queries first.. of a head find on their way through the window.

    Out come, for the other kernels, the carried sums at every tile, [tiles, count], delta and the totals, [count]; and
    SUMS, [count, P, 2]: for each entry of the table, over all keys with positions up to it, the gradients of the scores
    and the same times the rest.
    """
    clamped: tl.constexpr = (P - 1) << SHIFT
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    Q = _pointers(Q, H, GROUPS, q_b, q_h, False)
    K = _pointers(K, H, GROUPS, k_b, k_h, True)
    V = _pointers(V, H, GROUPS, v_b, v_h, True)
    GRAD = _pointers(GRAD, H, GROUPS, g_b, g_h, False)
    TABLE += n * count * P
    SUMS += n * count * P * 2
    CARRY += n * tiles * count
    PASSED += n * tiles * count
    rows = first + block * BM + tl.arange(0, BM)
    there = rows < T
    local = tl.minimum(rows, T - 1) - first
    table_row = local * P
    q = _load(Q, rows, q_t, T, D, False)
    grad = _load(GRAD, rows, g_t, T, D, False)
    out = _load(OUT + n * T * D, rows, D, T, D, False)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse = tl.load(LSE + n * T + rows, mask=there, other=float("inf"))
    window = tl.min(tl.load(START + n * T + rows, mask=there, other=2147483647), 0) // BN

    carry = tl.where(there, 0, clamped)
    passed = tl.zeros((BM,), tl.float32)
    sum0 = tl.zeros((BM,), tl.float32)
    sum1 = tl.zeros((BM,), tl.float32)
    behind = first + block * BM + BM
    for i in tl.range(0, (behind - window * BN) // STEP, num_stages=1):
        start = behind - (i + 1) * STEP
        if (start + STEP) % BN == 0:
            tl.store(CARRY + start // BN * count + local, carry, mask=there)
            tl.store(PASSED + start // BN * count + local, passed, mask=there)
        at = start + tl.arange(0, STEP)
        k = _load(K, at, k_t, T, D, False)
        v = _load(V, at, v_t, T, D, False)
        z = _logits(q, k, scale, PRECISION)
        score, _, step, reached, floor, rest, slope, carry = _window(
            z, carry, rows, at, TABLE, table_row, P, SHIFT, True
        )
        weight = tl.exp2(score - lse[:, None])
        ds = weight * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        passed += tl.sum(ds * slope, 1)
        before = tl.minimum(reached - step, clamped) >> SHIFT
        changed = (before != floor) & there[:, None]
        into = SUMS + 2 * (table_row[:, None] + before)
        tl.store(into, tl.cumsum(ds, 1, reverse=True) - ds + sum0[:, None], mask=changed)
        sum0 += tl.sum(ds, 1)
        ds *= rest
        tl.store(into + 1, tl.cumsum(ds, 1, reverse=True) - ds + sum1[:, None], mask=changed)
        sum1 += tl.sum(ds, 1)
    tl.store(DELTA + n * count + local, delta, mask=there)
    tl.store(TOTAL + n * count + local, passed, mask=there)
    entries = tl.arange(0, P2)[None, :]
    into = SUMS + 2 * (table_row[:, None] + entries)
    rest = there[:, None] & (entries >= (carry >> SHIFT)[:, None]) & (entries < P)
    tl.store(into, tl.broadcast_to(sum0[:, None], (BM, P2)), mask=rest)
    tl.store(into + 1, tl.broadcast_to(sum1[:, None], (BM, P2)), mask=rest)


@triton.jit
def _window_gradients(
    z, v, grad, rows, columns, carry, left, lse, delta, TABLE, table_row,
    P: tl.constexpr, SHIFT: tl.constexpr, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights of a tile, the gradients of its logits, both [BM, n], and the next carry and `left`.

    Args:
        left: sum of the gradients of the positions of the tile's keys and all behind them, in base 2, [BM].
    """
    score, gate, _, _, _, _, slope, carry = _window(z, carry, rows, columns, TABLE, table_row, P, SHIFT, DIAGONAL)
    weight = tl.exp2(score - lse[:, None])
    ds = weight * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    dp = ds * slope
    dgate = left[:, None] - (tl.cumsum(dp, 1, reverse=True) - dp)
    return weight, ds + dgate * (gate * (1.0 - gate) * LN2), carry, left - tl.sum(dp, 1)


@triton.jit
def queries_kernel(
    Q, K, V, TABLE, GRAD, LSE, START, DELTA, TOTAL, DQ,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    H, GROUPS, T, first, count, scale,
    D: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries first.. of a head, but for what the table's entries give them."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    Q = _pointers(Q, H, GROUPS, q_b, q_h, False)
    K = _pointers(K, H, GROUPS, k_b, k_h, True)
    V = _pointers(V, H, GROUPS, v_b, v_h, True)
    GRAD = _pointers(GRAD, H, GROUPS, g_b, g_h, False)
    TABLE += n * count * P
    rows = first + block * BM + tl.arange(0, BM)
    there = rows < T
    local = tl.minimum(rows, T - 1) - first
    table_row = local * P
    q = _load(Q, rows, q_t, T, D, False)
    grad = _load(GRAD, rows, g_t, T, D, False)
    lse = tl.load(LSE + n * T + rows, mask=there, other=float("inf"))
    delta = tl.load(DELTA + n * count + local)
    window = tl.min(tl.load(START + n * T + rows, mask=there, other=2147483647), 0) // BN * BN

    carry = tl.where(there, 0, (P - 1) << SHIFT)
    left = tl.load(TOTAL + n * count + local)
    dq = tl.zeros((BM, D), tl.float32)
    diagonal = (first + block * BM) // STEP * STEP  # from this key on some are hidden
    steps = (tl.minimum(first + block * BM + BM, T) - diagonal + STEP - 1) // STEP
    for i in tl.range(0, steps, num_stages=1):
        at = diagonal + (steps - 1 - i) * STEP + tl.arange(0, STEP)
        k = _load(K, at, k_t, T, D, False)
        v = _load(V, at, v_t, T, D, False)
        _, dz, carry, left = _window_gradients(
            _logits(q, k, scale, PRECISION), v, grad, rows, at, carry, left, lse, delta, TABLE, table_row, P, SHIFT,
            True, PRECISION,
        )  # fmt: skip
        dq = tl.dot(dz.to(k.dtype), k, dq, input_precision=PRECISION)
    for i in tl.range(0, (diagonal - window) // STEP, num_stages=1):
        at = diagonal - (i + 1) * STEP + tl.arange(0, STEP)
        k = _load(K, at, k_t, T, D, True)
        v = _load(V, at, v_t, T, D, True)
        _, dz, carry, left = _window_gradients(
            _logits(q, k, scale, PRECISION), v, grad, rows, at, carry, left, lse, delta, TABLE, table_row, P, SHIFT,
            False, PRECISION,
        )  # fmt: skip
        dq = tl.dot(dz.to(k.dtype), k, dq, input_precision=PRECISION)

    shift = _split(tl.load(TABLE + table_row + P - 1))[0] - lse
    for start in range(0, window, BN):
        at = start + tl.arange(0, BN)
        k = _load(K, at, k_t, T, D, True)
        v = _load(V, at, v_t, T, D, True)
        weight = tl.exp2(_logits(q, k, scale, PRECISION) + shift[:, None])
        ds = weight * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    own = n * T * D + rows[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(DQ + own, dq * (scale * LN2), mask=there[:, None])


@triton.jit
def _window_of_keys(
    k, v, at, tile, i, Q, GRAD, TABLE, LSE, START, CARRY, PASSED, DELTA, TOTAL, q_t, g_t, T, first, count, scale,
    dk, dv, D: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a window in `keys_kernel`: queries i, i + 1, .. of the pass."""
    rows = first + i + tl.arange(0, BM)
    there = rows < T
    local = tl.minimum(rows, T - 1) - first
    q = _load(Q, rows, q_t, T, D, False)
    grad = _load(GRAD, rows, g_t, T, D, False)
    lse = tl.load(LSE + rows, mask=there, other=float("inf"))
    # a window that ended before the tile has clamped positions there, without gradients
    inside = tl.load(START + rows, mask=there, other=2147483647) < tile * BN + BN
    carry = tl.load(CARRY + local, mask=inside, other=(P - 1) << SHIFT)
    total = tl.load(TOTAL + local, mask=inside, other=0.0)
    left = total - tl.load(PASSED + local, mask=inside, other=0.0)
    weight, dz, _, _ = _window_gradients(
        _logits(q, k, scale, PRECISION), v, grad, rows, at, carry, left, lse, tl.load(DELTA + local), TABLE, local * P,
        P, SHIFT, DIAGONAL, PRECISION,
    )  # fmt: skip
    dv = tl.dot(tl.trans(weight.to(v.dtype)), grad, dv, input_precision=PRECISION)
    dk = tl.dot(tl.trans(dz.to(q.dtype)), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def keys_kernel(
    Q, K, V, TABLE, GRAD, LSE, START, REACH, CARRY, PASSED, DELTA, TOTAL, DK, DV,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    H, GROUPS, T, first, count, scale, tiles,
    D: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of keys and values the part of the queries first.. of all the heads that share them."""
    tile = tl.program_id(0)
    shared = tl.program_id(1).to(tl.int64)
    b, h_kv = shared // (H // GROUPS), shared % (H // GROUPS)
    at = tile * BN + tl.arange(0, BN)
    k = _load(K + b * k_b + h_kv * k_h, at, k_t, T, D, False)
    v = _load(V + b * v_b + h_kv * v_h, at, v_t, T, D, False)
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    start = tl.maximum(tile * BN // BM * BM - first, 0)  # the first query that sees a key, counted from `first`
    behind = tl.cdiv(tl.minimum(tl.maximum(tile * BN + BN - first, 0), count), BM) * BM  # the first that sees them all
    for g in range(0, GROUPS):
        h = h_kv * GROUPS + g
        n = b * H + h
        Qn, Gn = Q + b * q_b + h * q_h, GRAD + b * g_b + h * g_h
        TABLEn, LSEn, STARTn = TABLE + n * count * P, LSE + n * T, START + n * T
        CARRYn, PASSEDn = CARRY + (n * tiles + tile) * count, PASSED + (n * tiles + tile) * count
        DELTAn, TOTALn = DELTA + n * count, TOTAL + n * count
        reach = tl.cdiv(tl.load(REACH + n * tiles + tile), BM) * BM  # from here on windows end before the keys
        for i in tl.range(start, behind, BM, num_stages=1):
            dk, dv = _window_of_keys(
                k, v, at, tile, i, Qn, Gn, TABLEn, LSEn, STARTn, CARRYn, PASSEDn, DELTAn, TOTALn, q_t, g_t, T, first,
                count, scale, dk, dv, D, P, SHIFT, BM, BN, True, PRECISION,
            )  # fmt: skip
        for i in tl.range(behind, reach, BM, num_stages=1):
            dk, dv = _window_of_keys(
                k, v, at, tile, i, Qn, Gn, TABLEn, LSEn, STARTn, CARRYn, PASSEDn, DELTAn, TOTALn, q_t, g_t, T, first,
                count, scale, dk, dv, D, P, SHIFT, BM, BN, False, PRECISION,
            )  # fmt: skip
        for i in range(tl.maximum(behind, reach), count, BM):
            rows = first + i + tl.arange(0, BM)
            there = rows < T
            local = tl.minimum(rows, T - 1) - first
            q = _load(Qn, rows, q_t, T, D, False)
            grad = _load(Gn, rows, g_t, T, D, False)
            lse = tl.load(LSEn + rows, mask=there, other=float("inf"))
            term = _split(tl.load(TABLEn + local * P + P - 1))[0]
            weight = tl.exp2(_logits(q, k, scale, PRECISION) + (term - lse)[:, None])
            delta = tl.load(DELTAn + local)
            ds = weight * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            dv = tl.dot(tl.trans(weight.to(v.dtype)), grad, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    own = shared * T * D + at[:, None] * D + tl.arange(0, D)[None, :]
    mask = at[:, None] < T
    tl.store(DK + own, tl.load(DK + own, mask=mask) + dk * (scale * LN2), mask=mask)
    tl.store(DV + own, tl.load(DV + own, mask=mask) + dv, mask=mask)


class _Call:
    """What all launches for one call share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, scale: float) -> None:
        self.q, self.k, self.v = (_neighbouring_channels(x) for x in (q, k, v))
        self.batch, self.heads, self.length, self.head_dim = q.shape
        self.npos = table.size(1)
        self.scale = scale * LOG2E.value
        self.tilings = tilings(self.head_dim, q.element_size())
        e = table.float()
        self.slopes = torch.zeros_like(e)  # [D, P]
        torch.sub(e[:, 1:], e[:, :-1], out=self.slopes[:, :-1])
        self.entries = torch.stack((e, self.slopes), -1).flatten(1) * LOG2E.value  # [D, 2 P]

    def passes(self) -> Iterator[tuple[int, int]]:
        """First query and number of queries."""
        return ((first, min(PASS, self.length - first)) for first in range(0, self.length, PASS))

    def words(self, position_q: Tensor) -> Tensor:
        """The table of `position_q` [B, H, n, D], int64 [B, H, n, P]."""
        return (position_q.float() @ self.entries).view(torch.int64)

    def launch(self, kernel: Any, tiling: Tiling, programs: tuple[int, int], tensors: tuple, first: int, count: int, *strided: Tensor, **more: int) -> None:  # fmt: skip
        strides = [s for x in (self.q, self.k, self.v, *strided) for s in x.stride()[:3]]
        kernel[programs](
            self.q, self.k, self.v, *tensors, *strides, self.heads, self.heads // self.k.size(1), self.length,
            first, count, self.scale, **constants(self.q.dtype, self.head_dim, self.npos, tiling), **more,
            num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        )  # fmt: skip


def constants(dtype: torch.dtype, head_dim: int, npos: int, tiling: Tiling) -> dict[str, int | str]:
    """Constants of a kernel."""
    widest = max(t.STEP for t in tilings(head_dim, dtype.itemsize))
    return {
        "D": head_dim,
        "P": npos,
        "SHIFT": min(24, 31 - (npos - 1 + widest).bit_length()),  # 2^31 exceeds the largest sum before the clamp
        "BM": tiling.BM,
        "BN": tiling.BN,
        "STEP": tiling.STEP,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",  # of products of fp32 alone
    }


def _neighbouring_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, position_q: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, T, D]; lse in base 2 and the first key of each query's window, [B, H, T].

    Args: those of `model.kernels.cope.cope_attention`, q, k and v in one dtype of at most 32 bits.
    """
    call = _Call(q, k, v, table, scale)
    position_q = q if position_q is None else position_q
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    start = q.new_empty(q.shape[:3], dtype=torch.int32)
    tiling = call.tilings.forward
    for first, count in call.passes():
        words = call.words(position_q[:, :, first : first + count])
        programs = triton.cdiv(count, tiling.BM), call.batch * call.heads
        call.launch(forward_kernel, tiling, programs, (words, out, lse, start), first, count)
    return out, lse, start


def backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    start: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    position_q: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, table and position_q, from what `forward` returned."""
    call = _Call(q, k, v, table, scale)
    grad = _neighbouring_channels(grad)
    n, npos, length = call.batch * call.heads, call.npos, call.length
    dq = q.new_empty(q.shape, dtype=torch.float32)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
    dposition_q = dq if position_q is None else torch.zeros_like(dq)
    position_q = q if position_q is None else position_q
    # Running sums over the keys of ds and of ds times the rest; by differences they are gradients of t_n and of slopes.
    steps = call.slopes.clone()
    steps[:, :-1] -= call.slopes[:, 1:]
    of_sums = torch.stack((-call.slopes, steps), -1).flatten(1).T  # [2 P, D]
    moments = q.new_zeros(call.head_dim, 2 * npos, dtype=torch.float32)
    bn = call.tilings.keys.BN
    for first, count in call.passes():
        span = slice(first, first + count)
        own_q = position_q[:, :, span].float()  # [B, H, n, D]
        words = call.words(own_q)
        tiles = triton.cdiv(first + count, call.tilings.walk.BM) * (call.tilings.walk.BM // bn)
        carry = q.new_empty(n, tiles, count, dtype=torch.int32)
        passed = q.new_empty(n, tiles, count, dtype=torch.float32)
        sums = q.new_empty(call.batch, call.heads, count, 2 * npos, dtype=torch.float32)
        delta, total = q.new_empty(2, n, count, dtype=torch.float32)
        tiling = call.tilings.walk
        tensors = words, out, grad, lse, start, carry, passed, sums, delta, total
        programs = triton.cdiv(count, tiling.BM), n
        entries = triton.next_power_of_2(npos)
        call.launch(walk_kernel, tiling, programs, tensors, first, count, grad, tiles=tiles, P2=entries)

        tiling = call.tilings.queries
        tensors = words, grad, lse, start, delta, total, dq
        programs = triton.cdiv(count, tiling.BM), n
        call.launch(queries_kernel, tiling, programs, tensors, first, count, grad)

        reach = _reach(start[:, :, span].reshape(n, count) // bn, tiles)
        tensors = words, grad, lse, start, reach, carry, passed, delta, total, dk, dv
        programs = triton.cdiv(first + count, bn), call.batch * k.size(1)
        call.launch(keys_kernel, call.tilings.keys, programs, tensors, first, count, grad, tiles=tiles)

        dposition_q[:, :, span] += sums @ of_sums
        moments += own_q.flatten(0, 2).T @ sums.flatten(0, 2)
    of_entries, of_rests = moments.unflatten(1, (npos, 2)).unbind(-1)  # [D, P]
    dslopes = of_rests - of_entries
    dslopes[:, 1:] -= of_rests[:, :-1]
    dtable = torch.zeros_like(dslopes)
    dtable[:, 1:] += dslopes[:, :-1]
    dtable[:, :-1] -= dslopes[:, :-1]
    assert length == q.size(2)
    return dq, dk, dv, dtable, None if dposition_q is dq else dposition_q


def _reach(windows: Tensor, tiles: int) -> Tensor:
    """For each tile of keys, up to where there are queries whose window holds it: int32 [n, tiles].

    Args:
        windows: the first tile of each query's window, [n, count].
    """
    ends = torch.arange(1, windows.size(1) + 1, device=windows.device, dtype=torch.int32).expand_as(windows)
    reach = torch.zeros(windows.size(0), tiles, device=windows.device, dtype=torch.int32)
    return reach.scatter_reduce_(1, windows.long(), ends, "amax").cummax(1).values
