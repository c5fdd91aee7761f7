"""What one step is given and what it returns, as arrays.

Axis letters, used by every array name in the project:
  n tiles of a prefill step   b sequences of a decode step   t tokens of a tile   p entries of a page table
  s slots (active rows)       r ranks, or query heads of a kv head   g kv-head groups   h hidden, heads
  v vocabulary                q pages of a saved row
  w words of a page           k chosen (experts, top tokens)          c channels         j taps of a convolution
"""

from __future__ import annotations

import jax
from flax import struct

TOP_LOGPROBS = 20
MOST_DRAFTS = 7
"""Of a sequence in one step."""


@struct.dataclass
class SamplingBatch:
    """How each sequence chooses its token. All arrays over the batch axis.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0 are off.
    seed: uint32 [., 2], the whole 64-bit seed. float32, int32, bool otherwise.
    """

    temperature_b: jax.Array
    top_k_b: jax.Array
    top_p_b: jax.Array
    min_p_b: jax.Array
    repetition_penalty_b: jax.Array
    presence_penalty_b: jax.Array
    frequency_penalty_b: jax.Array
    seed_b2: jax.Array
    has_bias_b: jax.Array
    want_logprobs_b: jax.Array


@struct.dataclass
class TileBatch:
    """Prefill: `n_tiles` of the N tiles are computed, in order, each T tokens of one sequence.

    A tile starts at a multiple of T (start_tokens_n); its tokens beyond valid_tokens_n are padding. A tile that
    holds the prompt's last token (finishes_n) samples the first new token. page_table_np lists the sequence's
    pages from its beginning, those of the tile included; unused entries are page 0. After a tile with saves_n the
    sequence's row is saved into the pages row_page_ids_nq [N, row pages]: a checkpoint at the tile's end.
    """

    n_tiles: jax.Array
    token_ids_nt: jax.Array
    slots_n: jax.Array
    start_tokens_n: jax.Array
    valid_tokens_n: jax.Array
    finishes_n: jax.Array
    page_table_np: jax.Array
    saves_n: jax.Array
    row_page_ids_nq: jax.Array
    sampling: SamplingBatch


@struct.dataclass
class Drafts:
    """Which entries of a decode batch are drafts: place_b int32 is 0 for a sequence's last token and i for its i-th
    draft, which stands right behind its predecessor. draft_ids_b int32: a draft's token, or -1 for the one that was
    proposed for its slot (model/proposals.py)."""

    place_b: jax.Array
    draft_ids_b: jax.Array


@struct.dataclass
class DecodeBatch:
    """Decode: each sequence is fed its slot's last token, which stands at position_b, and samples the next. A draft is
    fed as well, one position after its predecessor, and what is sampled there counts if the draft was right.

    Padding entries use the last slot and page 0, both scratch.
    """

    slots_b: jax.Array
    position_b: jax.Array
    page_table_bp: jax.Array
    sampling: SamplingBatch
    drafts: Drafts | None = None


@struct.dataclass
class ProposalBatch:
    """Proposals: the MTP layer names `n_drafts_b` tokens (at most n_steps) to follow each slot's last token, which
    stands at position_b. Padding as in a DecodeBatch, with n_drafts_b 0."""

    n_steps: jax.Array
    slots_b: jax.Array
    position_b: jax.Array
    n_drafts_b: jax.Array
    page_table_bp: jax.Array
    sampling: SamplingBatch


@struct.dataclass
class StepOutput:
    """The chosen tokens, over b or n. Log-probabilities are zeros unless some sequence wants them.

    For prefill only the entries of finishing tiles mean anything. logits: float32, None unless asked for
    (`Static.return_logits`), before penalties and bias. counts_b bool: whether the entry's token is of the answer, its
    predecessors having been drafted right; None where nothing is drafted.
    """

    token_ids_b: jax.Array
    logprob_b: jax.Array
    top_token_ids_bk: jax.Array
    top_logprobs_bk: jax.Array
    logits_bv: jax.Array | None
    counts_b: jax.Array | None = None
