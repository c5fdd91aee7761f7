"""Do the float32 references compute what NumPy does in float64, written from the definitions (models.md, section 0)?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, linear_recurrence, paged_attention
from pallas_kernels.linear_recurrence.cases import CASES
from pallas_kernels.linear_recurrence.programs import gates
from tests.pallas_kernels.arrays import assert_close


def _l2norm(x):
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("name", ["odd-tile", "kda-odd-tile", "tiny-glm5_next"])
def test_delta_rule(name):
    """Scalar gate, a gate for each channel, and a bounded one."""
    case = next(case for case in CASES if case.name == name)
    rng = np.random.default_rng(0)
    t, h = 37, case.value_heads
    q, k = (rng.standard_normal((t, case.key_heads, case.key_dim)) for _ in range(2))
    v, beta = rng.standard_normal((t, h, case.value_dim)), rng.random((t, h))
    decay = np.asarray(gates(case, t)(rng), np.float64)
    state = rng.standard_normal((h, case.key_dim, case.value_dim))
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v, decay, beta, state))
    got = jax.jit(lambda *a: linear_recurrence.gated_delta_tile(*a, backend="reference"))(*arrays)
    per_key = h // case.key_heads
    outs = []
    for i in range(t):
        q_hd = np.repeat(_l2norm(q[i]) * case.key_dim**-0.5, per_key, axis=0)
        k_hd = np.repeat(_l2norm(k[i]), per_key, axis=0)
        state = state * np.exp(decay[i]).reshape(h, -1, 1)
        u = beta[i][:, None] * (v[i] - np.einsum("hdv,hd->hv", state, k_hd))
        state = state + k_hd[:, :, None] * u[:, None, :]
        outs.append(np.einsum("hdv,hd->hv", state, q_hd))
    assert_close(got[0], np.stack(outs))
    assert_close(got[1], state)


def test_paged_attention():
    rng = np.random.default_rng(1)
    g, r, d, context = 2, 3, 8, 100
    kv = rng.standard_normal((2, 2, g, 64, d)).astype(np.float32)  # pages, keys and values
    pages = np.full((5, 2 * g * 64 * d), np.float32(np.nan)).view(np.uint32)
    pages[[3, 1]] = kv.reshape(2, -1).view(np.uint32)
    q = rng.standard_normal((1, g, r, d))
    got = paged_attention.decode(
        jnp.asarray(q, jnp.float32),
        jnp.asarray(pages),
        jnp.asarray([[3, 1]], jnp.int32),
        jnp.asarray([context], jnp.int32),
        offset_words=0,
        page_tokens=64,
        scale=0.3,
        backend="reference",
    )
    keys, values = np.moveaxis(kv.astype(np.float64), 0, 2).reshape(2, g, 128, d)[:, :, :context]
    scores = np.einsum("grd,gsd->grs", q[0], keys) * 0.3
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    assert_close(got[0], np.einsum("grs,gsd->grd", weights, values))


def test_experts():
    rng = np.random.default_rng(2)
    x, gate_up, down = (rng.standard_normal(s) for s in ((3, 8), (5, 2, 6, 8), (5, 8, 6)))
    ids, weights = np.asarray([[0, 4], [2, 1], [4, 3]]), rng.random((3, 2))
    want = np.zeros((3, 8))
    for t in range(3):
        for expert, weight in zip(ids[t], weights[t], strict=True):
            gate, up = gate_up[expert] @ x[t]
            want[t] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    arrays = (jnp.asarray(a, jnp.float32) for a in (x, gate_up, down))
    got = grouped_matmul.experts_swiglu(
        *arrays, jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32), backend="reference"
    )
    assert_close(got, want)
