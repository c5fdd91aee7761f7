"""Do the experts compute what the reference does, for each token alone and among others?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import experts_swiglu
from pallas_kernels.grouped_matmul.cases import CASES
from tests.pallas_kernels.arrays import assert_close, assert_same_bits, normal

SMALL = [case for case in CASES if not case.large]


def _run(backend):
    return jax.jit(functools.partial(experts_swiglu, backend=backend))


def _weights(case, rng):
    gate_up = normal(rng, case.experts, 2, case.width, case.hidden, dtype=case.dtype)
    return gate_up, normal(rng, case.experts, case.hidden, case.width, dtype=case.dtype)


def _tokens(case, n_tokens, rng):
    ids = np.stack([rng.permutation(case.experts)[: case.choices] for _ in range(n_tokens)])
    shares = jax.nn.softmax(normal(rng, n_tokens, case.choices))
    return normal(rng, n_tokens, case.hidden, dtype=case.dtype), jnp.asarray(ids, jnp.int32), shares


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_agrees_with_the_reference(case):
    rng = np.random.default_rng(1)
    gate_up, down = _weights(case, rng)
    for n_tokens in case.tokens:
        args = _tokens(case, n_tokens, rng)
        got, want = (_run(backend)(args[0], gate_up, down, *args[1:]) for backend in ("xla", "reference"))
        assert got.dtype == args[0].dtype
        assert_close(got, want, case.dtype)


@pytest.mark.parametrize(
    "case", [case for case in SMALL if "bf16" not in case.name], ids=lambda case: case.name
)
def test_bits_of_a_token_are_its_own(case):
    """Other tokens, their experts and the token's place change nothing, even when all crowd onto one expert."""
    rng = np.random.default_rng(2)
    gate_up, down = _weights(case, rng)
    n_tokens = case.tokens[-1]
    x, ids, shares = _tokens(case, n_tokens, rng)
    run = _run("xla")
    want = run(x, gate_up, down, ids, shares)
    order = rng.permutation(n_tokens)
    assert_same_bits(run(x[order], gate_up, down, ids[order], shares[order])[np.argsort(order)], want)
    other_x, other_ids, _ = _tokens(case, n_tokens, rng)
    crowd = jnp.broadcast_to(ids[0], ids.shape)
    for others in (other_ids, crowd):
        got = run(other_x.at[0].set(x[0]), gate_up, down, others.at[0].set(ids[0]), shares)
        assert_same_bits(got[0], want[0])


def test_small_models_are_differentiable():
    case = SMALL[0]
    rng = np.random.default_rng(3)
    gate_up, down = (weight * 0.1 for weight in _weights(case, rng))
    x, ids, shares = _tokens(case, 4, rng)

    def gradients(backend):
        def loss(x, gate_up, shares):
            return jnp.sum(experts_swiglu(x, gate_up, down, ids, shares, backend=backend) ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, gate_up, shares)

    for got, want in zip(gradients("xla"), gradients("reference"), strict=True):
        assert_close(got, want)
