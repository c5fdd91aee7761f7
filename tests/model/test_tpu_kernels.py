"""Does a whole model compute with a TPU's kernels, over its arena of three axes, what it does with XLA's?

On a CPU, the kernels interpreted: arithmetic, indices and copies, not a chip (docs/performance.md).
"""

import contextlib

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from model.rows import gather_pages, restore_row, save_row, scatter_pages
from tests.model.driver import N_PAGES, Driver, decode_batch, pages_of, tiles_of
from tests.shared import shared_path

TILE_TOKENS, N_TILES = 64, 2
_restore = jax.jit(restore_row, static_argnums=3, donate_argnums=0)
_save = jax.jit(save_row, static_argnums=3, donate_argnums=0)
_gather = jax.jit(gather_pages, static_argnums=2)
_scatter = jax.jit(scatter_pages, static_argnums=3, donate_argnums=0)


def _run(folder, prompt, backend):
    """(logits of the prompt, of the next token): with its row saved, brought back into another slot, and its pages
    moved away and back between the two."""
    driver = Driver.load(folder, 1, backend)
    static, state = driver.static, driver.state()
    row_pages = static.layout.row_pages
    state, logits = driver.run_prompt_logits(
        state, tiles_of({0: prompt}, TILE_TOKENS, N_TILES, row_pages=row_pages)
    )
    spare = np.arange(N_PAGES - 1, N_PAGES - 1 - row_pages, -1, dtype=np.int32)
    if row_pages:
        state = _restore(_save(state, np.int32(0), spare, static), np.int32(1), spare, static)
    ids = np.r_[pages_of(0)[:2], np.zeros(1, np.int32)]
    words = _gather(state.pages_rnw, ids, static)
    state = state.replace(pages_rnw=_scatter(state.pages_rnw, ids, words, static))
    batch = decode_batch({1: len(prompt)}, 2)
    batch.page_table_bp[0] = pages_of(0)
    state = state.replace(last_token_s=state.last_token_s.at[1].set(int(prompt[0])))
    state, output = driver.run_decode(state, batch)
    return state, logits, np.asarray(output.logits_bv[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["qwen3", "qwen3_5"])  # interpreting the experts takes many minutes more
def test_logits_are_those_of_xla(model):
    folder = shared_path(f"tiny_models/{model}")
    prompt = np.load(folder / "reference.npz")["prompt_4"][:100]
    runs = {}
    for backend in ("xla", "tpu"):
        with pltpu.force_tpu_interpret_mode() if backend == "tpu" else contextlib.nullcontext():
            runs[backend] = _run(folder, prompt, backend)
    assert runs["xla"][0].pages_rnw.ndim == 3
    assert runs["tpu"][0].pages_rnw.shape[-1] == 128
    for want, got in zip(runs["xla"][1:], runs["tpu"][1:], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
