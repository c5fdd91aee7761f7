"""Do the GPU kernels of experts and row copies agree with their references? In interpret mode, on the `ci` cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, row_copy
from pallas_kernels.grouped_matmul import gpu as experts_gpu
from pallas_kernels.grouped_matmul import programs as experts_programs
from pallas_kernels.row_copy import gpu as copy_gpu
from pallas_kernels.row_copy.cases import CASES as COPIES
from tests.pallas_kernels.arrays import assert_close, assert_same_bits

EXPERTS = [p for p in experts_programs.programs() if {"ci", "gpu"} <= p.tags]


@pytest.mark.parametrize("program", EXPERTS, ids=lambda p: f"{p.case}-{p.name}")
def test_experts_agree_with_the_reference(program):
    x, *rest = program.arrays()
    got = jax.jit(functools.partial(experts_gpu.experts_swiglu, interpret=True))(x, *rest)
    want = jax.jit(functools.partial(grouped_matmul.experts_swiglu, backend="reference"))(x, *rest)
    assert got.dtype == x.dtype
    assert_close(got, want, str(x.dtype))


def test_one_expert_takes_all_tokens():
    """More blocks of one expert than there are experts, and none of the others."""
    x, gate_up, down, ids, weights = EXPERTS[-1].arrays()
    ids = jnp.zeros_like(ids).at[:, 1:].set(jnp.arange(1, ids.shape[1], dtype=jnp.int32))
    got = jax.jit(functools.partial(experts_gpu.experts_swiglu, interpret=True))(
        x, gate_up, down, ids, weights
    )
    want = grouped_matmul.experts_swiglu(x, gate_up, down, ids, weights, backend="reference")
    assert_close(got, want)


@pytest.mark.parametrize("case", [c for c in COPIES if "ci" in c.tags], ids=lambda case: case.name)
def test_pages_keep_every_bit(case):
    """All words are arbitrary: signalling NaNs and denormals among them."""
    rng = np.random.default_rng(0)
    dtype = np.uint16 if case.dtype == "bfloat16" else np.uint32
    pages = jnp.asarray(rng.integers(0, np.iinfo(dtype).max, (case.arena_pages, case.page_words), dtype))
    words = jnp.asarray(rng.integers(0, np.iinfo(dtype).max, (case.moved_pages, case.page_words), dtype))
    ids = rng.permutation(case.arena_pages)[: case.moved_pages].astype(np.int32)
    gathered = jax.jit(functools.partial(copy_gpu.gather_pages, interpret=True))(pages, ids)
    assert_same_bits(gathered, pages[ids])
    scattered = jax.jit(functools.partial(copy_gpu.scatter_pages, interpret=True))(pages, ids, words)
    want = np.asarray(pages).copy()
    want[ids] = words
    assert_same_bits(scattered, want)
    for backend in ("reference", "xla"):
        assert_same_bits(row_copy.gather_pages(pages, jnp.asarray(ids), backend=backend), gathered)
        assert_same_bits(row_copy.scatter_pages(pages, jnp.asarray(ids), words, backend=backend), scattered)
