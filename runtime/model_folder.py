"""What does the server itself read of a model's folder? Tokenizer, chat template, sampling defaults, output format.

Read once, on the building thread; the engine reads the rest.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model as model_package
from model.config import load_config
from model.hub import HubError, resolve_model
from runtime.chat_template import ChatTemplate, load_chat_template
from runtime.openai_protocol import SamplingDefaults, sampling_defaults
from runtime.options import ServerOptions
from runtime.parsers.registry import OutputFormat, output_format
from runtime.tokenizing import PromptTokenizer, load_tokenizer


@dataclass(frozen=True)
class ModelFolder:
    path: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: PromptTokenizer
    template: ChatTemplate | None
    output_format: OutputFormat
    defaults: SamplingDefaults


def find_model(options: ServerOptions) -> Path:
    """The folder of the model that the flags name. Raises HubError, OSError or ValueError."""
    if options.model is None:
        bundled = Path(model_package.__path__[0]) / "demo"
        if not (bundled / "config.json").exists():
            raise HubError("this installation has no bundled model; name one with --model DIR or ORG/NAME")
        return bundled
    return resolve_model(options.model, offline=options.offline)


def read_model_folder(options: ServerOptions) -> ModelFolder:
    """Raises HubError, OSError or ValueError with what to do about it."""
    path = find_model(options)
    try:
        config = load_config(path)
        tokenizer = load_tokenizer(path)
        source, special_tokens = load_chat_template(path, options.chat_template)
        template = None if source is None else ChatTemplate(source, special_tokens, time.localtime())
        form = output_format(
            options.tool_parser,
            options.reasoning_parser,
            source,
            str(_json_of(path / "config.json").get("model_type")),
            tokenizer.token_bytes.added_ids,
        )
        defaults = sampling_defaults(_json_of(path / "generation_config.json"))
    except (KeyError, TypeError, AttributeError) as error:
        # A JSON file of the folder is not shaped as it should be; the text of these says little alone.
        raise ValueError(
            f"the files of {options.model} are damaged ({type(error).__name__}: {error})"
        ) from error
    return ModelFolder(path, config.vocab_size, config.eos_token_ids, tokenizer, template, form, defaults)


def _json_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
