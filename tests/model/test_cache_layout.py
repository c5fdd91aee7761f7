"""Does every layer's state have its part in a page or a row, and are their bytes those of the arrays?"""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from model.cache_layout import StateWithoutPart, cache_layout
from model.config import load_config
from model.params import Plan
from tests.shared import shared_path


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "model", ["qwen3", "qwen3_5", "qwen3_next", "kimi_linear", "glm5_next", "deepseek_v4"]
)
def test_the_parts_described_are_all_the_bytes(model: str, ranks: int) -> None:
    config = load_config(shared_path(f"tiny_models/{model}"))
    layout = cache_layout(config, Plan.of(config, ranks), jnp.dtype("float32"))
    page_bytes = row_bytes = 0
    for line in layout.describe():
        count, _, rest = line.partition(" x ")
        n_bytes = int(count) * int(rest.rpartition(" bytes")[0].rpartition(" ")[2].replace(",", ""))
        page_bytes += n_bytes if rest.startswith("page: ") else 0
        row_bytes += n_bytes if rest.startswith("row: ") else 0
    assert (page_bytes, row_bytes) == (layout.page_bytes, layout.row_bytes)


def test_a_layer_whose_state_has_no_part_is_refused() -> None:
    config = load_config(shared_path("tiny_models/qwen3_5"))
    layers = (replace(config.layers[0], mixer="sliding_window"), *config.layers[1:])
    with pytest.raises(StateWithoutPart, match=r"layer 0 \(sliding_window\)"):
        cache_layout(replace(config, layers=layers), Plan.of(config, 1), jnp.dtype("float32"))
