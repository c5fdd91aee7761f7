"""What does a GGUF file of the llama family look like as a Hugging Face folder, with its tokenizer?

Plain functions; the caller's thread. Needs the `gguf` package (the extra `fetch`). Every tensor
is dequantised: the values are the quantised model's, not those of the original release.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

DTYPES: dict[str, np.dtype] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# GGUF token types (gguf.TokenType): the tokens that are no text.
_CONTROL, _USER_DEFINED = 3, 4


class GgufImportError(ValueError):
    """The GGUF file holds something that this importer does not know how to carry over."""


def import_gguf(
    gguf_file: Path,
    out_dir: Path,
    *,
    dtype: str = "bfloat16",
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> None:
    """Writes config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json
    and chat_template.jinja into `out_dir`, which is made where absent.

    `dtype` is "float32" or "bfloat16"; `progress` wraps the list of tensors, as tqdm does. Raises
    GgufImportError where the architecture, a tensor name or the pre-tokenizer is not known.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = hf_config(fields, dtype=dtype, tied="output.weight" not in {t.name for t in reader.tensors})
    tokenizer = build_tokenizer(fields)
    out_dir.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for tensor in progress(reader.tensors):
        tensors[hf_tensor_name(tensor.name)] = _hf_values(tensor, config).astype(DTYPES[dtype])
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    (out_dir / "model.safetensors").chmod(0o644)  # save_file's temporary file is readable by its owner alone
    tokenizer.save(str(out_dir / "tokenizer.json"), pretty=False)
    template = str(fields["tokenizer.chat_template"])
    (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(out_dir / "config.json", config)
    _write_json(
        out_dir / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config(fields, config))


def hf_tensor_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; GgufImportError where unknown."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[3] != "weight" or parts[2] not in _LAYER_NAMES:
        raise GgufImportError(f"tensor {name!r} has no known place in a llama checkpoint")
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"


def split_rotary_pairs(weight_oi: np.ndarray, n_heads: int) -> np.ndarray:
    """[out, in] rows of a q or k projection from GGUF's order, where a rotary pair's two rows are neighbours,
    to the checkpoints', where the first rows of all pairs come before the second ones. Per head."""
    rows, columns = weight_oi.shape
    pairs = weight_oi.reshape(n_heads, rows // n_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(rows, columns)


def hf_config(fields: Mapping[str, Any], *, dtype: str, tied: bool) -> dict[str, Any]:
    """config.json of the llama family from GGUF's metadata; `tied`: the file has no output matrix."""
    if fields["general.architecture"] != "llama":
        raise GgufImportError(f"architecture {fields['general.architecture']!r} (known: llama)")

    def number(key: str) -> Any:
        try:
            return fields[f"llama.{key}"]
        except KeyError:
            raise GgufImportError(f"the metadata has no llama.{key}") from None

    hidden_size, n_heads = number("embedding_length"), number("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": hidden_size // n_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": number("context_length"),
        # Stored as float32; six digits give back the decimal number that was meant.
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(number("rope.freq_base")),
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE that the metadata describes. Only the pre-tokenizer "smollm" is known: digits stand
    alone, then GPT-2's split."""
    if fields["tokenizer.ggml.model"] != "gpt2" or fields["tokenizer.ggml.pre"] != "smollm":
        described = f"{fields['tokenizer.ggml.model']}/{fields['tokenizer.ggml.pre']}"
        raise GgufImportError(f"tokenizer {described!r} (known: gpt2/smollm)")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    return tokenizer


def _tokenizer_config(fields: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


def _hf_values(tensor: Any, config: Mapping[str, Any]) -> np.ndarray:
    from gguf.quants import dequantize

    shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF names the fastest axis first
    values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    if tensor.name.endswith(".attn_q.weight"):
        return split_rotary_pairs(values, config["num_attention_heads"])
    if tensor.name.endswith(".attn_k.weight"):
        return split_rotary_pairs(values, config["num_key_value_heads"])
    return values


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
