"""Do the recurrences compute what the reference does, stay stable at their limits, and work in place?"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels import linear_recurrence
from pallas_kernels.linear_recurrence.cases import CASES
from pallas_kernels.linear_recurrence.programs import gates
from tests.pallas_kernels.arrays import assert_close, assert_in_place, assert_same_bits, normal

SMALL = [case for case in CASES if not case.large]
N_SLOTS = 9


@functools.cache
def _run(function: str, backend: str = "xla"):
    return jax.jit(functools.partial(getattr(linear_recurrence, function), backend=backend))


def _delta_inputs(case, n: int, seed: int = 0):
    """q, k, v, log_decay, beta of n tokens."""
    rng = np.random.default_rng(seed)
    q, k = (normal(rng, n, case.key_heads, case.key_dim, dtype=case.dtype) for _ in range(2))
    v = normal(rng, n, case.value_heads, case.value_dim, dtype=case.dtype)
    beta = jax.nn.sigmoid(normal(rng, n, case.value_heads))
    if case.per_channel:
        return q, k, v, jnp.asarray(gates(case, n)(rng)), beta
    return q, k, v, -jnp.exp(normal(rng, n, case.value_heads)), beta


def _states(case, *leading: int, seed: int = 1):
    shape = (*leading, case.value_heads, case.key_dim, case.value_dim)
    return normal(np.random.default_rng(seed), *shape)


def _slots(case):
    return jnp.asarray(np.random.default_rng(2).permutation(N_SLOTS)[: case.batch], jnp.int32)


def _assert_pair_close(got, want):
    for got_array, want_array in zip(got, want, strict=True):
        assert got_array.dtype == want_array.dtype
        assert_close(got_array, want_array, str(got_array.dtype))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_delta_rule_agrees_with_the_reference(case):
    args = (*_delta_inputs(case, case.tile_tokens), _states(case))
    got, want = (_run("gated_delta_tile", backend)(*args) for backend in ("xla", "reference"))
    assert got[0].dtype == got[1].dtype == jnp.float32
    _assert_pair_close(got, want)
    args = (*_delta_inputs(case, case.batch), _states(case, N_SLOTS), _slots(case))
    got, want = (_run("gated_delta_decode", backend)(*args) for backend in ("xla", "reference"))
    _assert_pair_close(got, want)
    others = np.setdiff1d(np.arange(N_SLOTS), np.asarray(args[-1]))
    assert_same_bits(got[1][others], args[-2][others])


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_convolution_agrees_with_the_reference(case):
    rng = np.random.default_rng(3)
    channels, n_tail = case.conv_channels, case.taps - 1
    weight = normal(rng, channels, 1, case.taps, dtype=case.dtype)
    x_tc = normal(rng, case.tile_tokens, channels, dtype=case.dtype)
    tails = normal(rng, N_SLOTS, n_tail, channels, dtype=case.dtype)
    for valid_tokens in {0, case.tile_tokens // 2, case.tile_tokens}:
        args = (x_tc, tails[0], weight, jnp.int32(valid_tokens))
        got, want = (_run("short_conv_tile", backend)(*args) for backend in ("xla", "reference"))
        _assert_pair_close(got, want)
        assert_same_bits(got[1], jnp.concatenate([tails[0], x_tc])[valid_tokens : valid_tokens + n_tail])
    args = (normal(rng, case.batch, channels, dtype=case.dtype), tails, weight, _slots(case))
    got, want = (_run("short_conv_decode", backend)(*args) for backend in ("xla", "reference"))
    _assert_pair_close(got, want)
    assert_same_bits(got[1], want[1])


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(
    name=st.sampled_from(["odd-tile", "kda-odd-tile"]),
    seed=st.integers(0, 9),
    log_decay=st.sampled_from([0.0, -1e-6, -0.1, -5.0, -80.0, -1e3]),
    mixed=st.booleans(),
    beta=st.sampled_from([0.0, 0.5, 1.0]),
    key_noise=st.sampled_from([0.0, 1e-4, 1.0]),
)
def test_delta_rule_at_its_limits(name, seed, log_decay, mixed, beta, key_noise):
    """Strong, zero and mixed decay; full and no writes; equal and nearly equal keys."""
    case = next(case for case in CASES if case.name == name)
    q, k, v, some_decay, _ = _delta_inputs(case, 70, seed)
    k = k[:1] + jnp.float32(key_noise) * k
    log_decay_th = jnp.full_like(some_decay, log_decay)
    if mixed:
        chosen = normal(np.random.default_rng(seed), *some_decay.shape) > 0.8
        log_decay_th = jnp.where(chosen, log_decay_th, jnp.float32(-0.01))
    beta_th = jnp.full((70, case.value_heads), beta, jnp.float32)
    args = (q, k, v, log_decay_th, beta_th, _states(case))
    got, want = (_run("gated_delta_tile", backend)(*args) for backend in ("xla", "reference"))
    assert np.isfinite(got[0]).all() and np.isfinite(got[1]).all()
    # Equal keys with beta 1 amplify rounding: the last write wins out of a difference of equal values.
    for got_array, want_array in zip(got, want, strict=True):
        np.testing.assert_allclose(
            got_array, want_array, rtol=0, atol=5e-5 * max(np.abs(want_array).max(), 1e-3)
        )


@pytest.mark.parametrize("name", ["tiny-qwen3_5", "tiny-kimi_linear"])
def test_padding_tokens_leave_the_state_bit_for_bit(name):
    case = next(case for case in CASES if case.name == name)
    q, k, v, log_decay, beta = _delta_inputs(case, 64)
    zero = jnp.zeros_like(beta)
    state = _states(case)
    no_decay = jnp.zeros_like(log_decay)
    assert_same_bits(_run("gated_delta_tile")(q, k, v, no_decay, zero, state)[1], state)
    keep = (jnp.arange(64) < 20)[:, None]
    padded = _run("gated_delta_tile")(
        *(q, k, v, jnp.where(keep.reshape(64, *(1,) * (log_decay.ndim - 1)), log_decay, no_decay)),
        *(jnp.where(keep, beta, zero), state),
    )
    exact = _run("gated_delta_tile", "reference")(q[:20], k[:20], v[:20], log_decay[:20], beta[:20], state)
    assert_close(padded[1], exact[1])
    assert_close(padded[0][:20], exact[0])


def test_tiles_and_tokens_make_one_sequence():
    """A prompt of 128 tokens as one tile, as two tiles, and as a tile and decode steps."""
    case = SMALL[1]
    inputs = _delta_inputs(case, 128)
    state = _states(case)
    whole = _run("gated_delta_tile")(*inputs, state)
    first = _run("gated_delta_tile")(*(x[:64] for x in inputs), state)
    second = _run("gated_delta_tile")(*(x[64:] for x in inputs), first[1])
    assert_close(jnp.concatenate([first[0], second[0]]), whole[0])
    assert_close(second[1], whole[1])
    states = jnp.stack([first[1], first[1]])
    for t in range(64, 70):
        out, states = _run("gated_delta_decode")(
            *(x[t : t + 1] for x in inputs), states, jnp.asarray([1], jnp.int32)
        )
        assert_close(out[0], whole[0][t])
    assert_same_bits(states[0], first[1])


@pytest.mark.parametrize("name", ["tiny-qwen3_next", "tiny-kimi_linear"])
def test_drafts_are_decode_steps(name):
    """Every state on the way is kept, and rows that are not named are left alone."""
    case = next(case for case in CASES if case.name == name)
    states = _states(case, N_SLOTS)
    tokens = tuple(x.reshape(2, 2, *x.shape[1:]) for x in _delta_inputs(case, 4))
    start, end = jnp.asarray([4, 1], jnp.int32), jnp.asarray([[0, 4], [3, 5]], jnp.int32)
    got_out, got = _run("gated_delta_drafts")(*tokens, states, start, end)
    rows = states[start]
    for t in range(2):
        token = (x[:, t] for x in tokens)
        out, rows = _run("gated_delta_decode")(*token, rows, jnp.arange(2, dtype=jnp.int32))
        assert_close(got_out[:, t], out)
        assert_close(got[end[:, t]], rows)
    others = np.setdiff1d(np.arange(N_SLOTS), np.asarray(end))
    assert_same_bits(got[others], states[others])


@pytest.mark.parametrize("name", ["tiny-qwen3_next", "tiny-kimi_linear"])
def test_prefill_is_tiles_from_a_row(name):
    """The state at every grid position, and the last one in the row."""
    case, g = next(case for case in CASES if case.name == name), 16
    inputs, states = _delta_inputs(case, 3 * g), _states(case, N_SLOTS)
    prefill = jax.jit(functools.partial(linear_recurrence.gated_delta_prefill, grid_tokens=g, backend="xla"))
    out, grid_states, rows = prefill(*inputs, states, jnp.int32(7))
    state = states[7]
    for i in range(3):
        part = (x[i * g : (i + 1) * g] for x in inputs)
        want, state = _run("gated_delta_tile")(*part, state)
        assert_close(out[i * g : (i + 1) * g], want)
        assert_close(grid_states[i], state)
    assert_same_bits(rows[7], grid_states[-1])
    assert_same_bits(np.delete(rows, 7, axis=0), np.delete(states, 7, axis=0))


def test_bits_of_a_sequence_in_decode_are_its_own():
    case = next(case for case in CASES if case.name == "hyb-10m")
    batch = 4
    inputs, states = _delta_inputs(case, batch), _states(case, N_SLOTS)
    weight = normal(np.random.default_rng(4), 12, 1, 4)
    x_bc, tails = (
        normal(np.random.default_rng(5), batch, 12),
        normal(np.random.default_rng(6), N_SLOTS, 3, 12),
    )
    slots = jnp.asarray([3, 8, 8, 8], jnp.int32)  # three padding sequences share the scratch slot
    for name, rows, arrays, extra in (
        ("gated_delta_decode", states, inputs, ()),
        ("short_conv_decode", tails, (x_bc,), (weight,)),
    ):

        def call(arrays, rows, slots, name=name, extra=extra):
            middle = (rows, *extra)
            return _run(name)(*arrays, *middle, slots)

        want = call(arrays, rows, slots)
        poisoned = tuple(x.at[1:].set(jnp.nan) for x in arrays)
        got = call(poisoned, rows.at[8].set(jnp.nan).at[6].set(rows[3]), slots.at[0].set(6))
        assert_same_bits(got[0][0], want[0][0])
        assert_same_bits(got[1][6], want[1][3])
        moved = call(tuple(jnp.roll(x, 2, axis=0) for x in arrays), rows, jnp.roll(slots, 2))
        assert_same_bits(moved[0][2], want[0][0])


def test_prefill_bits_do_not_depend_on_the_number_of_tiles():
    case = SMALL[0]
    inputs = tuple(x.reshape(4, 64, *x.shape[1:]) for x in _delta_inputs(case, 256))

    @jax.jit
    def many(n_tiles, inputs, state):
        def tile(i, carry):
            out, state = carry
            tile_out, state = linear_recurrence.gated_delta_tile(*(x[i] for x in inputs), state)
            return out.at[i].set(tile_out), state

        return jax.lax.fori_loop(jnp.int32(0), n_tiles, tile, (jnp.zeros_like(inputs[2]), state))

    all_out, _ = many(jnp.int32(4), inputs, _states(case))
    first_out, state = many(jnp.int32(1), inputs, _states(case))
    rest_out, _ = many(jnp.int32(3), tuple(jnp.roll(x, -1, axis=0) for x in inputs), state)
    assert_same_bits(first_out[0], all_out[0])
    assert_same_bits(rest_out[:3], all_out[1:])


@pytest.mark.parametrize("name", ["odd-tile", "kda-odd-tile"])
@pytest.mark.parametrize("log_decay", [None, -1e3])
def test_gradients_are_those_of_the_reference(name, log_decay):
    case = next(case for case in CASES if case.name == name)
    q, k, v, random_decay, beta = _delta_inputs(case, 37)
    decay = random_decay if log_decay is None else jnp.full_like(random_decay, log_decay)
    q = q.at[5].set(0.0)  # the l2 norm of a zero vector
    batch = tuple(jnp.stack([x, x[::-1]]) for x in (q, k, v, decay, beta))
    states = _states(case, 2)

    def gradients(backend):
        def loss(*args):
            tile = functools.partial(linear_recurrence.gated_delta_tile, backend=backend)
            out, state = jax.vmap(tile)(*args)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(state))

        return jax.jit(jax.grad(loss, argnums=tuple(range(6))))(*batch, states)

    for got, want in zip(gradients("xla"), gradients("reference"), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * max(np.abs(want).max(), 1e-2))


def test_convolution_under_vmap_and_grad():
    rng = np.random.default_rng(7)
    x, tails, weight = normal(rng, 2, 9, 6), normal(rng, 2, 3, 6), normal(rng, 6, 1, 4)
    valid = jnp.asarray([9, 4], jnp.int32)

    def run(backend):
        def loss(x, tails, weight):
            tile = functools.partial(linear_recurrence.short_conv_tile, backend=backend)
            y, tail = jax.vmap(tile, in_axes=(0, 0, None, 0))(x, tails, weight, valid)
            return jnp.sum(y**2) + jnp.sum(tail**2)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, tails, weight)

    for got, want in zip(jax.tree.leaves(run("xla")), jax.tree.leaves(run("reference")), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("batch", [1, 8])
def test_decode_copies_no_states(batch):
    """As a model does: layers unrolled, each with its own rows, a projection between them."""
    case = next(case for case in CASES if case.name == "hyb-10m")
    n_slots, channels = 100, case.conv_channels
    rng = np.random.default_rng(8)
    weight = normal(rng, channels, 1, 4)
    slots = jnp.arange(batch, dtype=jnp.int32)
    log_decay, beta = _delta_inputs(case, batch)[3:]

    def layer(x_bc, states, tails, slots):
        y_bc, tails = linear_recurrence.short_conv_decode(x_bc, tails, weight, slots)
        n_qk = case.key_heads * case.key_dim
        q, k = (y_bc[:, i * n_qk : (i + 1) * n_qk].reshape(batch, case.key_heads, -1) for i in range(2))
        v = y_bc[:, 2 * n_qk :].reshape(batch, case.value_heads, -1)
        out, states = linear_recurrence.gated_delta_decode(q, k, v, log_decay, beta, states, slots)
        return x_bc + jnp.tile(out.reshape(batch, -1), (1, channels // out[0].size)), states, tails

    def step(rows, x_bc, slots):
        new_rows = []
        for states, tails in rows:
            x_bc, states, tails = layer(x_bc, states, tails, slots)
            new_rows.append((states, tails))
        return new_rows, x_bc

    x_bc = normal(rng, batch, channels)
    states, tails = _states(case, n_slots), normal(rng, n_slots, 3, channels)

    def conv(tails, x_bc, slots):
        return linear_recurrence.short_conv_decode(x_bc, tails, weight, slots)

    assert_in_place(lambda rows, x, slots: layer(x, rows, tails, slots)[:2], states, x_bc, slots)
    assert_in_place(conv, tails, x_bc, slots)
    rows = [(states, tails), (states + jnp.float32(1), tails)]
    memory = jax.jit(step, donate_argnums=0).lower(rows, x_bc, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * (states.nbytes + tails.nbytes)
    assert memory.temp_size_in_bytes < tails.nbytes // 2 + 0.1 * states.nbytes
