"""The gated delta rule over a tile on a GPU: four Pallas kernels through Triton. Pure functions, called while tracing.

Chunks of 64 tokens. Three kernels do for all chunks at once what does not need the state: the scores A and P in bands
of 16 rows, the inverse of I + A by substitution in 16 x 16 blocks (never by repeated squaring, whose powers explode
for equal keys), and W and U. The fourth walks the chunks with the state in registers, a block of value channels a
program. (As one kernel they spilled 2 to 4 KB a thread: aot_and_numerics, section 3.)

Every exponent is a sum of log decays over a span of tokens, so none is positive, and spans are summed directly, never
as differences of running sums, which cancel after a strong decay. Between two bands the span has three parts: the
later band from its second row on, its first row and the whole bands between, and what follows the token in its band.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton, _tuned
from pallas_kernels.linear_recurrence._solve import l2norm

CHUNK_TOKENS = 64
_BAND = 16
_BANDS = CHUNK_TOKENS // _BAND


@dataclass(frozen=True)
class ChunkTiles:
    """Value channels of one program of the scan, and warps of each kernel."""

    value_channels: int
    scan_warps: int
    score_warps: int
    wu_warps: int


def chunk_tiles(h: int, d: int, v: int, per_channel: bool) -> ChunkTiles:
    """What does not spill on any target: a scan over 32 channels with 8 warps spills 20 bytes on an H100."""
    heuristic = ChunkTiles(min(v, 16), 4, 4, 8)
    shape = dict(h=h, d=d, v=v, per_channel=int(per_channel))
    return _tuned.choose("linear_recurrence", "chunks", shape, heuristic)


def _scores_kernel(q_ref, k_ref, inside_ref, first_ref, after_ref, total_ref, decay_ref, beta_ref, a_ref, p_ref, *,
                   per_channel, interpret):  # fmt: skip
    """One band of A (strictly lower, rows times beta) and P (lower). Decays are [token, channel] or [token, 1]."""
    band = lax.rem(pl.program_id(0), _BANDS)
    at = pl.ds(band * _BAND, _BAND)
    r = lax.broadcasted_iota(jnp.int32, (_BAND, _BAND), 0)
    c = lax.broadcasted_iota(jnp.int32, (_BAND, _BAND), 1)
    zero = jnp.zeros((_BAND, _BAND), jnp.float32)
    beta = beta_ref[at][:, None]
    q, k = q_ref[at, :], k_ref[at, :]

    def decays(ref, index):
        return ref[index, :] if per_channel else ref[index][:, None]

    inside = jnp.exp(decays(inside_ref, at))
    q_in, k_in = q * inside, k * inside

    def left(i, between):
        """Band `band - 1 - i`, then the one before it; `between` is the log decay of what lies between."""
        j = band - 1 - i
        columns = pl.ds(j * _BAND, _BAND)
        span = decays(after_ref, columns) + (between[None, :] if per_channel else between)
        k_out = k_ref[columns, :] * jnp.exp(span)
        a_ref[at, columns] = _triton.dot(k_in, k_out, (1, 1), interpret=interpret) * beta
        p_ref[at, columns] = _triton.dot(q_in, k_out, (1, 1), interpret=interpret)
        return between + (total_ref[j, :] if per_channel else total_ref[j])

    def right(j, carry):
        columns = pl.ds(j * _BAND, _BAND)
        a_ref[at, columns] = zero
        p_ref[at, columns] = zero
        return carry

    lax.fori_loop(0, band, left, first_ref[band, :] if per_channel else first_ref[band])
    lax.fori_loop(band + 1, _BANDS, right, band)

    # Inside the band no common reference point is safe: each column with its own spans, from the last to the first.
    row = lax.broadcasted_iota(jnp.int32, (_BAND, 1), 0)

    def column(i, carry):
        a, p, span = carry
        m = _BAND - 1 - i
        k_m = k_ref[band * _BAND + m, :][None, :] * jnp.exp(span)
        a = jnp.where(c == m, jnp.sum(k * k_m, axis=1)[:, None], a)
        p = jnp.where(c == m, jnp.sum(q * k_m, axis=1)[:, None], p)
        decay = decay_ref[band * _BAND + m, :][None, :] if per_channel else decay_ref[band * _BAND + m]
        return a, p, jnp.where(row >= m, span + decay, jnp.float32(0))

    span = jnp.zeros((_BAND, q.shape[1] if per_channel else 1), jnp.float32)
    a, p, _ = lax.fori_loop(0, _BAND, column, (zero, zero, span))
    a_ref[at, at] = jnp.where(r > c, a * beta, jnp.float32(0))
    p_ref[at, at] = jnp.where(r >= c, p, jnp.float32(0))


def _small_dot(a, b, interpret):
    """16 x 16 blocks are small enough for IEEE products."""
    del interpret
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)


def _band_inverse(a):
    """(I + a)^-1 of a strictly lower 16 x 16 block, row by row."""
    r = lax.broadcasted_iota(jnp.int32, (_BAND, _BAND), 0)
    c = lax.iota(jnp.int32, _BAND)

    def row(i, inverse):
        left = jnp.sum(jnp.where(r == i, a, jnp.float32(0)), axis=0)
        unit = jnp.where(c == i, jnp.float32(1), jnp.float32(0))
        return jnp.where(r == i, (unit - jnp.sum(left[:, None] * inverse, axis=0))[None, :], inverse)

    return lax.fori_loop(0, _BAND, row, jnp.zeros((_BAND, _BAND), jnp.float32))


def _inverse_kernel(a_ref, inverse_ref, *, interpret):
    """(I + A)^-1, block rows from the top."""
    at = [pl.ds(i * _BAND, _BAND) for i in range(_BANDS)]
    done: dict[tuple[int, int], jax.Array] = {}
    for i in range(_BANDS):
        done[i, i] = _band_inverse(a_ref[at[i], at[i]])
        for j in range(i):
            total = _small_dot(a_ref[at[i], at[j]], done[j, j], interpret)
            for m in range(j + 1, i):
                total += _small_dot(a_ref[at[i], at[m]], done[m, j], interpret)
            done[i, j] = -_small_dot(done[i, i], total, interpret)
        for j in range(_BANDS):
            inverse_ref[at[i], at[j]] = done.get((i, j), jnp.zeros((_BAND, _BAND), jnp.float32))


def _wu_kernel(inverse_ref, k_ref, v_ref, start_ref, beta_ref, w_ref, u_ref, *, per_channel, interpret):
    """32 columns at a time: three TF32 parts of wider operands spilled 1.1 KB on sm_120."""
    inverse, beta = inverse_ref[...], beta_ref[...][:, None]

    def columns(i, width):
        return pl.ds(i * width, width)

    def w_columns(i, carry):
        at = columns(i, min(32, k_ref.shape[1]))
        start = jnp.exp(start_ref[:, at] if per_channel else start_ref[...][:, None])
        w_ref[:, at] = _triton.dot(inverse, k_ref[:, at] * beta * start, interpret=interpret)
        return carry

    def u_columns(i, carry):
        at = columns(i, min(32, v_ref.shape[1]))
        u_ref[:, at] = _triton.dot(inverse, v_ref[:, at] * beta, interpret=interpret)
        return carry

    lax.fori_loop(0, max(1, k_ref.shape[1] // 32), w_columns, jnp.int32(0))
    lax.fori_loop(0, max(1, v_ref.shape[1] // 32), u_columns, jnp.int32(0))


# The scan's products are rounded to TF32 on a chip: with three parts of each operand it spilled 0.4 to 1.9 KB a thread.


def _scan_kernel(q_ref, k_ref, whole_ref, p_ref, w_ref, u_ref, slot_ref, states_in, out_ref, grid_ref, states_ref, *,
                 n_chunks, chunks_a_grid, per_channel, block, interpret):  # fmt: skip
    """q decayed from the chunk's start, k to its end. (Decaying them here spilled 0.1 to 0.3 KB with channels.)"""
    column, h = pl.program_id(0), pl.program_id(1)
    at = pl.ds(column * block, block)
    slot = slot_ref[0]

    def dot(a, b, contract=(1, 0)):
        return _triton.dot(a, b, contract, interpret=interpret, exact=False)

    def chunk(n, state_dv):
        new_iv = u_ref[n] - dot(w_ref[n], state_dv)
        out_ref[n] = dot(q_ref[n], state_dv) + dot(p_ref[n], new_iv)
        state_dv = state_dv * (whole_ref[n][:, None] if per_channel else whole_ref[n])
        state_dv = state_dv + dot(k_ref[n], new_iv, (0, 0))

        @pl.when(lax.rem(n + 1, chunks_a_grid) == 0)
        def _():
            grid_ref[lax.div(n, chunks_a_grid)] = state_dv

        return state_dv

    states_ref[slot, h, :, at] = lax.fori_loop(0, n_chunks, chunk, states_in[slot, h, :, at])


