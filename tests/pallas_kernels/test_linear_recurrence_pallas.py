"""Do the Pallas kernels of the recurrences compute what the reference does? In interpret mode, on the `ci` cases.

Interpret mode shows the arithmetic and the indices, not that a chip computes the same: see docs/performance.md.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_recurrence
from pallas_kernels.linear_recurrence import gpu, tpu
from pallas_kernels.linear_recurrence.cases import CASES
from pallas_kernels.linear_recurrence.programs import gates
from tests.pallas_kernels.arrays import FAST_COMPILE, assert_close, assert_same_bits, normal

BACKENDS = {"gpu": gpu, "tpu": tpu}
CI = [
    pytest.param(name, case, id=f"{name}-{case.name}")
    for name in BACKENDS
    for case in CASES
    if {"ci", name} <= case.tags
]
N_SLOTS = 12
FUNCTIONS = dict(
    tile="gated_delta_tile",
    prefill="gated_delta_prefill",
    drafts="gated_delta_drafts",
    decode="gated_delta_decode",
    conv="short_conv_decode",
)


@functools.cache
def _run(backend, function, **kw):
    name = FUNCTIONS[function]
    if backend in BACKENDS:
        kernel = functools.partial(getattr(BACKENDS[backend], name), interpret=True, **kw)
        return jax.jit(kernel, compiler_options=FAST_COMPILE)
    return jax.jit(functools.partial(getattr(linear_recurrence, name), backend=backend, **kw))


def _inputs(case, *leading, seed=0):
    rng = np.random.default_rng(seed)
    q, k = (normal(rng, *leading, case.key_heads, case.key_dim, dtype=case.dtype) for _ in range(2))
    v = normal(rng, *leading, case.value_heads, case.value_dim, dtype=case.dtype)
    decay = jnp.asarray(gates(case, *leading)(rng), jnp.float32)
    return q, k, v, decay, jax.nn.sigmoid(normal(rng, *leading, case.value_heads))


def _rows(case, n=N_SLOTS):
    shape = (n, case.value_heads, case.key_dim, case.value_dim)
    return normal(np.random.default_rng(1), *shape)


def _compare(backend, function, args, **kw):
    got, want = (_run(name, function, **kw)(*args) for name in (backend, "reference"))
    for got_array, want_array in zip(got, want, strict=True):
        assert got_array.dtype == want_array.dtype
        assert_close(got_array, want_array, str(got_array.dtype))
    return got


@pytest.mark.parametrize(("backend", "case"), CI)
def test_decode_advances_its_rows_alone(backend, case):
    """Rows that are not named keep their bits, though they are NaN; drafts leave every state on the way."""
    b, t = case.batch, case.draft_tokens
    slots = np.random.default_rng(2).permutation(N_SLOTS).astype(np.int32)
    states = _rows(case)
    if t == 1:
        used = slots[:b]
        rows = states.at[np.setdiff1d(slots, used)].set(jnp.nan)
        args = (*_inputs(case, b), rows, jnp.asarray(used))
        states = _run(backend, "decode")(*args)[1]
        _compare(backend, "decode", (*args[:-2], jnp.nan_to_num(rows), args[-1]))
    else:
        start, end = slots[:b], slots[b : b * (t + 1)].reshape(b, t)
        end[0, -1] = start[0]  # its own row, for the last state
        used = np.unique(np.r_[start, end.ravel()])
        rows = states.at[np.setdiff1d(slots, used)].set(jnp.nan)
        args = (*_inputs(case, b, t), rows, jnp.asarray(start), jnp.asarray(end))
        states = _run(backend, "drafts")(*args)[1]
        _compare(backend, "drafts", (*args[:-3], jnp.nan_to_num(rows), *args[-2:]))
    others = np.setdiff1d(np.arange(N_SLOTS), used)
    assert np.isfinite(states[used]).all()
    assert_same_bits(states[others], rows[others])


@pytest.mark.parametrize(("backend", "case"), CI)
def test_prefill_emits_the_state_at_every_grid_position(backend, case):
    t = case.tile_tokens
    args = (*_inputs(case, t), _rows(case, 3), jnp.int32(1))
    _, grid_states, rows = _compare(backend, "prefill", args, grid_tokens=math.gcd(case.grid_tokens, t))
    assert_same_bits(rows[np.asarray([0, 2])], args[-2][np.asarray([0, 2])])
    assert_same_bits(grid_states[-1], rows[1])


@pytest.mark.parametrize("backend", ["gpu"])  # a TPU's tiles are XLA's
@pytest.mark.parametrize("name", ["tiny-qwen3_next", "tiny-kimi_linear"])
@pytest.mark.parametrize("key_noise", [0.0, 1e-4])
@pytest.mark.parametrize("log_decay", [0.0, -0.1, -1e3])
def test_tile_at_its_limits(backend, name, key_noise, log_decay):
    """Equal and nearly equal keys with beta 1; no, weak and strong decay, mixed; a partial last chunk."""
    case = next(case for case in CASES if case.name == name)
    t = 70
    q, k, v, decay, beta = _inputs(case, t)
    k = k[:1] + jnp.float32(key_noise) * k
    strong = normal(np.random.default_rng(3), *decay.shape) > 0.8
    decay = jnp.where(strong, jnp.float32(log_decay), jnp.float32(min(log_decay, 0.0) / 1e5))
    args = (q, k, v, decay, jnp.ones_like(beta), _rows(case, 1)[0])
    got, want = (_run(which, "tile")(*args) for which in (backend, "reference"))
    for got_array, want_array in zip(got, want, strict=True):
        assert np.isfinite(got_array).all()
        tolerance = 5e-5 * max(np.abs(want_array).max(), 1e-3)
        np.testing.assert_allclose(got_array, want_array, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("backend", "case"), [p for p in CI if p.values[0] == "gpu"])
def test_convolution_shifts_its_rows_alone(backend, case):
    rng = np.random.default_rng(4)
    channels, b = case.conv_channels, case.batch
    weight = normal(rng, channels, 1, case.taps, dtype=case.dtype)
    tails = normal(rng, N_SLOTS, case.taps - 1, channels, dtype=case.dtype)
    slots = jnp.asarray(rng.permutation(N_SLOTS)[:b], jnp.int32)
    args = (normal(rng, b, channels, dtype=case.dtype), tails, weight, slots)
    got, want = (_run(name, "conv")(*args) for name in (backend, "reference"))
    assert_close(got[0], want[0], case.dtype)
    assert_same_bits(got[1], want[1])
