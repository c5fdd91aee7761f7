"""Do quantised checkpoints mean what their formats say? Every code and scale, against decoders made of bits."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import ConfigError, load_config, parse_config
from model.loading import load_params
from model.quantised import Part, find_quantised
from model.tensor_files import CheckpointError
from tests.model.driver import Driver, mesh_of, tiles_of
from tests.model.quantised_writer import E2M1, E4M3, E8M0, FORMATS, write_file, write_quantised
from tests.shared import shared_path

MIXES = [*([name] for name in FORMATS), ["nvfp4_compressed_tensors", "mxfp8", "fp8_blocks"]]


def expanded(parts: dict[str, tuple[str, np.ndarray]]) -> np.ndarray:
    """What one weight's stored parts become."""
    found, used = find_quantised(
        {f"x.{suffix}": Part(f"x.{suffix}", array.shape, dtype) for suffix, (dtype, array) in parts.items()}
    )
    assert used == {f"x.{suffix}" for suffix in parts}
    weight = found["x.weight"]
    arrays = {f"x.{suffix}": array for suffix, (_, array) in parts.items()}
    one = weight.global_scale
    scale = arrays[weight.scale.name]
    if weight.scale.dtype == "F8_E4M3":  # as a file is read
        scale = E4M3.astype(np.float32)[scale]
    with np.errstate(over="ignore"):  # the largest codes under the largest scales are more than float32 holds
        return weight.expand(arrays[weight.codes.name], scale, None if one is None else arrays[one.name])


def test_every_fp8_code_under_every_scale():
    codes = np.tile(np.arange(256, dtype=np.uint8), (255, 1))[:, np.isfinite(E4M3)][:, :252]
    codes = np.concatenate([codes, codes[:, :4]], axis=1)
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 8, axis=1)
    values = expanded({"weight": ("F8_E4M3", codes), "weight_scale": ("U8", scales)})
    with np.errstate(over="ignore"):
        want = (E4M3[codes] * E8M0[np.repeat(scales, 32, 1)]).astype(np.float32)
    np.testing.assert_array_equal(values, want)


@pytest.mark.parametrize("scale_dtype", ["U8", "F8_E8M0"])
def test_every_fp4_code_under_every_power_of_two(scale_dtype):
    packed = np.tile(np.arange(256, dtype=np.uint8), (255, 1))  # every pair of codes
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)
    values = expanded({"weight_packed": ("U8", packed), "weight_scale": (scale_dtype, scales)})
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(255, 512)
    with np.errstate(over="ignore"):
        want = (E2M1[codes] * E8M0[np.repeat(scales, 32, 1)]).astype(np.float32)
    np.testing.assert_array_equal(values, want)


@pytest.mark.parametrize(("suffix", "one"), [("weight_scale_2", 0.37), ("weight_global_scale", 41.0)])
def test_every_nvfp4_code_under_every_scale(suffix, one):
    finite = np.flatnonzero(np.isfinite(E4M3)).astype(np.uint8)
    packed = np.tile(np.arange(256, dtype=np.uint8), (len(finite), 1))
    scales = np.repeat(finite[:, None], 32, axis=1)
    parts = {
        "weight" if suffix == "weight_scale_2" else "weight_packed": ("U8", packed),
        "weight_scale": ("F8_E4M3", scales),
        suffix: ("F32", np.array([one], np.float32)),
    }
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(finite), 512)
    factor = float(np.float32(one)) if suffix == "weight_scale_2" else 1 / float(np.float32(one))
    want = E2M1[codes] * (E4M3[np.repeat(scales, 16, 1)] * factor)
    np.testing.assert_allclose(expanded(parts), want, rtol=3e-7, atol=0)


@pytest.mark.parametrize("shape", [(128, 128), (130, 300), (1, 256), (256, 96), (7, 32)])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_any_shape_expand_to_what_their_parts_stand_for(name, shape):
    weight = np.random.default_rng(0).standard_normal((shape[0], -(-shape[1] // 32) * 32))
    parts, values = FORMATS[name](weight)
    np.testing.assert_allclose(expanded(parts), values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "formats"),
    [
        pytest.param(
            *(model, formats),
            id=f"{model}-{'+'.join(formats)}",
            marks=[] if model == "qwen3_5_moe" or len(formats) > 1 else [pytest.mark.slow],
        )
        for model in ("qwen3_5_moe", "glm5_next")
        for formats in MIXES
    ],
)
def test_a_quantised_checkpoint_loads_as_what_it_stands_for(model, formats, tmp_path):
    plain_dir = write_quantised(shared_path(f"tiny_models/{model}"), tmp_path / "q", formats)
    mesh, dtype = mesh_of(1), jnp.dtype(jnp.float32)
    quantised, plain = (
        load_params(folder, load_config(folder), mesh, dtype) for folder in (tmp_path / "q", plain_dir)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), quantised, plain)


@pytest.mark.slow
def test_its_logits_are_those_of_the_expanded_weights(tmp_path):
    source = shared_path("tiny_models/glm5_next")
    plain_dir = write_quantised(source, tmp_path / "q", MIXES[-1])
    prompt = np.load(source / "reference.npz")["prompt_3"]
    logits = []
    for folder in (tmp_path / "q", plain_dir):
        driver = Driver.load(folder)
        logits.append(driver.run_prompt_logits(driver.state(), tiles_of({0: prompt}, 64, 8))[1])
    np.testing.assert_allclose(*logits, atol=1e-3, rtol=0)


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="'gptq'"):
        parse_config({"model_type": "qwen3", "quantization_config": {"quant_method": "gptq"}})
    parts = {
        "a.weight": Part("a.weight", (8, 64), "F8_E5M2"),
        "a.weight_scale": Part("a.weight_scale", (8, 2), "U8"),
    }
    with pytest.raises(ConfigError, match="a: a weight of F8_E5M2"):
        find_quantised(parts)
    folder = tmp_path / "q"
    write_quantised(shared_path("tiny_models/qwen3_5_moe"), folder, ["fp8_blocks"])
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "fp8"}
    name = "model.norm.weight"
    write_file(folder / "z.safetensors", {name: ("F8_E4M3", np.zeros(96, np.uint8))})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has dtype F8_E4M3"):
        load_params(folder, load_config(folder), mesh_of(1), jnp.dtype(jnp.float32))