def gated_delta_prefill(
    q_tkd,
    k_tkd,
    v_thv,
    log_decay_th,
    beta_th,
    states_shdv,
    slot,
    *,
    grid_tokens,
    interpret=False,
    tiles=None,
):
    """See the entry point."""
    t, n_k, d = q_tkd.shape
    h, v = v_thv.shape[1:]
    per_channel = log_decay_th.ndim == 3
    _triton.power_of_two("linear_recurrence.gated_delta_prefill", key_dim=d, value_dim=v)
    if grid_tokens % CHUNK_TOKENS and grid_tokens != t:
        raise ValueError(
            "linear_recurrence.gated_delta_prefill: the gpu backend emits states at multiples of "
            f"{CHUNK_TOKENS} tokens, not of {grid_tokens}"
        )
    tiles = tiles or chunk_tiles(h, d, v, per_channel)
    n = -(-t // CHUNK_TOKENS)
    chunks_a_grid = -(-grid_tokens // CHUNK_TOKENS)

    def chunks(x):
        """[t, heads, ...] -> float32 [heads, n, chunk, ...]; padded with zeros, which leave the state alone."""
        x = jnp.pad(x.astype(jnp.float32), [(0, n * CHUNK_TOKENS - t)] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(x, 1, 0).reshape(x.shape[1], n, CHUNK_TOKENS, *x.shape[2:])

    q, k = chunks(l2norm(q_tkd) * jnp.float32(d**-0.5)), chunks(l2norm(k_tkd))
    values, decay, beta = chunks(v_thv), chunks(log_decay_th), chunks(beta_th)
    spans = _spans(decay)
    heads_per_key = h // n_k

    def block(*shape, by_key=False, bands=1):
        def index(i, head):
            return (lax.div(head, heads_per_key) if by_key else head, lax.div(i, bands), *(0,) * len(shape))

        return pl.BlockSpec((None, None, *shape), index)

    channels = (d,) if per_channel else ()
    square = (CHUNK_TOKENS, CHUNK_TOKENS)
    gate, qk = (CHUNK_TOKENS, *channels), (CHUNK_TOKENS, d)
    band_gate = (_BANDS, *channels)

    def result(*shape):
        return jax.ShapeDtypeStruct((h, n, *shape), jnp.float32)

    common = dict(stages=1, interpret=interpret)
    kind = dict(per_channel=per_channel, interpret=interpret)
    of_band = functools.partial(block, bands=_BANDS)
    a, p = _triton.call(
        functools.partial(_scores_kernel, **kind),
        q, k, spans.inside, spans.first, spans.after, spans.total, decay, beta,
        name="delta_scores", grid=(n * _BANDS, h), warps=tiles.score_warps,
        in_specs=[of_band(*qk, by_key=True), of_band(*qk, by_key=True), of_band(*gate), of_band(*band_gate),
                  of_band(*gate), of_band(*band_gate), of_band(*gate), of_band(CHUNK_TOKENS)],
        out_specs=[of_band(*square)] * 2, out_shape=[result(*square)] * 2, **common,
    )  # fmt: skip
    (inverse,) = _triton.call(
        functools.partial(_inverse_kernel, interpret=interpret), a, name="delta_inverse", grid=(n, h), warps=1,
        in_specs=[block(*square)], out_specs=[block(*square)], out_shape=[result(*square)], **common,
    )  # fmt: skip
    w, u = _triton.call(
        functools.partial(_wu_kernel, **kind), inverse, k, values, spans.start, beta,
        name="delta_wu", grid=(n, h), warps=tiles.wu_warps,
        in_specs=[block(*square), block(*qk, by_key=True), block(CHUNK_TOKENS, v), block(*gate),
                  block(CHUNK_TOKENS)],
        out_specs=[block(*qk), block(CHUNK_TOKENS, v)], out_shape=[result(*qk), result(CHUNK_TOKENS, v)],
        **common,
    )  # fmt: skip

    def head(*shape, column=False):
        def index(i, head):
            return head, *(0,) * (len(shape) - 1), i if column else 0

        return pl.BlockSpec((None, *shape), index)

    def decayed(x, log_decay):
        factor = jnp.exp(log_decay if per_channel else log_decay[..., None])
        return jnp.repeat(x, heads_per_key, axis=0) * factor

    q_in, k_out = decayed(q, spans.start), decayed(k, spans.end)
    whole = jnp.exp(spans.start[:, :, -1])
    whole_of_head = pl.BlockSpec((None, n, *channels), lambda i, head: (head, 0, *(0,) * len(channels)))
    bv = tiles.value_channels
    slot_1 = jnp.reshape(slot, (1,))
    n_grid = t // grid_tokens
    rows = jax.ShapeDtypeStruct(states_shdv.shape, jnp.float32)
    out, grid_states, states = _triton.call(
        functools.partial(_scan_kernel, n_chunks=n, chunks_a_grid=chunks_a_grid, block=bv, **kind),
        q_in, k_out, whole, p, w, u, slot_1, states_shdv,
        name="delta_scan", grid=(v // bv, h), warps=tiles.scan_warps,
        in_specs=[head(n, *qk), head(n, *qk), whole_of_head,
                  head(n, *square), head(n, *qk), head(n, CHUNK_TOKENS, bv, column=True),
                  _triton.whole(slot_1), _triton.whole(rows)],
        out_specs=[head(n, CHUNK_TOKENS, bv, column=True),
                   pl.BlockSpec((n_grid, None, d, bv), lambda i, head: (0, head, 0, i)), _triton.whole(rows)],
        out_shape=[result(CHUNK_TOKENS, v), jax.ShapeDtypeStruct((n_grid, h, d, v), jnp.float32), rows],
        in_place={7: 2}, **common,
    )  # fmt: skip
    out_thv = jnp.moveaxis(out.reshape(h, n * CHUNK_TOKENS, v), 0, 1)[:t]
    return out_thv, grid_states, states


@dataclass(frozen=True)
class _Spans:
    """Log decays over spans of a chunk [h, n, 64, ...] or of its bands [h, n, 4, ...], none positive."""

    inside: jax.Array
    """From the band's second token to this one."""
    first: jax.Array
    """The band's first token."""
    after: jax.Array
    """From the next token to the band's end."""
    total: jax.Array
    """The whole band."""
    start: jax.Array
    """From the chunk's first token to this one."""
    end: jax.Array
    """From the next token to the chunk's end."""


def _spans(decay) -> _Spans:
    shape = decay.shape
    bands = decay.reshape(*shape[:2], _BANDS, _BAND, *shape[3:])

    def cumulative(x, axis, reverse=False):
        return jnp.flip(jnp.cumsum(jnp.flip(x, axis), axis), axis) if reverse else jnp.cumsum(x, axis)

    def without(x, axis, index):
        """Zeros at one place of an axis."""
        keep = np.ones(x.shape[axis], np.float32)
        keep[index] = 0
        return x * keep.reshape([-1 if i == axis else 1 for i in range(x.ndim)])

    def shifted(x, axis):
        """Each place holds what the next one held, the last zero: exclusive sums from inclusive ones."""
        return without(jnp.roll(x, -1, axis), axis, -1)

    return _Spans(
        inside=cumulative(without(bands, 3, 0), 3).reshape(shape),
        first=bands[:, :, :, 0],
        after=shifted(cumulative(bands, 3, reverse=True), 3).reshape(shape),
        total=jnp.sum(bands, axis=3),
        start=cumulative(decay, 2),
        end=shifted(cumulative(decay, 2, reverse=True), 2),
    )


def gated_delta_tile(q_tkd, k_tkd, v_thv, log_decay_th, beta_th, state_hdv, *, interpret=False):
    """See the entry point."""
    out_thv, _, states = gated_delta_prefill(
        q_tkd,
        k_tkd,
        v_thv,
        log_decay_th,
        beta_th,
        state_hdv[None],
        jnp.int32(0),
        grid_tokens=q_tkd.shape[0],
        interpret=interpret,
    )
    return out_thv, states[0]
