"""DeepSeek V4's MTP layer in NumPy, float64, from the checkpoint's own tensors: what the model's is compared with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Weights = Mapping[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rms(x: np.ndarray, weight: np.ndarray | float, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, frequencies: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Pairs of the last channels of x [T, ..., D], by angle position * frequency."""
    angles = np.multiply.outer(positions, frequencies).reshape(
        len(positions), *(1,) * (x.ndim - 2), len(frequencies)
    )
    half = 2 * len(frequencies)
    pairs = x[..., -half:].reshape(*x.shape[:-1], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    both = np.stack([turned.real, turned.imag], -1).reshape(*x.shape[:-1], half)
    return np.concatenate([x[..., :-half], both], -1)


def swiglu(x: np.ndarray, w: Weights, prefix: str, limit: float) -> np.ndarray:
    gate = np.minimum(x @ w[f"{prefix}w1.weight"].T, limit)
    up = np.clip(x @ w[f"{prefix}w3.weight"].T, -limit, limit)
    return (gate * sigmoid(gate) * up) @ w[f"{prefix}w2.weight"].T


def _enter(streams, w, name, raw):  # type: ignore[no-untyped-def]
    """(what the block reads, weights of writing, mixing matrix)."""
    n, eps = raw["hc_mult"], raw["hc_eps"]
    y = rms(streams.reshape(len(streams), -1), 1.0, raw["rms_norm_eps"]) @ w[f"hc_{name}_fn"].T
    scale, base = w[f"hc_{name}_scale"], w[f"hc_{name}_base"]
    read = sigmoid(y[:, :n] * scale[0] + base[:n]) + eps
    write = 2 * sigmoid(y[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    mix = np.exp((y[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n))
    mix = mix / mix.sum(-1, keepdims=True) + eps
    for i in range(raw["hc_sinkhorn_iters"]):
        if i:
            mix = mix / (mix.sum(2, keepdims=True) + eps)
        mix = mix / (mix.sum(1, keepdims=True) + eps)
    return np.einsum("tn,tnh->th", read, streams), write, mix


def _leave(streams, out, write, mix):  # type: ignore[no-untyped-def]
    return write[..., None] * out[:, None] + np.einsum("tij,tih->tjh", mix, streams)


def deepseek_v4_mtp(tensors: Weights, raw: Mapping, token_ids: np.ndarray, streams: np.ndarray) -> np.ndarray:
    """Logits [T - 1, V]: row t from the trunk's streams [T, n, H] before their end, at t, and token t + 1."""
    tensors = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    w = {name.removeprefix("mtp.0."): t for name, t in tensors.items() if name.startswith("mtp.0.")}
    eps, heads, dim = raw["rms_norm_eps"], raw["num_attention_heads"], raw["head_dim"]
    embedded = rms(tensors["embed.weight"][token_ids[1:]], w["enorm.weight"], eps) @ w["e_proj.weight"].T
    x = rms(np.asarray(streams[:-1], np.float64), w["hnorm.weight"], eps) @ w["h_proj.weight"].T
    x = x + embedded[:, None]

    read, write, mix = _enter(x, w, "attn", raw)
    read = rms(read, w["attn_norm.weight"], eps)
    n_t, positions = len(read), np.arange(1, len(read) + 1)
    rotary = raw["qk_rope_head_dim"]
    frequencies = raw["rope_theta"] ** (-np.arange(0, rotary, 2) / rotary)
    latent = rms(read @ w["attn.wq_a.weight"].T, w["attn.q_norm.weight"], eps)
    q = rms((latent @ w["attn.wq_b.weight"].T).reshape(n_t, heads, dim), 1.0, eps)
    q = rotate(q, frequencies, positions)
    kv = rotate(rms(read @ w["attn.wkv.weight"].T, w["attn.kv_norm.weight"], eps), frequencies, positions)
    back = positions[:, None] - positions
    seen = (back >= 0) & (back < raw["sliding_window"])
    scores = np.where(seen, np.einsum("thd,sd->hts", q, kv) * dim**-0.5, -np.inf)
    sink = np.broadcast_to(w["attn.attn_sink"][:, None, None], (heads, n_t, 1))
    scores = np.exp(np.concatenate([scores, sink], -1))
    weights = (scores / scores.sum(-1, keepdims=True))[..., :-1]
    out = rotate(np.einsum("hts,sd->thd", weights, kv), frequencies, -positions)
    groups = raw["o_groups"]
    narrow = w["attn.wo_a.weight"].reshape(groups, raw["o_lora_rank"], -1)
    out = np.einsum("tgi,goi->tgo", out.reshape(n_t, groups, -1), narrow).reshape(n_t, -1)
    x = _leave(x, out @ w["attn.wo_b.weight"].T, write, mix)

    read, write, mix = _enter(x, w, "ffn", raw)
    read = rms(read, w["ffn_norm.weight"], eps)
    affinity = np.sqrt(np.log1p(np.exp(read @ w["ffn.gate.weight"].T)))
    best = np.argsort(-(affinity + w["ffn.gate.bias"]), axis=-1)[:, : raw["num_experts_per_tok"]]
    out = swiglu(read, w, "ffn.shared_experts.", raw["swiglu_limit"])
    for t in range(n_t):
        share = affinity[t, best[t]]
        share = share / share.sum() * raw["routed_scaling_factor"]
        for expert, weight in zip(best[t], share, strict=True):
            out[t] += weight * swiglu(read[t], w, f"ffn.experts.{expert}.", raw["swiglu_limit"])
    x = _leave(x, out, write, mix)

    y = rms(x.reshape(n_t, -1), 1.0, eps) @ w["hc_head_fn"].T
    read = sigmoid(y * w["hc_head_scale"] + w["hc_head_base"]) + raw["hc_eps"]
    ended = rms(np.einsum("tn,tnh->th", read, x), w["norm.weight"], eps)
    return ended @ tensors["head.weight"].T
