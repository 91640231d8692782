"""What PaTH's reflections do to keys and queries, in Triton, forward and backward.

`reflected` and `PaTH` of `model.position.path` are the specification; `lab.kernels.path` is the attention that uses
this. A token w with strength beta reflects: it takes beta (x.w) w from every x that passes it. Between a key and a
query stand the reflections of all tokens between them. One after the other they would take a step for each token, so
tokens form tiles of N, and R tiles form a span:

- For each tile there are `met` and `u`, as `reflected` explains. To cross the tile a query takes two products, with w
  and `u`. To meet keys of its own tile it takes two as well, with w and `met`.
- A key leaves its tile at the end, and is carried on to the end of every later tile of its span. The end of tile c is
  called place c. `carried` are the keys of the span at each place, up to R tiles of them.
- A query at a place goes back to the start of its span. All reflections on this way are one matrix [D, D], and
  `crossings` are those of all places.

Nothing here depends on queries: it is done once for each head of keys. The backward pass goes the same way back, from
the gradients of these four to those of keys, w and beta.

All of this is fp32. For 16-bit queries, products are rounded to TF32, which is finer than their bf16.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.ops import add_to, load_numbers, load_rows, numbers_of_key_heads, store_numbers


class Tiles(NamedTuple):
    """Sizes of tiles and spans, and numbers of warps."""

    tokens: int  # of a tile: N
    span: int  # tiles of a span: R
    forward_warps: int
    backward_warps: int
    own_stages: int  # of the pipelines of kernels that stay within a tile or a span


def tiles(head_dim: int, element_size: int) -> Tiles:
    """Choose sizes with which kernels spill little, and which fit into the shared memory of every GPU from sm_80 on.

    Args:
        head_dim: a power of two.
        element_size: bytes of an element of q.
    """
    if element_size == 4:  # products of fp32 are unrolled
        return Tiles(32, 4, 4, 4, 1) if head_dim <= 64 else Tiles(16, 4, 8, 8, 1)
    if head_dim > 64:
        return Tiles(32, 4, 8, 8, 2)
    return Tiles(64, 2, 4, 8, 1)


def precision_of(element_size: int) -> str:
    """How products of fp32 are computed where an element of q has this many bytes: exactly for fp32, else in TF32."""
    return "ieee" if element_size == 4 else "tf32"


@triton.jit
def exact_product(a, b, PRECISION: tl.constexpr):
    """The matrix product of two tiles in fp32."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def load_tile(x, rows, D: tl.constexpr):
    """The `rows` of x [.., D], all of which exist."""
    return tl.load(x + rows[:, None] * D + tl.arange(0, D)[None, :])


