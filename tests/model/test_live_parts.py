"""Is every part of a row needed? Whoever loses one, at a checkpoint or between two steps, is found out by its bits.

With all parts the bits are those of a run that lost nothing, without any one
of them they are not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.rows import restore_row
from model.state import DeviceState
from runtime.swap import gather_row, scatter_row
from tests.model.driver import Driver, decode_batch, pages_of, spare_pages, tiles_of
from tests.shared import shared_path

T, N_TILES = 64, 4
MODELS = ("qwen3_5", "kimi_linear", "glm5_next", "deepseek_v4")
QUICK = ("deepseek_v4",)
_restore = jax.jit(restore_row, static_argnums=3, donate_argnums=0)


@pytest.fixture(
    scope="module",
    params=[pytest.param(m, marks=[] if m in QUICK else [pytest.mark.slow]) for m in MODELS],
)
def case(request):
    folder = shared_path(f"tiny_models/{request.param}")
    return Driver.load(folder), np.load(folder / "reference.npz")["prompt_4"]


def parts_of(driver: Driver, *, saved_only: bool = False) -> list[tuple[int, str] | str]:
    """(layer, name) of one part of each kind; layers of one kind keep the same. MTP layers have kinds of their own."""
    config, kinds = driver.static.config, {}
    for number, layer in enumerate(driver.static.layout.layers):
        mixer = config.layers[number].mixer if number < len(config.layers) else "mtp"
        for part in layer.row:
            if part.saved or not saved_only:
                kinds[mixer, part.name] = (number, part.name)
    hidden = ["hidden"] if driver.static.layout.hidden is not None else []
    return [*kinds.values(), *hidden]


def losing(state: DeviceState, slot: int, lost: tuple[int, str] | str | None) -> DeviceState:
    """The state whose slot has lost one part of its row."""
    if lost == "hidden":
        return state.replace(hidden_sh=state.hidden_sh.at[slot].set(0))
    if lost is not None:
        rows = list(state.rows)
        rows[lost[0]] = {**rows[lost[0]], lost[1]: rows[lost[0]][lost[1]].at[slot].set(0)}
        state = state.replace(rows=tuple(rows))
    return state


def resumed(driver: Driver, prompt, lost=None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Pages and logits after token 64: of a cold prefill, and of one that resumes from the checkpoint there."""
    row_pages = driver.static.layout.row_pages
    tiles = tiles_of({0: prompt}, T, N_TILES, row_pages=row_pages)
    tiles.saves_n[0], tiles.row_page_ids_nq[0] = True, spare_pages(row_pages)
    state, cold_logits = driver.run_prompt_logits(driver.state(), tiles)
    cold = np.asarray(state.pages_rnw)[:, pages_of(0)[1:N_TILES]]
    state = losing(_restore(state, np.int32(2), spare_pages(row_pages), driver.static), 2, lost)
    rest = tiles_of({2: prompt}, T, N_TILES, start_tokens=T, row_pages=row_pages)
    rest.page_table_np[:, :1] = pages_of(0)[:1]
    state, warm_logits = driver.run_prompt_logits(state, rest)
    warm = np.asarray(state.pages_rnw)[:, pages_of(2)[1:N_TILES]]
    n_left = len(prompt) - T
    return [cold, cold_logits[1, :n_left]], [warm, warm_logits[0, :n_left]]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_checkpoint_without_any_one_of_its_parts_is_found_out(case):
    driver, prompt = case
    prompt = prompt[: T + 7]
    assert same(*resumed(driver, prompt))
    for lost in parts_of(driver, saved_only=True):
        assert not same(*resumed(driver, prompt, lost)), f"{lost} is not needed"


def decoded(driver: Driver, state: DeviceState, slot: int, start: int, n_tokens: int) -> list[np.ndarray]:
    """The pages and the last logits after decoding `n_tokens` of a sequence whose table is slot 0's."""
    for position in range(start, start + n_tokens):
        batch = decode_batch({slot: position}, 4)
        batch.page_table_bp[0] = pages_of(0)
        state, output = driver.run_decode(state, batch)
    return [np.asarray(output.logits_bv[0]), np.asarray(state.pages_rnw)[:, pages_of(0)]]


def test_a_row_that_loses_any_one_of_its_active_parts_between_steps_is_found_out(case):
    """From an off-grid end, as after a prompt, a preemption or a rollback: open pools and windows count too."""
    driver, prompt = case
    n_tokens, n_more = T + 7, 20

    def after_prompt() -> DeviceState:
        tiles = tiles_of({0: prompt[:n_tokens]}, T, N_TILES, row_pages=driver.static.layout.row_pages)
        return driver.run_prompt_logits(driver.state(), tiles)[0]

    whole = decoded(driver, after_prompt(), 0, n_tokens, n_more)
    state = after_prompt()
    row = jax.jit(gather_row)(state, jnp.int32(0))
    state = jax.jit(scatter_row)(state, jnp.int32(3), tuple(np.asarray(leaf) for leaf in row))
    assert same(whole, decoded(driver, state, 3, n_tokens, n_more))  # as a swap image moves it
    for lost in parts_of(driver):
        lossy = decoded(driver, losing(after_prompt(), 0, lost), 0, n_tokens, n_more)
        assert not same(whole, lossy), f"{lost} is not needed"
