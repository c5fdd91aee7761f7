"""What loss does a batch of rows have: the qwen3_5 hybrid as one dense, differentiable forward over [batch, time].

Pure functions over a dict of float32 arrays under their public checkpoint names (models.md 1.4 and 7); owns no
state. Serving runs its own layers on paged entries and carried rows; this one sees whole rows at once, which is
what training wants, and is held to the same references by tests/model/test_train.py.

`compute_dtype` is the dtype of the operands of the large products (bfloat16 runs two to four times faster on CPUs
with matrix units); sums, norms, softmax and the delta rule are float32 always.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from model.config import AttentionConfig, GatedDeltaConfig, ModelConfig

Weights = Mapping[str, jax.Array]
CHUNK_TOKENS = 64
L2_EPSILON = 1e-6


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x_ti: jax.Array, weight_oi: jax.Array, compute_dtype: jnp.dtype) -> jax.Array:
    """x·Wᵀ over the last axis, float32 result; operands of forward and backward products in `compute_dtype`."""
    return jnp.einsum(
        "...i,oi->...o",
        x_ti.astype(compute_dtype),
        weight_oi.astype(compute_dtype),
        preferred_element_type=jnp.float32,
    )


def _linear_forward(
    x_ti: jax.Array, weight_oi: jax.Array, compute_dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x_ti, weight_oi = x_ti.astype(compute_dtype), weight_oi.astype(compute_dtype)
    return linear(x_ti, weight_oi, compute_dtype), (x_ti, weight_oi)


def _linear_backward(
    compute_dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], grad_to: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x_ti, weight_oi = saved
    grad_to = grad_to.astype(compute_dtype)
    grad_x = jnp.einsum("...o,oi->...i", grad_to, weight_oi, preferred_element_type=jnp.float32)
    grad_weight = jnp.einsum(
        "to,ti->oi",
        grad_to.reshape(-1, grad_to.shape[-1]),
        x_ti.reshape(-1, x_ti.shape[-1]),
        preferred_element_type=jnp.float32,
    )
    return grad_x, grad_weight


linear.defvjp(_linear_forward, _linear_backward)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Zero-centred RMS norm over the last axis: n·(1 + w)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * (1.0 + weight)


def rope(x_btnd: jax.Array, config: AttentionConfig) -> jax.Array:
    """Half-split rotation of the first `rotary_dims` channels; position = index in the row."""
    half = config.rotary_dims // 2
    positions_t = jnp.arange(x_btnd.shape[1], dtype=jnp.float32)
    angles = positions_t[:, None] * jnp.asarray(config.inverse_frequencies, jnp.float32)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second, rest = x_btnd[..., :half], x_btnd[..., half : 2 * half], x_btnd[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _query_blocks(n_time: int) -> list[slice]:
    """Blocks of queries, each of which need look no further than its own end."""
    block = -(-n_time // 4)
    return [slice(start, min(start + block, n_time)) for start in range(0, n_time, block)]


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def causal_attention(
    q_td: jax.Array, k_td: jax.Array, v_td: jax.Array, compute_dtype: jnp.dtype
) -> jax.Array:
    """One head's causal softmax attention (q already scaled). Recomputes the shares in the backward pass, where it
    builds them transposed: then all products but one have the operand order that CPU matrix units are fed in."""
    return _causal_forward(q_td, k_td, v_td, compute_dtype)[0]


def _causal_forward(
    q_td: jax.Array, k_td: jax.Array, v_td: jax.Array, compute_dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    q_td, k_td, v_td = (x.astype(compute_dtype) for x in (q_td, k_td, v_td))
    outs, log_sums = [], []
    for block in _query_blocks(q_td.shape[0]):
        scores = _dot(q_td[block], k_td[: block.stop], 1, 1)
        seen = jnp.arange(block.stop)[None, :] <= jnp.arange(block.start, block.stop)[:, None]
        scores = jnp.where(seen, scores, -jnp.inf)
        highest = jnp.max(scores, -1, keepdims=True)
        shares = jnp.exp(scores - highest)
        total = jnp.sum(shares, -1, keepdims=True)
        outs.append(_dot(shares.astype(compute_dtype), v_td[: block.stop], 1, 0) / total)
        log_sums.append((highest + jnp.log(total))[:, 0])
    out, log_sum = jnp.concatenate(outs), jnp.concatenate(log_sums)
    return out, (q_td, k_td, v_td, out, log_sum)


def _causal_backward(
    compute_dtype: jnp.dtype, saved: tuple[jax.Array, ...], grad_td: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q_td, k_td, v_td, out_td, log_sum = saved
    inner = jnp.sum(grad_td * out_td, -1)
    grad_td = grad_td.astype(compute_dtype)
    grad_k = jnp.zeros(k_td.shape, jnp.float32)
    grad_v = jnp.zeros(v_td.shape, jnp.float32)
    grads_q = []
    for block in _query_blocks(q_td.shape[0]):
        q, grad, k, v = q_td[block], grad_td[block], k_td[: block.stop], v_td[: block.stop]
        seen = jnp.arange(block.stop)[:, None] <= jnp.arange(block.start, block.stop)[None, :]
        shares_st = jnp.exp(jnp.where(seen, _dot(k, q, 1, 1), -jnp.inf) - log_sum[block])
        grad_scores_st = (shares_st * (_dot(v, grad, 1, 1) - inner[block])).astype(compute_dtype)
        grad_v = grad_v.at[: block.stop].add(_dot(shares_st.astype(compute_dtype), grad, 1, 0))
        grad_k = grad_k.at[: block.stop].add(_dot(grad_scores_st, q, 1, 0))
        grads_q.append(_dot(grad_scores_st, k, 0, 0))
    return jnp.concatenate(grads_q), grad_k, grad_v


causal_attention.defvjp(_causal_forward, _causal_backward)


def gated_attention(
    weights: Weights, prefix: str, x_bth: jax.Array, config: ModelConfig, compute_dtype: jnp.dtype
) -> jax.Array:
    """Full attention with per-head query|gate rows, zero-centred q and k norms, partial RoPE and a sigmoid gate."""
    att = config.attention
    n_batch, n_time, _ = x_bth.shape
    group = att.n_heads // att.n_kv_heads
    query_gate = linear(x_bth, weights[prefix + "q_proj.weight"], compute_dtype)
    query, gate = jnp.split(query_gate.reshape(n_batch, n_time, att.n_heads, 2 * att.head_dim), 2, -1)
    kv_shape = (n_batch, n_time, att.n_kv_heads, att.head_dim)
    key = linear(x_bth, weights[prefix + "k_proj.weight"], compute_dtype).reshape(kv_shape)
    value = linear(x_bth, weights[prefix + "v_proj.weight"], compute_dtype).reshape(kv_shape)
    query = rope(rms_norm(query, weights[prefix + "q_norm.weight"], config.norm_eps), att) * att.scale
    key = rope(rms_norm(key, weights[prefix + "k_norm.weight"], config.norm_eps), att)
    heads = jax.tree.map(
        lambda x: jnp.moveaxis(x, 2, 1).reshape(n_batch * att.n_heads, n_time, att.head_dim),
        (query, jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)),
    )
    mixed = jax.lax.map(lambda qkv: causal_attention(*qkv, compute_dtype), heads)
    mixed = jnp.moveaxis(mixed.reshape(n_batch, att.n_heads, n_time, att.head_dim), 1, 2)
    gated = mixed.reshape(n_batch, n_time, -1) * jax.nn.sigmoid(gate.reshape(n_batch, n_time, -1))
    return linear(gated, weights[prefix + "o_proj.weight"], compute_dtype)


def short_conv(x_btc: jax.Array, weight_cj: jax.Array) -> jax.Array:
    """Depthwise causal convolution and SiLU; the last tap is the current token."""
    n_taps, n_time = weight_cj.shape[-1], x_btc.shape[1]
    padded = jnp.pad(x_btc, ((0, 0), (n_taps - 1, 0), (0, 0)))
    total = sum(padded[:, j : j + n_time] * weight_cj[:, j] for j in range(n_taps))
    return jax.nn.silu(jnp.asarray(total))


def _invert_unit_lower(lower: jax.Array) -> jax.Array:
    """Inverse of I + L for strictly lower L [..., n, n], n a power of two: halves, then the corner between them."""
    n = lower.shape[-1]
    if n <= 8:  # (I - L)(I + L²)(I + L⁴): exact, since L⁸ = 0; small enough for its powers to stay small
        eye = jnp.eye(n, dtype=lower.dtype)
        square = lower @ lower
        return (eye - lower) @ (eye + square) @ (eye + square @ square)
    half = n // 2
    corners = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
    first, last = _invert_unit_lower(corners)
    below = -last @ lower[..., half:, :half] @ first
    top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([top, jnp.concatenate([below, last], -1)], -2)


@jax.custom_vjp
def invert_unit_lower(lower: jax.Array) -> jax.Array:
    """(I + L)⁻¹ with the closed-form gradient -XᵀGXᵀ, which is cheaper than differentiating the recursion."""
    return _invert_unit_lower(lower)


def _invert_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _invert_unit_lower(lower)
    return inverse, inverse


def _invert_backward(inverse: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-transposed @ grad @ transposed, -1),)


invert_unit_lower.defvjp(_invert_forward, _invert_backward)


def delta_rule(
    q_bthk: jax.Array, k_bthk: jax.Array, v_bthv: jax.Array, log_decay_bth: jax.Array, beta_bth: jax.Array
) -> jax.Array:
    """The gated delta rule from a zero state, in its chunk form (models.md 0). Time is padded to whole chunks."""
    n_batch, n_time, n_heads, key_dim = q_bthk.shape
    pad = -n_time % CHUNK_TOKENS

    def chunks(x: jax.Array) -> jax.Array:  # [batch, time, heads, ...] -> [chunks, batch, heads, chunk, ...]
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(n_batch, -1, CHUNK_TOKENS, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    q, k, v, beta = chunks(q_bthk), chunks(k_bthk), chunks(v_bthv), chunks(beta_bth)[..., None]
    decay_sum = jnp.cumsum(chunks(log_decay_bth), -1)
    difference = decay_sum[..., :, None] - decay_sum[..., None, :]
    lower = jnp.tril(jnp.ones((CHUNK_TOKENS, CHUNK_TOKENS), bool))
    decay = jnp.exp(jnp.where(lower, difference, -jnp.inf))
    k_transposed = jnp.swapaxes(k, -1, -2)
    inverse = invert_unit_lower(jnp.tril(beta * (k @ k_transposed) * decay, -1))
    growth = jnp.exp(decay_sum)[..., None]
    values = inverse @ (beta * v)
    reads = inverse @ (beta * k * growth)
    inner = (q @ k_transposed) * decay
    q_in = q * growth
    k_out = k * jnp.exp(decay_sum[..., -1:] - decay_sum)[..., None]
    keep = growth[..., -1:, :]

    def step(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        values, reads, inner, q_in, k_out, keep = chunk
        new = values - reads @ state
        out = q_in @ state + inner @ new
        return keep * state + jnp.swapaxes(k_out, -1, -2) @ new, out

    state = jnp.zeros((n_batch, n_heads, key_dim, v_bthv.shape[-1]), jnp.float32)
    _, out = jax.lax.scan(step, state, (values, reads, inner, q_in, k_out, keep))
    out = jnp.moveaxis(out, (0, 2), (1, 3))  # [batch, chunks, chunk, heads, value]
    return out.reshape(n_batch, -1, n_heads, out.shape[-1])[:, :n_time]


def l2_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + L2_EPSILON)


def gated_delta_net(
    weights: Weights, prefix: str, x_bth: jax.Array, config: ModelConfig, compute_dtype: jnp.dtype
) -> jax.Array:
    """Gated DeltaNet: short convolution, delta rule with scalar decay, gated norm, output projection."""
    assert config.gated_delta is not None
    gdn: GatedDeltaConfig = config.gated_delta
    n_batch, n_time, _ = x_bth.shape
    n_key_channels = gdn.n_key_heads * gdn.key_dim
    mixed = linear(x_bth, weights[prefix + "in_proj_qkv.weight"], compute_dtype)
    mixed = short_conv(mixed, weights[prefix + "conv1d.weight"][:, 0])
    query, key, value = jnp.split(mixed, [n_key_channels, 2 * n_key_channels], -1)
    key_shape = (n_batch, n_time, gdn.n_key_heads, gdn.key_dim)
    value_shape = (n_batch, n_time, gdn.n_value_heads, gdn.value_dim)
    query = jnp.repeat(l2_norm(query.reshape(key_shape)) * gdn.key_dim**-0.5, gdn.values_per_key, 2)
    key = jnp.repeat(l2_norm(key.reshape(key_shape)), gdn.values_per_key, 2)
    beta = jax.nn.sigmoid(linear(x_bth, weights[prefix + "in_proj_b.weight"], jnp.float32))
    rate = linear(x_bth, weights[prefix + "in_proj_a.weight"], jnp.float32) + weights[prefix + "dt_bias"]
    log_decay = -jnp.exp(weights[prefix + "A_log"]) * jax.nn.softplus(rate)
    out = delta_rule(query, key, value.reshape(value_shape), log_decay, beta)
    gate = linear(x_bth, weights[prefix + "in_proj_z.weight"], compute_dtype).reshape(value_shape)
    normed = out * jax.lax.rsqrt(jnp.mean(out * out, -1, keepdims=True) + config.norm_eps)
    out = normed * weights[prefix + "norm.weight"] * jax.nn.silu(gate)
    return linear(out.reshape(n_batch, n_time, -1), weights[prefix + "out_proj.weight"], compute_dtype)


def decoder_layer(
    weights: Weights, prefix: str, mixer: str, x_bth: jax.Array, config: ModelConfig, compute_dtype: jnp.dtype
) -> jax.Array:
    """One pre-norm layer: mixer, then a dense SwiGLU, each added to the stream."""
    normed = rms_norm(x_bth, weights[prefix + "input_layernorm.weight"], config.norm_eps)
    if mixer == "attention":
        x_bth = x_bth + gated_attention(weights, prefix + "self_attn.", normed, config, compute_dtype)
    else:
        x_bth = x_bth + gated_delta_net(weights, prefix + "linear_attn.", normed, config, compute_dtype)
    normed = rms_norm(x_bth, weights[prefix + "post_attention_layernorm.weight"], config.norm_eps)
    gate = linear(normed, weights[prefix + "mlp.gate_proj.weight"], compute_dtype)
    up = linear(normed, weights[prefix + "mlp.up_proj.weight"], compute_dtype)
    return x_bth + linear(jax.nn.silu(gate) * up, weights[prefix + "mlp.down_proj.weight"], compute_dtype)


def trunk(weights: Weights, tokens_bt: jax.Array, config: ModelConfig, compute_dtype: jnp.dtype) -> jax.Array:
    """Hidden states [batch, time, hidden] after the final norm."""
    x = weights["model.embed_tokens.weight"][tokens_bt]
    for index, layer in enumerate(config.layers):
        x = decoder_layer(weights, f"model.layers.{index}.", layer.mixer, x, config, compute_dtype)
    return rms_norm(x, weights["model.norm.weight"], config.norm_eps)


def mtp_hidden(
    weights: Weights,
    hidden_bth: jax.Array,
    next_tokens_bt: jax.Array,
    config: ModelConfig,
    compute_dtype: jnp.dtype,
) -> jax.Array:
    """The MTP head's post-norm state at t, from the trunk's final-norm state at t and token t+1; it predicts t+2."""
    embedded = weights["model.embed_tokens.weight"][next_tokens_bt]
    joined = jnp.concatenate(
        [
            rms_norm(embedded, weights["mtp.pre_fc_norm_embedding.weight"], config.norm_eps),
            rms_norm(hidden_bth, weights["mtp.pre_fc_norm_hidden.weight"], config.norm_eps),
        ],
        -1,
    )
    x = linear(joined, weights["mtp.fc.weight"], compute_dtype)
    x = decoder_layer(weights, "mtp.layers.0.", "attention", x, config, compute_dtype)
    return rms_norm(x, weights["mtp.norm.weight"], config.norm_eps)


def logits(weights: Weights, hidden_bth: jax.Array, compute_dtype: jnp.dtype) -> jax.Array:
    """Scores over the vocabulary, by the tied embedding."""
    return linear(hidden_bth, weights["model.embed_tokens.weight"], compute_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def vocabulary_loss(
    hidden_th: jax.Array, embedding_vh: jax.Array, targets_t: jax.Array, compute_dtype: jnp.dtype
) -> jax.Array:
    """Mean negative log-likelihood in nats per token under the tied head. Its gradients are made in the forward
    pass, while the scores are at hand, so that scores and shares are never kept."""
    return _vocabulary_forward(hidden_th, embedding_vh, targets_t, compute_dtype)[0]


def _vocabulary_forward(
    hidden_th: jax.Array, embedding_vh: jax.Array, targets_t: jax.Array, compute_dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    n_tokens = hidden_th.shape[0]
    hidden_th, embedding_vh = hidden_th.astype(compute_dtype), embedding_vh.astype(compute_dtype)
    scores_tv = _dot(hidden_th, embedding_vh, 1, 1)
    log_sum_t = jax.nn.logsumexp(scores_tv, -1)
    loss = jnp.mean(log_sum_t - jnp.take_along_axis(scores_tv, targets_t[:, None], -1)[:, 0])
    hit = jnp.arange(scores_tv.shape[-1]) == targets_t[:, None]
    error_tv = (jnp.exp(scores_tv - log_sum_t[:, None]) - hit.astype(jnp.float32)) / n_tokens
    error_tv = error_tv.astype(compute_dtype)
    grad_hidden = _dot(error_tv, embedding_vh, 1, 0)
    grad_embedding_hv = _dot(_transposed(hidden_th), error_tv, 1, 0)
    return loss, (grad_hidden, _transposed(grad_embedding_hv))


def _vocabulary_backward(
    compute_dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    return grad * saved[0], grad * saved[1], None


vocabulary_loss.defvjp(_vocabulary_forward, _vocabulary_backward)


def _transposed(x: jax.Array) -> jax.Array:
    """x.T, made block by block in a loop. A plain transpose is folded into the product that reads it, and XLA's CPU
    products with a transposed left side run at a third of the speed."""
    block = math.gcd(x.shape[0], 256)
    block = block // 2 if block == x.shape[0] else block  # one block would be no loop, and be folded again

    def copy(index: jax.Array, out: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(x, index * block, block)
        return jax.lax.dynamic_update_slice_in_dim(out, part.T, index * block, 1)

    return jax.lax.fori_loop(0, x.shape[0] // block, copy, jnp.zeros(x.shape[::-1], x.dtype))


def losses(
    weights: Weights, rows_bt: jax.Array, n_mtp_rows: int, config: ModelConfig, compute_dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """(trunk loss, MTP loss) of rows holding two tokens more than the trunk reads; the MTP head reads only the first
    `n_mtp_rows` rows."""
    n_time, embedding = rows_bt.shape[1] - 2, weights["model.embed_tokens.weight"]
    hidden = trunk(weights, rows_bt[:, :n_time], config, compute_dtype)
    mtp_rows = rows_bt[:n_mtp_rows]
    ahead = mtp_hidden(weights, hidden[:n_mtp_rows], mtp_rows[:, 1 : n_time + 1], config, compute_dtype)

    def loss(hidden_bth: jax.Array, targets_bt: jax.Array) -> jax.Array:
        hidden_th = hidden_bth.reshape(-1, hidden_bth.shape[-1])
        return vocabulary_loss(hidden_th, embedding, targets_bt.reshape(-1), compute_dtype)

    return loss(hidden, rows_bt[:, 1 : n_time + 1]), loss(ahead, mtp_rows[:, 2:])


def agreement(
    weights: Weights, rows_bt: jax.Array, config: ModelConfig, compute_dtype: jnp.dtype
) -> jax.Array:
    """The share of positions at which the MTP head, given the true next token, names the same best token as the
    trunk does one position later: how often a greedy one-token draft would be accepted."""
    n_time = rows_bt.shape[1] - 1
    hidden = trunk(weights, rows_bt[:, :n_time], config, compute_dtype)
    ahead = mtp_hidden(weights, hidden, rows_bt[:, 1:], config, compute_dtype)
    drafts = jnp.argmax(logits(weights, ahead[:, :-1], compute_dtype), -1)
    chosen = jnp.argmax(logits(weights, hidden[:, 1:], compute_dtype), -1)
    return jnp.mean((drafts == chosen).astype(jnp.float32))
