"""Do the Pallas kernels of experts and row copies agree with their references? In interpret mode, on the `ci` cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, row_copy
from pallas_kernels.grouped_matmul import gpu as experts_gpu
from pallas_kernels.grouped_matmul import programs as experts_programs
from pallas_kernels.grouped_matmul import tpu as experts_tpu
from pallas_kernels.row_copy import gpu as copy_gpu
from pallas_kernels.row_copy import tpu as copy_tpu
from pallas_kernels.row_copy.cases import CASES as COPIES
from tests.pallas_kernels.arrays import assert_close, assert_same_bits, interpreted

EXPERTS = [p for p in experts_programs.programs() if {"ci", "gpu"} <= p.tags]
CHIPS = {"gpu": experts_gpu, "tpu": experts_tpu}
COPIERS = {"gpu": copy_gpu, "tpu": copy_tpu}


@pytest.mark.parametrize("backend", CHIPS)
@pytest.mark.parametrize("program", EXPERTS, ids=lambda p: f"{p.case}-{p.name}")
def test_experts_agree_with_the_reference(program, backend):
    x, *rest = program.arrays()
    got = jax.jit(functools.partial(CHIPS[backend].experts_swiglu, interpret=True))(x, *rest)
    want = jax.jit(functools.partial(grouped_matmul.experts_swiglu, backend="reference"))(x, *rest)
    assert got.dtype == x.dtype
    assert_close(got, want, str(x.dtype))


@pytest.mark.parametrize("backend", CHIPS)
def test_one_expert_takes_all_tokens(backend):
    """More blocks of one expert than there are experts, and none of the others."""
    x, gate_up, down, ids, weights = EXPERTS[-1].arrays()
    ids = jnp.zeros_like(ids).at[:, 1:].set(jnp.arange(1, ids.shape[1], dtype=jnp.int32))
    run = jax.jit(functools.partial(CHIPS[backend].experts_swiglu, interpret=True))
    got = run(x, gate_up, down, ids, weights)
    want = grouped_matmul.experts_swiglu(x, gate_up, down, ids, weights, backend="reference")
    assert_close(got, want)


@pytest.mark.parametrize("backend", COPIERS)
@pytest.mark.parametrize("case", [c for c in COPIES if "ci" in c.tags], ids=lambda case: case.name)
def test_pages_keep_every_bit(case, backend):
    """All words are arbitrary: signalling NaNs and denormals among them."""
    rng = np.random.default_rng(0)
    dtype = np.uint16 if case.dtype == "bfloat16" else np.uint32
    pages = jnp.asarray(rng.integers(0, np.iinfo(dtype).max, (case.arena_pages, case.page_words), dtype))
    words = jnp.asarray(rng.integers(0, np.iinfo(dtype).max, (case.moved_pages, case.page_words), dtype))
    ids = rng.permutation(case.arena_pages)[: case.moved_pages].astype(np.int32)
    if backend == "tpu" and case.page_words % 1024 == 0:
        pages, words = (x.reshape(len(x), -1, 128) for x in (pages, words))
    kw = dict(interpret=interpreted(backend))
    gathered = jax.jit(functools.partial(COPIERS[backend].gather_pages, **kw))(pages, ids)
    assert_same_bits(gathered, pages[ids])
    scattered = jax.jit(functools.partial(COPIERS[backend].scatter_pages, **kw))(pages, ids, words)
    want = np.asarray(pages).copy()
    want[ids] = words
    assert_same_bits(scattered, want)
    for other in ("reference", "xla"):
        assert_same_bits(row_copy.gather_pages(pages, jnp.asarray(ids), backend=other), gathered)
        assert_same_bits(row_copy.scatter_pages(pages, jnp.asarray(ids), words, backend=other), scattered)


@pytest.mark.parametrize("state_shape", [(3, 8, 128), (600, 128), (5, 77)], ids=str)
def test_a_tpu_packs_a_row_as_the_definition_says(state_shape):
    """Less and more than a program's lines, and parts that are no whole lines; all bit patterns."""
    rng = np.random.default_rng(1)
    state = jnp.asarray(rng.integers(0, 2**32, state_shape, np.uint32)).view(jnp.float32)
    tail = jnp.asarray(rng.integers(0, 2**16, (3, 256), np.uint16)).view(jnp.bfloat16)
    shape = (-(-(2 * state.size + tail.size) // 2048) + 1, 2048)
    want = row_copy.pack((state, tail), *shape, jnp.uint16, backend="reference")
    got = copy_tpu.pack((state, tail), *shape, jnp.uint16, interpret=True)
    assert_same_bits(got, want)
    back = copy_tpu.unpack(got, (state, tail), interpret=True)
    for part, was in zip(back, (state, tail), strict=True):
        assert_same_bits(part, was)
