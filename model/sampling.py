"""How a token is chosen from logits, on the device: a function of (seed, position, logits) and the request alone.

Gumbel-max: token = argmax(filtered logits / temperature + noise(seed, position)), so a token changes under
rounding only where two perturbed logits nearly tie. top-k and top-p find their threshold by bisecting the 32
bits of an ordered float: exact, no sort, the same on every platform. What no sequence asks for is skipped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from model.batch import TOP_LOGPROBS, SamplingBatch, StepOutput
from model.state import SamplerState


def sample(
    logits_bv: jax.Array,
    batch: SamplingBatch,
    sampler: SamplerState,
    slots_b: jax.Array,
    position_b: jax.Array,
    drafted: tuple[jax.Array, jax.Array] | None = None,
    *,
    return_logits: bool,
) -> StepOutput:
    """Chooses the token that will stand at position_b. logits float32. `drafted`: tokens [B, k] that stand before it
    and are not counted yet, and which of them are there."""
    adjusted = _penalised(logits_bv, batch, sampler, slots_b, drafted)
    adjusted = lax.cond(
        jnp.any(batch.has_bias_b),
        lambda x: x + jnp.where(batch.has_bias_b[:, None], sampler.bias_sv[slots_b], 0.0),
        lambda x: x,
        adjusted,
    )
    greedy = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    tokens = lax.cond(
        jnp.any(batch.temperature_b > 0),
        lambda x: jnp.where(batch.temperature_b > 0, _drawn(x, batch, position_b), greedy),
        lambda x: greedy,
        adjusted,
    )
    logprob, top_ids, top_logprobs = lax.cond(
        jnp.any(batch.want_logprobs_b), _logprobs, _no_logprobs, logits_bv, tokens
    )
    return StepOutput(tokens, logprob, top_ids, top_logprobs, logits_bv if return_logits else None)


def _penalised(
    logits_bv: jax.Array,
    batch: SamplingBatch,
    sampler: SamplerState,
    slots_b: jax.Array,
    drafted: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Repetition penalty over prompt and output; presence and frequency penalties over the output."""

    def apply(logits: jax.Array) -> jax.Array:
        count = sampler.output_count_sv[slots_b]
        if drafted is not None:
            ids_bk, there_bk = drafted
            index_b1 = jnp.arange(ids_bk.shape[0], dtype=jnp.int32)[:, None]
            count = count.at[index_b1, ids_bk].add(there_bk.astype(jnp.int32))
        seen = sampler.prompt_seen_sv[slots_b] | (count > 0)
        factor = batch.repetition_penalty_b[:, None]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
        logits = logits - batch.frequency_penalty_b[:, None] * count.astype(jnp.float32)
        return logits - batch.presence_penalty_b[:, None] * (count > 0).astype(jnp.float32)

    wanted = (
        (batch.repetition_penalty_b != 1) | (batch.presence_penalty_b != 0) | (batch.frequency_penalty_b != 0)
    )
    return lax.cond(jnp.any(wanted), apply, lambda logits: logits, logits_bv)


def _drawn(logits_bv: jax.Array, batch: SamplingBatch, position_b: jax.Array) -> jax.Array:
    scaled = logits_bv / jnp.maximum(batch.temperature_b, 1e-6)[:, None]
    limited = (batch.top_k_b > 0) | (batch.top_p_b < 1) | (batch.min_p_b > 0)
    kept = lax.cond(
        jnp.any(limited & (batch.temperature_b > 0)), lambda x: _filtered(x, batch), lambda x: x, scaled
    )
    noise = jax.vmap(lambda seed, position: _noise(seed, position, logits_bv.shape[-1]))(
        batch.seed_b2, position_b
    )
    return jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)


def _noise(seed_2: jax.Array, position: jax.Array, size: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _filtered(logits_bv: jax.Array, batch: SamplingBatch) -> jax.Array:
    """-inf outside top-k, then top-p of what is left, then min-p. Ties at a threshold all stay."""
    keys = _ordered_bits(logits_bv)
    wanted = jnp.where(batch.top_k_b > 0, batch.top_k_b, logits_bv.shape[-1]).astype(jnp.float32)
    in_top_k = keys >= _threshold(keys, jnp.ones_like(logits_bv), wanted)[:, None]
    probabilities = jax.nn.softmax(jnp.where(in_top_k, logits_bv, -jnp.inf), axis=-1)
    # A row whose top_p is 1 keeps all it has: its target is below any reachable sum's rounding.
    mass = jnp.where(batch.top_p_b < 1, batch.top_p_b, 0.0)
    in_top_p = (keys >= _threshold(keys, probabilities, mass)[:, None]) | (batch.top_p_b >= 1)[:, None]
    least = jnp.max(probabilities, axis=-1, keepdims=True) * batch.min_p_b[:, None]
    return jnp.where(in_top_k & in_top_p & (probabilities >= least), logits_bv, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _threshold(keys_bv: jax.Array, weights_bv: jax.Array, target_b: jax.Array) -> jax.Array:
    """The largest key t for which the weights of all keys >= t sum to at least the target."""

    def narrow(step: jax.Array, best: jax.Array) -> jax.Array:
        candidate = best | lax.shift_left(jnp.uint32(1), jnp.uint32(31) - step.astype(jnp.uint32))
        total = jnp.sum(jnp.where(keys_bv >= candidate[:, None], weights_bv, 0.0), axis=-1)
        return jnp.where(total >= target_b, candidate, best)

    return lax.fori_loop(0, 32, narrow, jnp.zeros(keys_bv.shape[0], jnp.uint32))


Logprobs = tuple[jax.Array, jax.Array, jax.Array]


def _logprobs(logits_bv: jax.Array, tokens_b: jax.Array) -> Logprobs:
    logprobs = jax.nn.log_softmax(logits_bv, axis=-1)
    top_logprobs, top_ids = lax.top_k(logprobs, min(TOP_LOGPROBS, logits_bv.shape[-1]))
    return jnp.take_along_axis(logprobs, tokens_b[:, None], axis=-1)[:, 0], top_ids, top_logprobs


def _no_logprobs(logits_bv: jax.Array, tokens_b: jax.Array) -> Logprobs:
    shape = (logits_bv.shape[0], min(TOP_LOGPROBS, logits_bv.shape[-1]))
    return jnp.zeros(shape[0], jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def remember(sampler: SamplerState, slots_b: jax.Array, tokens_b: jax.Array) -> SamplerState:
    """Counts the chosen tokens, for the penalties."""
    return sampler.replace(output_count_sv=sampler.output_count_sv.at[slots_b, tokens_b].add(1))