@triton.jit
def inverse_of(left, N: tl.constexpr, PRECISION: tl.constexpr):
    """Invert I + left, [N, N]. Only what is below the diagonal of `left` counts; it is read from memory."""
    # Blocks on the diagonal are inverted, of size 2, then 4, and so on. Such a block has two smaller ones on its
    # diagonal, whose inverses are known, and a corner C below the first. Its inverse has these two inverses and the
    # corner -(inverse of the second) C (inverse of the first).
    n = tl.arange(0, N)
    places = left + n[:, None] * N + n[None, :]
    is_after = n[:, None] > n[None, :]
    is_pair = n[:, None] // 2 == n[None, :] // 2
    inverse = tl.where(n[:, None] == n[None, :], 1.0, 0.0) - tl.load(places, mask=is_after & is_pair, other=0.0)
    size = 2
    while size < N:
        is_near = (n[:, None] // size != n[None, :] // size) & (n[:, None] // (2 * size) == n[None, :] // (2 * size))
        corner = tl.load(places, mask=is_after & is_near, other=0.0)
        inverse -= exact_product(exact_product(inverse, corner, PRECISION), inverse, PRECISION)
        size *= 2
    return inverse


@triton.jit
def tiles_kernel(
    k,
    w,
    beta,
    inverses,
    met,
    u,
    carried,
    T,
    TILES,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The products of the reflections of a tile: see `reflected`. The grid is (TILES, Hkv, B).

    Args:
        k, w: keys and unit vectors [B, Hkv, T, D].
        beta: strengths of the reflections, [B, Hkv, T].
        inverses: result, (I + L)^-1 of each tile, fp32 [B, Hkv, TILES N, N].
        met, u: results, fp32 [B, Hkv, TILES N, N] and [B, Hkv, TILES N, D]; zeros beyond the end of the text.
        carried: result, fp32 [B, Hkv, TILES, R N, D]. This kernel makes the keys at the end of their own tile;
            `carry_kernel` makes the others.
    """
    tile = tl.program_id(0)
    _b, _group, kv_head = numbers_of_key_heads()
    n = tl.arange(0, N)
    i = tile * N + n
    is_after = i[:, None] > i[None, :]
    w_tile = load_rows(w + kv_head * T * D, i, T, D)
    weighted = w_tile * load_numbers(beta + kv_head * T, i, T)[:, None]
    tile_rows = kv_head * TILES * N + i
    # Memory that `met` takes later: in registers there is no room.
    tl.store(met + tile_rows[:, None] * N + n[None, :], exact_product(weighted, tl.trans(w_tile), PRECISION))
    tl.debug_barrier()  # other threads may read what these have stored
    inverse = inverse_of(met + (kv_head * TILES + tile) * N * N, N, PRECISION)
    tl.store(inverses + tile_rows[:, None] * N + n[None, :], inverse)
    tl.debug_barrier()

    # What each part needs is loaded again behind a barrier: all at once would take more registers than there are.
    strength = load_numbers(beta + kv_head * T, i, T)
    weighted = load_rows(w + kv_head * T * D, i, T, D) * strength[:, None]
    u_tile = exact_product(load_tile(inverses, tile_rows, N), weighted, PRECISION)
    channels = tl.arange(0, D)
    tl.store(u + tile_rows[:, None] * D + channels[None, :], u_tile)
    tl.debug_barrier()
    weighted = load_rows(w + kv_head * T * D, i, T, D) * strength[:, None]
    k_tile = load_rows(k + kv_head * T * D, i, T, D).to(tl.float32)
    right = tl.where(is_after, exact_product(weighted, tl.trans(k_tile), PRECISION), 0.0)
    met_tile = exact_product(load_tile(inverses, tile_rows, N), right, PRECISION)
    tl.store(met + tile_rows[:, None] * N + n[None, :], met_tile)
    tl.debug_barrier()
    k_tile = load_rows(k + kv_head * T * D, i, T, D).to(tl.float32)
    w_tile = load_rows(w + kv_head * T * D, i, T, D)
    at_end = k_tile - exact_product(tl.trans(met_tile), w_tile, PRECISION)
    key_rows = (kv_head * TILES + tile) * R * N + tile % R * N + n
    tl.store(carried + key_rows[:, None] * D + channels[None, :], at_end)


@triton.jit
def carry_kernel(
    w,
    u,
    carried,
    crossings,
    T,
    TILES,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Carry a tile of keys on to all later places of its span, or make N rows of the crossing from a place.

    The grid is (TILES (1 + blocks of N rows), Hkv, B): first all tiles of keys, then the first N rows of all crossings,
    and so on.

    Args:
        carried: result for all places but the end of the keys' own tile, which `tiles_kernel` has made before.
        crossings: result, fp32 [B, Hkv, TILES, D, D].
    """
    tile = tl.program_id(0) % TILES
    part = tl.program_id(0) // TILES
    _b, _group, kv_head = numbers_of_key_heads()
    n = tl.arange(0, N)
    channels = tl.arange(0, D)
    start = tile // R * R
    w += kv_head * T * D
    u += kv_head * TILES * N * D
    if part == 0:
        # A key k becomes k - (k u^T) w.
        key_rows = (kv_head * TILES + tile) * R * N + (tile - start) * N + n
        key_tile = load_tile(carried, key_rows, D)
        for c in range(tile + 1, start + R):
            past_u = exact_product(key_tile, tl.trans(load_tile(u, c * N + n, D)), PRECISION)
            key_tile -= exact_product(past_u, load_rows(w, c * N + n, T, D), PRECISION)
            key_rows += R * N
            tl.store(carried + key_rows[:, None] * D + channels[None, :], key_tile)
    else:
        # A query q becomes q - (q w^T) u. Rows of the identity do, too.
        rows = (part - 1) * N + n
        identity = tl.where(rows[:, None] == channels[None, :], 1.0, 0.0)
        x = identity
        for back in range(tile - start + 1):
            j = (tile - back) * N + n
            past_w = exact_product(x, tl.trans(load_rows(w, j, T, D)), PRECISION)
            x -= exact_product(past_w, load_tile(u, j, D), PRECISION)
        places = (kv_head * TILES + tile) * D * D + rows[:, None] * D + channels[None, :]
        tl.store(crossings + places, x - identity, mask=rows[:, None] < D)


@triton.jit
def carry_back_kernel(
    w,
    u,
    carried_grad,
    crossings_grad,
    T,
    TILES,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add to the gradients at each place what those at later places of the span give: `carry_kernel` backwards.

    The grid is that of `carry_kernel`.
    """
    tile = tl.program_id(0) % TILES
    part = tl.program_id(0) // TILES
    _b, _group, kv_head = numbers_of_key_heads()
    n = tl.arange(0, N)
    channels = tl.arange(0, D)
    start = tile // R * R
    last = kv_head * TILES + start + R - 1
    w += kv_head * T * D
    u += kv_head * TILES * N * D
    # The gradients of a tile of keys at the last place, or N columns of those of the crossing, as rows.
    places = carried_grad + (last * R + tile - start) * N * D + n[:, None] * D + channels[None, :]
    step = R * N * D
    inside = n[:, None] < N
    oldest = tile
    if part > 0:
        columns = (part - 1) * N + n
        places = crossings_grad + last * D * D + channels[None, :] * D + columns[:, None]
        step = D * D
        inside = columns[:, None] < D
        # The first tile of a span does this for all.
        oldest = tl.where(tile == start, start, start + R)
    x = tl.load(places, mask=inside, other=0.0)
    for back in range(start + R - 1 - oldest):
        j = (start + R - 1 - back) * N + n
        past_w = exact_product(x, tl.trans(load_rows(w, j, T, D)), PRECISION)
        x -= exact_product(past_w, load_tile(u, j, D), PRECISION)
        places -= step
        x += tl.load(places, mask=inside, other=0.0)
        tl.store(places, x, mask=inside)


@triton.jit
def passing_kernel(
    w,
    u,
    carried,
    crossings,
    w_grad,
    u_grad,
    carried_grad,
    crossings_grad,
    T,
    TILES,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the keys and queries that pass a tile give to the gradients of w and u. The grid is (TILES, Hkv, B).

    Args:
        carried_grad, crossings_grad: as of `carry_back_kernel`, which runs before.
        w_grad, u_grad: sums so far, fp32, as w and u.
    """
    tile = tl.program_id(0)
    _b, _group, kv_head = numbers_of_key_heads()
    n = tl.arange(0, N)
    channels = tl.arange(0, D)
    i = tile * N + n
    start = tile // R * R
    place = kv_head * TILES + tile
    w += kv_head * T * D
    u += kv_head * TILES * N * D

    places = i[:, None] * D + channels[None, :]
    w_places = w_grad + kv_head * T * D + places
    u_places = u_grad + kv_head * TILES * N * D + places

    # A crossing from here is I - w^T u and then the crossing from the place before, if that is in the span. What each
    # part needs is loaded again, and its sums go to memory, since all at once would take more registers than there are.
    this_crossing = crossings_grad + place * D * D
    crossing_before = crossings + (place - 1) * D * D
    past_w = exact_product(load_rows(w, i, T, D), load_tile(this_crossing, channels, D), PRECISION)
    u_acc = -past_w
    if tile > start:
        u_acc -= exact_product(past_w, tl.trans(load_tile(crossing_before, channels, D)), PRECISION)
    add_to(u_places, u_acc, i[:, None] < TILES * N)
    tl.debug_barrier()

    past_u = load_tile(u, i, D)
    if tile > start:
        past_u += exact_product(past_u, load_tile(crossing_before, channels, D), PRECISION)
    w_acc = -exact_product(past_u, tl.trans(load_tile(this_crossing, channels, D)), PRECISION)
    add_to(w_places, w_acc, i[:, None] < T)
    tl.debug_barrier()  # other threads may add to the same places below

    # A key k of an older tile becomes k - (k u^T) w.
    w_acc = tl.zeros([N, D], tl.float32)
    u_acc = tl.zeros([N, D], tl.float32)
    for older in tl.range(0, tile - start, disable_licm=True):
        rows = place * R * N + older * N + n
        x = load_tile(carried, rows - R * N, D)
        key_grad = load_tile(carried_grad, rows, D)
        key_past_u = exact_product(x, tl.trans(load_tile(u, i, D)), PRECISION)
        w_acc -= exact_product(tl.trans(key_past_u), key_grad, PRECISION)
        key_past_w = exact_product(key_grad, tl.trans(load_rows(w, i, T, D)), PRECISION)
        u_acc -= exact_product(tl.trans(key_past_w), x, PRECISION)
    add_to(w_places, w_acc, i[:, None] < T)
    add_to(u_places, u_acc, i[:, None] < TILES * N)


@triton.jit
def tiles_back_kernel(
    k,
    w,
    beta,
    inverses,
    met,
    u,
    k_grad,
    w_grad,
    beta_grad,
    met_grad,
    u_grad,
    carried_grad,
    T,
    TILES,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add to the gradients of k and w what `tiles_kernel` gives them, and make those of beta.

    The grid is (TILES, Hkv, B).

    Args:
        k_grad, w_grad: sums so far, fp32 [B, Hkv, T, D].
        beta_grad: result, fp32 [B, Hkv, T].
        met_grad, u_grad: as met and u; what `met_grad` holds afterwards means nothing.
        carried_grad: as of `carry_back_kernel`, which runs before.
    """
    tile = tl.program_id(0)
    _b, _group, kv_head = numbers_of_key_heads()
    n = tl.arange(0, N)
    channels = tl.arange(0, D)
    i = tile * N + n
    is_after = i[:, None] > i[None, :]
    tile_rows = kv_head * TILES * N + i
    places = kv_head * T * D + i[:, None] * D + channels[None, :]
    inside = i[:, None] < T

    strength = load_numbers(beta + kv_head * T, i, T)
    end_rows = (kv_head * TILES + tile) * R * N + tile % R * N + n
    square = tile_rows[:, None] * N + n[None, :]

    # Each part loads what it needs and stores what it makes, since all at once would take more registers than there
    # are. Other threads may read what these have stored, hence the barriers.
    # at_end = k - met^T w
    end_grad = load_tile(carried_grad, end_rows, D)
    w_acc = -exact_product(load_tile(met, tile_rows, N), end_grad, PRECISION)
    add_to(w_grad + places, w_acc, inside)
    tl.debug_barrier()
    w_tile = load_rows(w + kv_head * T * D, i, T, D)
    met_acc = exact_product(w_tile, tl.trans(load_tile(carried_grad, end_rows, D)), PRECISION)
    tl.store(met_grad + square, load_tile(met_grad, tile_rows, N) - met_acc)
    tl.debug_barrier()

    # (I + left) (met, u) = (right, weighted)
    inverse = load_tile(inverses, tile_rows, N)
    right_grad = exact_product(tl.trans(inverse), load_tile(met_grad, tile_rows, N), PRECISION)
    tl.debug_barrier()
    tl.store(met_grad + square, right_grad)
    tl.debug_barrier()
    inverse = load_tile(inverses, tile_rows, N)
    weighted_grad = exact_product(tl.trans(inverse), load_tile(u_grad, tile_rows, D), PRECISION)
    left_grad = exact_product(weighted_grad, tl.trans(load_tile(u, tile_rows, D)), PRECISION)
    tl.debug_barrier()
    right_grad = load_tile(met_grad, tile_rows, N)
    left_grad += exact_product(right_grad, tl.trans(load_tile(met, tile_rows, N)), PRECISION)
    left_grad = tl.where(is_after, -left_grad, 0.0)
    tl.debug_barrier()

    # left and right are what of weighted w^T and weighted k^T is below the diagonal.
    right_grad = tl.where(is_after, load_tile(met_grad, tile_rows, N), 0.0)
    weighted = load_rows(w + kv_head * T * D, i, T, D) * strength[:, None]
    k_acc = load_tile(carried_grad, end_rows, D) + exact_product(tl.trans(right_grad), weighted, PRECISION)
    add_to(k_grad + places, k_acc, inside)
    tl.debug_barrier()
    right_grad = tl.where(is_after, load_tile(met_grad, tile_rows, N), 0.0)
    k_tile = load_rows(k + kv_head * T * D, i, T, D).to(tl.float32)
    weighted_grad += exact_product(right_grad, k_tile, PRECISION)
    tl.debug_barrier()
    w_tile = load_rows(w + kv_head * T * D, i, T, D)
    weighted_grad += exact_product(left_grad, w_tile, PRECISION)
    store_numbers(beta_grad + kv_head * T, i, T, tl.sum(weighted_grad * w_tile, 1))
    add_to(w_grad + places, weighted_grad * strength[:, None], inside)
    tl.debug_barrier()
    weighted = load_rows(w + kv_head * T * D, i, T, D) * strength[:, None]
    add_to(w_grad + places, exact_product(tl.trans(left_grad), weighted, PRECISION), inside)


class Places(NamedTuple):
    """What the reflections of a text do, in tiles of N tokens and spans of R tiles, or the gradients of this; fp32.

    `TILES` counts the tiles of whole spans, which may be more than those of the text.
    """

    met: Tensor  # of each tile, see `reflected`, [B, Hkv, TILES N, N]; zeros beyond the end of the text
    u: Tensor  # [B, Hkv, TILES N, D]
    carried: Tensor  # the keys of a span at the place of each of its tiles, [B, Hkv, TILES, R N, D]
    crossings: Tensor  # from each place to the start of its span, less the identity, [B, Hkv, TILES, D, D]


def places_of(k: Tensor, w: Tensor, beta: Tensor, size: Tiles, precision: str) -> tuple[Tensor, Places]:
    """Compute what reflections do to keys and queries.

    Args:
        k: keys [B, Hkv, T, D].
        w, beta: unit vectors and strengths of the reflections, fp32 [B, Hkv, T, D] and [B, Hkv, T].
        precision: of products, see `precision_of`.

    Returns:
        The inverses of `tiles_kernel`, which `add_gradients` needs, and the places.
    """
    n_batch, n_kv_head, length, head_dim = k.shape
    n_tiles = size.span * triton.cdiv(length, size.tokens * size.span)
    heads = (n_batch, n_kv_head)
    inverses = w.new_empty((*heads, n_tiles * size.tokens, size.tokens))
    met = torch.empty_like(inverses)
    u = w.new_empty((*heads, n_tiles * size.tokens, head_dim))
    carried = w.new_empty((*heads, n_tiles, size.span * size.tokens, head_dim))
    crossings = w.new_empty((*heads, n_tiles, head_dim, head_dim))

    flags = _flags(head_dim, size, precision)
    tiles_kernel[(n_tiles, n_kv_head, n_batch)](k, w, beta, inverses, met, u, carried, length, n_tiles, **flags)
    carry_kernel[_grid_of_carrying(k, n_tiles, size.tokens)](w, u, carried, crossings, length, n_tiles, **flags)
    return inverses, Places(met, u, carried, crossings)


def add_gradients(
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    inverses: Tensor,
    places: Places,
    place_grads: Places,
    k_grad: Tensor,
    w_grad: Tensor,
    size: Tiles,
    precision: str,
) -> Tensor:
    """Compute the backward pass of `places_of`: add to the gradients of k and w, and return that of beta.

    Args:
        inverses, places: the results of `places_of` for k, w and beta.
        place_grads: the gradients of `places`; what they hold afterwards means nothing.
        k_grad, w_grad: sums so far, fp32 [B, Hkv, T, D].

    Returns:
        fp32 [B, Hkv, T].
    """
    n_batch, n_kv_head, length, head_dim = k.shape
    met, u, carried, crossings = places
    met_grad, u_grad, carried_grad, crossings_grad = place_grads
    beta_grad = torch.empty_like(beta)
    n_tiles = carried.size(2)
    all_tiles = (n_tiles, n_kv_head, n_batch)
    flags = _flags(head_dim, size, precision)
    carry_back_kernel[_grid_of_carrying(k, n_tiles, size.tokens)](
        w, u, carried_grad, crossings_grad, length, n_tiles, **flags
    )
    passing_kernel[all_tiles](
        w, u, carried, crossings, w_grad, u_grad, carried_grad, crossings_grad, length, n_tiles, **flags
    )
    tiles_back_kernel[all_tiles](
        k, w, beta, inverses, met, u, k_grad, w_grad, beta_grad, met_grad, u_grad, carried_grad, length, n_tiles,
        **flags,
    )  # fmt: skip
    return beta_grad


def _grid_of_carrying(k: Tensor, n_tiles: int, tile: int) -> tuple[int, int, int]:
    """The grid of `carry_kernel` and `carry_back_kernel`, for keys [B, Hkv, T, D] in tiles of so many tokens."""
    return n_tiles * (1 + triton.cdiv(k.size(3), tile)), k.size(1), k.size(0)


def _flags(head_dim: int, size: Tiles, precision: str) -> dict[str, Any]:
    """What all kernels of this module are compiled for."""
    return {
        "D": head_dim,
        "N": size.tokens,
        "R": size.span,
        "PRECISION": precision,
        "num_warps": size.backward_warps,
        "num_stages": size.own_stages,
    }
