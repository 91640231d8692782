"""The Triton kernels of CoPE attention; `model.kernels.cope_triton` launches them.

A block of queries visits its keys tile by tile, from the diagonal to the past. Once all its queries have reached
position P - 1, the position term is t_{P-1} for every key left, and plain flash attention reads those. The keys before
that are the block's window.

Positions. A gate is rounded to a multiple of 2^-SHIFT and summed as an integer (fixed point). Such sums are exact in
any order, so the position before a key is the one behind it minus its gate. The position term lies between two entries
of t = q e; t_n and the slope t_{n+1} - t_n of a query are one 64-bit word of a table in global memory, read once for
each score. A last slope of zero covers the clamp, the upper end and P = 1. All logits are in base 2.

Backward. `bwd_preprocess` walks through the windows, then `bwd_dq` follows the queries and `bwd_dkdv` the keys.
Positions sum from the diagonal and their gradients sum towards it: that of a gate is the sum over its own key and all
behind it, which is the row's total minus what the walk has passed. So the first kernel finds the totals, and leaves the
position and the sum passed at every tile for the one that follows the keys. It also makes running sums, stored where
the floor of the position changes, from which the table's gradient is made. No atomics, hence deterministic.

Names: n is a head, offs_m are queries, offs_n keys; X_b, X_h and X_t are strides; `first` and `count` are the queries
of a chunk, `local` their numbers in it.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HIDDEN = tl.constexpr(-1e30)  # a logit whose gate and weight are 0; an infinity would give NaN before the first key


@triton.jit
def _split(pair):
    """Value and slope, the low and the high half of a word."""
    return pair.to(tl.int32).to(tl.float32, bitcast=True), (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _load(X, offs, stride, T, D: tl.constexpr, UNMASKED: tl.constexpr):
    """Rows `offs` of X, [n, D]; zeros from T on, unless UNMASKED says that there are none."""
    pointers = X + offs[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(pointers) if UNMASKED else tl.load(pointers, mask=offs[:, None] < T, other=0.0)


@triton.jit
def _head(X, H, GROUPS, b_stride, h_stride, SHARED: tl.constexpr):
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
def _window(z, carry, offs_m, offs_n, TABLE, table_row, P: tl.constexpr, SHIFT: tl.constexpr, DIAGONAL: tl.constexpr):
    """Scores over a tile from its logits [BM, BN], and what the gradients need of them.

    Args:
        carry: fixed-point position behind the tile's last key, at most P - 1, [BM].
        table_row: where the queries' rows of TABLE begin, [BM].

    Returns:
        score, gate, the step that the gate is in fixed point, position before the clamp in fixed point, its floor and
        fraction after it, slope there; and the carry of the next tile
    """
    last: tl.constexpr = (P - 1) << SHIFT
    unit: tl.constexpr = 1 << SHIFT
    if DIAGONAL:
        z = tl.where(offs_n[None, :] <= offs_m[:, None], z, HIDDEN)
    gate = 1.0 / (1.0 + tl.exp2(-z))
    step = (gate * unit + 0.5).to(tl.int32)
    reached = tl.cumsum(step, 1, reverse=True) + carry[:, None]
    position = tl.minimum(reached, last)
    floor = position >> SHIFT
    frac = (position & (unit - 1)).to(tl.float32) * (1.0 / unit)
    value, slope = _split(tl.load(TABLE + table_row[:, None] + floor))
    carry = tl.minimum(carry + tl.sum(step, 1), last)
    return z + value + frac * slope, gate, step, reached, floor, frac, slope, carry


@triton.jit
def _attend(score, v, m_i, l_i, out, PRECISION: tl.constexpr):
    """Online softmax: add a tile's scores [BM, BN] and values [BN, D]."""
    new = tl.maximum(m_i, tl.max(score, 1))
    weight = tl.exp2(score - new[:, None])
    shrink = tl.exp2(m_i - new)
    out = tl.dot(weight.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    return new, l_i * shrink + tl.sum(weight, 1), out


@triton.jit
def forward(
    Q, K, V, TABLE, OUT, LSE, START,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    H, GROUPS, T, first, count, scale,
    D: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries first.. of a head: output, lse in base 2, and the first key visited as one of the window."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # those with most keys start first
    n = tl.program_id(1).to(tl.int64)
    Q = _head(Q, H, GROUPS, q_b, q_h, False)
    K = _head(K, H, GROUPS, k_b, k_h, True)
    V = _head(V, H, GROUPS, v_b, v_h, True)
    TABLE += n * count * P
    OUT += n * T * D
    offs_m = first + block * BM + tl.arange(0, BM)
    row_mask = offs_m < T
    table_row = tl.minimum(offs_m, T - 1) - first
    table_row *= P
    q = _load(Q, offs_m, q_t, T, D, False)

    clamped: tl.constexpr = (P - 1) << SHIFT
    carry = tl.where(row_mask, 0, clamped)
    m_i = tl.full((BM,), HIDDEN, tl.float32)
    l_i = tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    start = (tl.minimum(first + block * BM + BM, T) - 1) // STEP * STEP
    while start + STEP > first + block * BM:
        offs_n = start + tl.arange(0, STEP)
        k = _load(K, offs_n, k_t, T, D, False)
        v = _load(V, offs_n, v_t, T, D, False)
        z = _logits(q, k, scale, PRECISION)
        score, _, _, _, _, _, _, carry = _window(z, carry, offs_m, offs_n, TABLE, table_row, P, SHIFT, True)
        m_i, l_i, out = _attend(score, v, m_i, l_i, out, PRECISION)
        start -= STEP
    while (start >= 0) & (((start + STEP) % BN != 0) | (tl.min(carry, 0) < clamped)):
        offs_n = start + tl.arange(0, STEP)
        k = _load(K, offs_n, k_t, T, D, True)
        v = _load(V, offs_n, v_t, T, D, True)
        z = _logits(q, k, scale, PRECISION)
        score, _, _, _, _, _, _, carry = _window(z, carry, offs_m, offs_n, TABLE, table_row, P, SHIFT, False)
        m_i, l_i, out = _attend(score, v, m_i, l_i, out, PRECISION)
        start -= STEP
    start += STEP
    tl.store(START + n * T + offs_m, tl.zeros((BM,), tl.int32) + start, mask=row_mask)

    term = _split(tl.load(TABLE + table_row + P - 1))[0]
    m_i -= term  # rather than to add it to every score
    for i in range(0, start // BN):
        offs_n = i * BN + tl.arange(0, BN)
        k = _load(K, offs_n, k_t, T, D, True)
        v = _load(V, offs_n, v_t, T, D, True)
        m_i, l_i, out = _attend(_logits(q, k, scale, PRECISION), v, m_i, l_i, out, PRECISION)
    out = out / l_i[:, None]
    tl.store(OUT + offs_m[:, None] * D + tl.arange(0, D)[None, :], out.to(OUT.dtype.element_ty), mask=row_mask[:, None])
    tl.store(LSE + n * T + offs_m, m_i + term + tl.log2(l_i), mask=row_mask)


@triton.jit
def bwd_preprocess(
    Q, K, V, TABLE, OUT, GRAD, LSE, START, CARRY, PASSED, SUMS, DELTA, TOTAL,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    H, GROUPS, T, first, count, scale, tiles,
    D: tl.constexpr, P: tl.constexpr, P2: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward, first: what queries first.. of a head find on their way through the window.

    Out come, for the other kernels, the carried sums at every tile, [tiles, count], delta and the totals, [count]; and
    SUMS, [count, P, 2]: for each entry of the table, over all keys with positions up to it, the gradients of the scores
    and the same times the fraction.
    """
    clamped: tl.constexpr = (P - 1) << SHIFT
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    Q = _head(Q, H, GROUPS, q_b, q_h, False)
    K = _head(K, H, GROUPS, k_b, k_h, True)
    V = _head(V, H, GROUPS, v_b, v_h, True)
    GRAD = _head(GRAD, H, GROUPS, g_b, g_h, False)
    TABLE += n * count * P
    SUMS += n * count * P * 2
    CARRY += n * tiles * count
    PASSED += n * tiles * count
    offs_m = first + block * BM + tl.arange(0, BM)
    row_mask = offs_m < T
    local = tl.minimum(offs_m, T - 1) - first
    table_row = local * P
    q = _load(Q, offs_m, q_t, T, D, False)
    grad = _load(GRAD, offs_m, g_t, T, D, False)
    out = _load(OUT + n * T * D, offs_m, D, T, D, False)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse = tl.load(LSE + n * T + offs_m, mask=row_mask, other=float("inf"))
    window = tl.min(tl.load(START + n * T + offs_m, mask=row_mask, other=2147483647), 0) // BN

    carry = tl.where(row_mask, 0, clamped)
    passed = tl.zeros((BM,), tl.float32)
    sum0 = tl.zeros((BM,), tl.float32)
    sum1 = tl.zeros((BM,), tl.float32)
    behind = first + block * BM + BM
    for i in tl.range(0, (behind - window * BN) // STEP, num_stages=1):
        start = behind - (i + 1) * STEP
        if (start + STEP) % BN == 0:
            tl.store(CARRY + start // BN * count + local, carry, mask=row_mask)
            tl.store(PASSED + start // BN * count + local, passed, mask=row_mask)
        offs_n = start + tl.arange(0, STEP)
        k = _load(K, offs_n, k_t, T, D, False)
        v = _load(V, offs_n, v_t, T, D, False)
        z = _logits(q, k, scale, PRECISION)
        score, _, step, reached, floor, frac, slope, carry = _window(
            z, carry, offs_m, offs_n, TABLE, table_row, P, SHIFT, True
        )
        weight = tl.exp2(score - lse[:, None])
        ds = weight * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        passed += tl.sum(ds * slope, 1)
        before = tl.minimum(reached - step, clamped) >> SHIFT
        changed = (before != floor) & row_mask[:, None]
        into = SUMS + 2 * (table_row[:, None] + before)
        tl.store(into, tl.cumsum(ds, 1, reverse=True) - ds + sum0[:, None], mask=changed)
        sum0 += tl.sum(ds, 1)
        ds *= frac
        tl.store(into + 1, tl.cumsum(ds, 1, reverse=True) - ds + sum1[:, None], mask=changed)
        sum1 += tl.sum(ds, 1)
    tl.store(DELTA + n * count + local, delta, mask=row_mask)
    tl.store(TOTAL + n * count + local, passed, mask=row_mask)
    entries = tl.arange(0, P2)[None, :]
    into = SUMS + 2 * (table_row[:, None] + entries)
    unreached = row_mask[:, None] & (entries >= (carry >> SHIFT)[:, None]) & (entries < P)
    tl.store(into, tl.broadcast_to(sum0[:, None], (BM, P2)), mask=unreached)
    tl.store(into + 1, tl.broadcast_to(sum1[:, None], (BM, P2)), mask=unreached)


@triton.jit
def _window_gradients(
    z, v, grad, offs_m, offs_n, carry, left, lse, delta, TABLE, table_row,
    P: tl.constexpr, SHIFT: tl.constexpr, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights of a tile, the gradients of its logits, both [BM, n], and the next carry and `left`.

    Args:
        left: sum of the gradients of the positions of the tile's keys and all behind them, in base 2, [BM].
    """
    score, gate, _, _, _, _, slope, carry = _window(z, carry, offs_m, offs_n, TABLE, table_row, P, SHIFT, DIAGONAL)
    weight = tl.exp2(score - lse[:, None])
    ds = weight * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    dp = ds * slope
    dgate = left[:, None] - (tl.cumsum(dp, 1, reverse=True) - dp)
    return weight, ds + dgate * (gate * (1.0 - gate) * LN2), carry, left - tl.sum(dp, 1)


@triton.jit
def bwd_dq(
    Q, K, V, TABLE, GRAD, LSE, START, DELTA, TOTAL, DQ,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    H, GROUPS, T, first, count, scale,
    D: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries first.. of a head, but for what the table's entries give them."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    Q = _head(Q, H, GROUPS, q_b, q_h, False)
    K = _head(K, H, GROUPS, k_b, k_h, True)
    V = _head(V, H, GROUPS, v_b, v_h, True)
    GRAD = _head(GRAD, H, GROUPS, g_b, g_h, False)
    TABLE += n * count * P
    offs_m = first + block * BM + tl.arange(0, BM)
    row_mask = offs_m < T
    local = tl.minimum(offs_m, T - 1) - first
    table_row = local * P
    q = _load(Q, offs_m, q_t, T, D, False)
    grad = _load(GRAD, offs_m, g_t, T, D, False)
    lse = tl.load(LSE + n * T + offs_m, mask=row_mask, other=float("inf"))
    delta = tl.load(DELTA + n * count + local)
    window = tl.min(tl.load(START + n * T + offs_m, mask=row_mask, other=2147483647), 0) // BN * BN

    carry = tl.where(row_mask, 0, (P - 1) << SHIFT)
    left = tl.load(TOTAL + n * count + local)
    dq = tl.zeros((BM, D), tl.float32)
    diagonal = (first + block * BM) // STEP * STEP  # from this key on some are hidden
    steps = (tl.minimum(first + block * BM + BM, T) - diagonal + STEP - 1) // STEP
    for i in tl.range(0, steps, num_stages=1):
        offs_n = diagonal + (steps - 1 - i) * STEP + tl.arange(0, STEP)
        k = _load(K, offs_n, k_t, T, D, False)
        v = _load(V, offs_n, v_t, T, D, False)
        _, dz, carry, left = _window_gradients(
            _logits(q, k, scale, PRECISION), v, grad, offs_m, offs_n, carry, left, lse, delta, TABLE, table_row,
            P, SHIFT, True, PRECISION,
        )  # fmt: skip
        dq = tl.dot(dz.to(k.dtype), k, dq, input_precision=PRECISION)
    for i in tl.range(0, (diagonal - window) // STEP, num_stages=1):
        offs_n = diagonal - (i + 1) * STEP + tl.arange(0, STEP)
        k = _load(K, offs_n, k_t, T, D, True)
        v = _load(V, offs_n, v_t, T, D, True)
        _, dz, carry, left = _window_gradients(
            _logits(q, k, scale, PRECISION), v, grad, offs_m, offs_n, carry, left, lse, delta, TABLE, table_row,
            P, SHIFT, False, PRECISION,
        )  # fmt: skip
        dq = tl.dot(dz.to(k.dtype), k, dq, input_precision=PRECISION)

    shift = _split(tl.load(TABLE + table_row + P - 1))[0] - lse
    for start in range(0, window, BN):
        offs_n = start + tl.arange(0, BN)
        k = _load(K, offs_n, k_t, T, D, True)
        v = _load(V, offs_n, v_t, T, D, True)
        weight = tl.exp2(_logits(q, k, scale, PRECISION) + shift[:, None])
        ds = weight * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    own = n * T * D + offs_m[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(DQ + own, dq * (scale * LN2), mask=row_mask[:, None])


@triton.jit
def _window_of_keys(
    k, v, offs_n, tile, i, Q, GRAD, TABLE, LSE, START, CARRY, PASSED, DELTA, TOTAL, q_t, g_t, T, first, count, scale,
    dk, dv, D: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a window in `bwd_dkdv`: queries i, i + 1, .. of the pass."""
    offs_m = first + i + tl.arange(0, BM)
    row_mask = offs_m < T
    local = tl.minimum(offs_m, T - 1) - first
    q = _load(Q, offs_m, q_t, T, D, False)
    grad = _load(GRAD, offs_m, g_t, T, D, False)
    lse = tl.load(LSE + offs_m, mask=row_mask, other=float("inf"))
    # a window that ended before the tile has clamped positions row_mask, without gradients
    inside = tl.load(START + offs_m, mask=row_mask, other=2147483647) < tile * BN + BN
    carry = tl.load(CARRY + local, mask=inside, other=(P - 1) << SHIFT)
    total = tl.load(TOTAL + local, mask=inside, other=0.0)
    left = total - tl.load(PASSED + local, mask=inside, other=0.0)
    weight, dz, _, _ = _window_gradients(
        _logits(q, k, scale, PRECISION), v, grad, offs_m, offs_n, carry, left, lse, tl.load(DELTA + local), TABLE,
        local * P, P, SHIFT, DIAGONAL, PRECISION,
    )  # fmt: skip
    dv = tl.dot(tl.trans(weight.to(v.dtype)), grad, dv, input_precision=PRECISION)
    dk = tl.dot(tl.trans(dz.to(q.dtype)), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def bwd_dkdv(
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
    offs_n = tile * BN + tl.arange(0, BN)
    k = _load(K + b * k_b + h_kv * k_h, offs_n, k_t, T, D, False)
    v = _load(V + b * v_b + h_kv * v_h, offs_n, v_t, T, D, False)
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
                k, v, offs_n, tile, i, Qn, Gn, TABLEn, LSEn, STARTn, CARRYn, PASSEDn, DELTAn, TOTALn, q_t, g_t, T,
                first, count, scale, dk, dv, D, P, SHIFT, BM, BN, True, PRECISION,
            )  # fmt: skip
        for i in tl.range(behind, reach, BM, num_stages=1):
            dk, dv = _window_of_keys(
                k, v, offs_n, tile, i, Qn, Gn, TABLEn, LSEn, STARTn, CARRYn, PASSEDn, DELTAn, TOTALn, q_t, g_t, T,
                first, count, scale, dk, dv, D, P, SHIFT, BM, BN, False, PRECISION,
            )  # fmt: skip
        for i in range(tl.maximum(behind, reach), count, BM):
            offs_m = first + i + tl.arange(0, BM)
            row_mask = offs_m < T
            local = tl.minimum(offs_m, T - 1) - first
            q = _load(Qn, offs_m, q_t, T, D, False)
            grad = _load(Gn, offs_m, g_t, T, D, False)
            lse = tl.load(LSEn + offs_m, mask=row_mask, other=float("inf"))
            term = _split(tl.load(TABLEn + local * P + P - 1))[0]
            weight = tl.exp2(_logits(q, k, scale, PRECISION) + (term - lse)[:, None])
            delta = tl.load(DELTAn + local)
            ds = weight * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            dv = tl.dot(tl.trans(weight.to(v.dtype)), grad, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    own = shared * T * D + offs_n[:, None] * D + tl.arange(0, D)[None, :]
    mask = offs_n[:, None] < T
    tl.store(DK + own, tl.load(DK + own, mask=mask) + dk * (scale * LN2), mask=mask)
    tl.store(DV + own, tl.load(DV + own, mask=mask) + dv, mask=mask)
