"""Which vocabulary does the demo model speak: trains its byte-level BPE and writes the tokenizer's files.

Owns no state. Runs once, on the caller's thread, before a training run; also used by `model.random` to give
random checkpoints a tokenizer of the right size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
N_RESERVED_TOKENS = 8
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END] + [f"<|reserved_{i}|>" for i in range(N_RESERVED_TOKENS)]

# Words with their leading space, single digits, runs of punctuation, and line breaks kept apart from blanks.
# A contraction's tail is a piece of its own. Nothing is normalised: every byte sequence survives a round trip.
_PIECES = (
    r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+"
    r"|[\r\n]+"
    r"|[^\S\r\n]+(?!\S)"
    r"|[^\S\r\n]+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with exactly `vocab_size` entries, special tokens first (ids 0, 1, 2, then reserved).

    If the text is too small to fill the vocabulary, unused entries named `<|extra_N|>` make up the rest, so that
    the embedding and the tokenizer always have the same size. Raises ValueError if the size cannot hold the 256
    bytes and the special tokens.
    """
    n_least_tokens = 256 + len(SPECIAL_TOKENS)
    if vocab_size < n_least_tokens:
        raise ValueError(f"vocab_size must be at least {n_least_tokens} (256 bytes and the special tokens)")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    n_missing_tokens = vocab_size - tokenizer.get_vocab_size()
    if n_missing_tokens:
        tokenizer.add_tokens([f"<|extra_{i}|>" for i in range(n_missing_tokens)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context_tokens: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    specials = {str(tokenizer.token_to_id(t)): _special_entry(t) for t in SPECIAL_TOKENS}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": specials,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", config)
    generation = {
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "eos_token_id": [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }
    write_json(directory / "generation_config.json", generation)


def write_json(path: Path, value: object) -> None:
    """Writes `value` as indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _special_entry(content: str) -> dict[str, object]:
    return {
        "content": content,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        "special": True,
    }
