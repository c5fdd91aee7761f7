"""Do the entry points refuse what they cannot do, in words that name it?"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, linear_recurrence, paged_attention
from pallas_kernels._backends import choose
from pallas_kernels.aot import KERNELS

RNG = np.random.default_rng(0)


def _experts(**kwargs):
    x, gate_up, down = jnp.ones((2, 4)), jnp.ones((3, 2, 5, 4)), jnp.ones((3, 4, 5))
    return grouped_matmul.experts_swiglu(
        x, gate_up, down, jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)), **kwargs
    )


@pytest.mark.parametrize(("platform", "number"), [("cpu", 2), ("gpu", 2), ("tpu", 3)])
def test_auto_is_a_table_by_platform_and_names_are_exact(monkeypatch, platform, number):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    built = {"reference": 1, "xla": 2, "tpu": 3}
    assert choose("k", "auto", built) == number
    assert choose("k", "reference", built) == 1


def test_auto_on_an_unknown_platform_asks_for_a_name(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "abacus")
    with pytest.raises(ValueError, match="no backend is assigned to platform 'abacus'; name one of"):
        choose("k", "auto", {"xla": 1})


def test_backend_that_is_not_built_says_which_are():
    with pytest.raises(ValueError, match="'tpu' is not built; available: reference, xla"):
        choose("k", "tpu", {"xla": 1, "reference": 2})


def test_every_kernel_has_every_backend():
    for kernel in KERNELS:
        built = importlib.import_module(f"pallas_kernels.{kernel}")._BUILT
        assert set(built) == {"reference", "xla", "gpu", "tpu"}
        for name in built:
            choose(kernel, name, built)


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_a_chip_s_kernels_fail_loudly_where_there_is_no_chip(backend):
    if jax.default_backend() != "cpu":
        pytest.skip("asks for a chip that is not there")
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        _experts(backend=backend)


def test_unknown_backend_lists_the_names():
    with pytest.raises(
        ValueError, match="unknown backend 'cuda'; the names are auto, reference, xla, gpu, tpu"
    ):
        _experts(backend="cuda")


def test_arguments_that_disagree_are_named():
    pages = jnp.zeros((4, 2 * 2 * 64 * 8), jnp.uint32)
    kw = dict(offset_words=0, page_tokens=64)
    k = jnp.ones((64, 2, 8))
    ids = jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match="does not lie in a page"):
        paged_attention.write_tile(pages, k, k, ids, offset_words=8, page_tokens=64)
    with pytest.raises(ValueError, match="k_tgd must be float32, got bfloat16"):
        paged_attention.write_tile(pages, k.astype(jnp.bfloat16), k, ids, **kw)
    with pytest.raises(ValueError, match="axis d of v_tgd is 4, expected 8"):
        paged_attention.write_tile(pages, k, k[:, :, :4], ids, **kw)
    with pytest.raises(ValueError, match="64 tokens do not fill 2 pages"):
        paged_attention.write_tile(pages, k, k, jnp.zeros((2,), jnp.int32), **kw)
    with pytest.raises(ValueError, match="pages_nw must be uint32 or uint16"):
        paged_attention.write_tile(pages.astype(jnp.int32), k, k, ids, **kw)
    with pytest.raises(ValueError, match="not a multiple of page_tokens"):
        paged_attention.prefill(k[:50, :, None], pages, ids, jnp.int32(0), scale=1.0, **kw)
    with pytest.raises(ValueError, match="start_tokens must be int32"):
        paged_attention.prefill(k[:, :, None], pages, ids, jnp.float32(0), scale=1.0, **kw)
    with pytest.raises(ValueError, match="3 value heads are not a multiple of 2 key heads"):
        qk, v, gate = jnp.ones((5, 2, 4)), jnp.ones((5, 3, 4)), jnp.ones((5, 3))
        linear_recurrence.gated_delta_tile(qk, qk, v, gate, gate, jnp.ones((3, 4, 4)))
    with pytest.raises(ValueError, match="4 taps need a tail of 3 inputs, got 2"):
        linear_recurrence.short_conv_tile(
            jnp.ones((5, 6)), jnp.ones((2, 6)), jnp.ones((6, 1, 4)), jnp.int32(5)
        )
