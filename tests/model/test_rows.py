"""Does a row that went into pages and came back continue as if it had never left? To the bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.forward import prefill
from model.rows import restore_row, save_row
from model.state import abstract_state
from tests.model.driver import Driver, pages_of, spare_pages, tiles_of
from tests.shared import shared_path

TILE_TOKENS, N_TILES = 64, 4
CASES = [
    pytest.param(("qwen3_5", 1), id="qwen3_5-tp1"),
    pytest.param(("qwen3_next", 4), id="qwen3_next-tp4"),
    pytest.param(("qwen3_5_moe", 2), id="qwen3_5_moe-tp2", marks=pytest.mark.slow),
    pytest.param(("kimi_linear", 2), id="kimi_linear-tp2", marks=pytest.mark.slow),
    pytest.param(("glm5_next", 1), id="glm5_next-tp1"),
    pytest.param(("deepseek_v4", 2), id="deepseek_v4-tp2", marks=pytest.mark.slow),
]
_restore = jax.jit(restore_row, static_argnums=3, donate_argnums=0)
_save = jax.jit(save_row, static_argnums=3, donate_argnums=0)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    model, ranks = request.param
    folder = shared_path(f"tiny_models/{model}")
    return Driver.load(folder, ranks), np.load(folder / "reference.npz")["prompt_4"]


@pytest.mark.parametrize("checkpoint_tokens", [64, 128, 192])
def test_a_restored_checkpoint_gives_the_bits_of_a_cold_prefill(case, checkpoint_tokens):
    driver, prompt = case
    row_pages = driver.static.layout.row_pages
    tiles = tiles_of({0: prompt}, TILE_TOKENS, N_TILES, row_pages=row_pages)
    saved = checkpoint_tokens // TILE_TOKENS - 1
    tiles.saves_n[saved], tiles.row_page_ids_nq[saved] = True, spare_pages(row_pages)
    state, cold = driver.run_prompt_logits(driver.state(), tiles)

    # Another sequence, in another slot that still holds the row of a third, shares the pages before the
    # checkpoint and computes what is left into pages of its own.
    other = tiles_of({2: prompt[::-1].copy()}, TILE_TOKENS, N_TILES, row_pages=row_pages)
    state, _ = driver.run_prompt_logits(state, other)
    state = _restore(state, np.int32(2), spare_pages(row_pages), driver.static)
    rest = tiles_of({2: prompt}, TILE_TOKENS, N_TILES, start_tokens=checkpoint_tokens, row_pages=row_pages)
    shared = checkpoint_tokens // TILE_TOKENS
    rest.page_table_np[:, :shared] = pages_of(0)[:shared]
    state, warm = driver.run_prompt_logits(state, rest)

    left = -(-(len(prompt) - checkpoint_tokens) // TILE_TOKENS)
    last = (len(prompt) - 1) % TILE_TOKENS
    np.testing.assert_array_equal(warm[: left - 1], cold[saved + 1 : saved + left])
    np.testing.assert_array_equal(warm[left - 1, : last + 1], cold[saved + left, : last + 1])


def test_saving_changes_no_logit_and_restoring_returns_every_bit_pattern(case):
    driver, prompt = case
    row_pages = driver.static.layout.row_pages
    plain = tiles_of({0: prompt}, TILE_TOKENS, N_TILES, row_pages=row_pages)
    _, without = driver.run_prompt_logits(driver.state(), plain)
    # Bit patterns that no arithmetic would keep: signalling NaNs, denormals, negative zero.
    patterns = np.array([0x7F800001, 0xFFC12345, 0x00000001, 0x80000000, 0x7F7FFFFF], np.uint32)
    state = driver.state()
    layout = driver.static.layout
    words = np.resize(patterns, (layout.ranks, row_pages, layout.page_words)).astype(layout.word_dtype)
    pages = np.array(state.pages_rnw)
    pages[:, spare_pages(row_pages)] = words
    state = state.replace(pages_rnw=jax.device_put(pages, state.pages_rnw.sharding))
    state = _restore(state, np.int32(1), spare_pages(row_pages), driver.static)
    # A tile of no valid tokens of slot 1 computes nothing on the row; its save writes the row elsewhere.
    target = spare_pages(2 * row_pages)[row_pages:]
    tiles = tiles_of({0: prompt}, TILE_TOKENS, N_TILES, row_pages=row_pages)
    tiles.saves_n[0], tiles.row_page_ids_nq[0] = True, target
    state, with_saves = driver.run_prompt_logits(state, tiles)
    np.testing.assert_array_equal(without, with_saves)
    state = _save(state, np.int32(1), target, driver.static)  # on its own, between two steps
    pages = np.asarray(state.pages_rnw)
    row_words = layout.row_bytes // pages.itemsize
    saved = [
        pages[:, ids].reshape(layout.ranks, -1)[:, :row_words] for ids in (spare_pages(row_pages), target)
    ]
    np.testing.assert_array_equal(*saved)
    named = [
        (part, row[part.name])
        for layer, row in zip(layout.layers, state.rows, strict=True)
        for part in layer.row
    ]
    if layout.hidden is not None:
        named.append((layout.hidden, state.hidden_sh))
    for part, leaf in named:
        bits = np.asarray(leaf)[1].view(np.uint32)
        assert set(np.unique(bits)) <= (set(patterns.tolist()) if part.saved else {0})


@pytest.mark.parametrize("name", ["restore", "save", "prefill"])
def test_saving_and_restoring_happen_in_place(case, name):
    """No copy of the arena or of the rows: the temporaries stay far below either."""
    driver, _ = case
    static, n_pages, n_slots = driver.static, 4096, 2048
    state = abstract_state(static, n_pages, n_slots)
    arena_bytes = n_pages * static.layout.page_bytes
    rows_bytes = n_slots * static.layout.row_bytes
    ids = jax.ShapeDtypeStruct((static.layout.row_pages,), jnp.int32)
    if name != "prefill":
        program = {"restore": _restore, "save": _save}[name]
        lowered = program.lower(state, jax.ShapeDtypeStruct((), jnp.int32), ids, static)
    else:
        params = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), driver.params
        )
        tiles = tiles_of({}, TILE_TOKENS, N_TILES, row_pages=static.layout.row_pages)
        lowered = jax.jit(prefill, static_argnums=3, donate_argnums=1).lower(params, state, tiles, static)
    analysis = lowered.compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= arena_bytes + rows_bytes
    assert analysis.temp_size_in_bytes < min(arena_bytes, rows_bytes) / 4
