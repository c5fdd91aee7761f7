"""How does a request's prompt become token ids?

Ties the chat template and the tokenizer together. Built once per server, shared and read-only; `build` runs
on a worker thread with a time limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from runtime.api_errors import invalid_value, template_error
from runtime.chat_template import ChatTemplate, RenderedText
from runtime.parsers.registry import PLAIN, OutputFormat
from runtime.serve_request import ChatPrompt, PromptThinking, RenderedPrompt, TextPrompts
from runtime.tokenizing import ControlGuard, PromptTokenizer
from runtime.tool_history import wants_text, with_text_arguments

# Templates look for these in an assistant's earlier answers to cut its thinking out.
_SPARED_IN_ANSWERS = frozenset({"<think>", "</think>"})
# What a template writes to begin the answer is no longer, where it does not say which message ends where.
_OPENING_TOKENS = 16


class PromptBuilder:
    """`template` is None for a model without one: then only plain prompts can be served. `output_format` says how
    the model marks its thinking and its calls."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        template: ChatTemplate | None,
        n_context_tokens: int,
        output_format: OutputFormat = PLAIN,
    ):
        self.tokenizer = tokenizer
        self.output_format = output_format
        self._template = template
        self._wants_text_arguments = template is not None and wants_text(template)
        self._n_context_tokens = n_context_tokens

    def build(self, prompt: ChatPrompt | TextPrompts, scope: str | None = None) -> tuple[RenderedPrompt, ...]:
        """One rendered prompt per prompt of the request; conversations of one `scope` share what is remembered of their
        tokens. Raises ApiError 400."""
        if isinstance(prompt, ChatPrompt):
            return (
                self.render(
                    prompt.messages,
                    {**prompt.variables, **({"tools": prompt.tools} if prompt.tools else {})},
                    add_generation_prompt=prompt.add_generation_prompt,
                    continue_final_message=prompt.continue_final_message,
                    scope=scope,
                ),
            )
        return tuple(self._plain(item, prompt.add_special_tokens) for item in prompt.prompts)

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        scope: str | None = None,
    ) -> RenderedPrompt:
        """Token ids of a conversation, with the token counts at which its messages end."""
        if self._template is None:
            raise template_error(
                "This model has no chat template;"
                " use /v1/completions, or start the server with --chat-template."
            )
        messages = list(messages)
        if self._wants_text_arguments:
            messages = with_text_arguments(messages)
        written = "\n".join(message["content"] for message in messages)
        self.tokenizer.check_length(written, self._n_context_tokens, "messages")
        guard = ControlGuard(self.tokenizer.control_texts)
        guarded = [
            guard.marked(message, _SPARED_IN_ANSWERS if message["role"] == "assistant" else frozenset())
            for message in messages
        ]
        known = {name: value for name, value in (variables or {}).items() if name in self._template.reads}
        rendered = self._template.render(
            guarded, {**guard.marked(known), "add_generation_prompt": add_generation_prompt}
        )
        if continue_final_message:
            rendered = _cut_after(rendered, guarded[-1]["content"])
        token_ids, ends = self.tokenizer.encode_rendered(rendered, guard, scope)
        if not token_ids:
            raise template_error("The chat template made an empty prompt of these messages.")
        return RenderedPrompt(
            token_ids,
            tuple(ends),
            guard.unmarked(rendered.text),
            self._thinking(token_ids, ends, continue_final_message),
        )

    def _thinking(self, token_ids: tuple[int, ...], ends: list[int], continues: bool) -> PromptThinking:
        """By the text behind the last message that is whole: what came before is not the model's present turn."""
        known = ends[:-1] if continues else ends
        start = known[-1] if known else max(0, len(token_ids) - _OPENING_TOKENS)
        raw = b"".join(map(self.tokenizer.token_bytes.raw, token_ids[start:]))
        return self.output_format.prompt_thinking(raw.decode(errors="replace"))

    def _plain(self, prompt: str | tuple[int, ...], add_special_tokens: bool) -> RenderedPrompt:
        if isinstance(prompt, tuple):
            return RenderedPrompt(prompt)
        self.tokenizer.check_length(prompt, self._n_context_tokens, "prompt")
        token_ids = self.tokenizer.encode(prompt, add_special_tokens)
        if not token_ids:
            raise invalid_value("prompt", "must have at least one token")
        return RenderedPrompt(token_ids, text=prompt)


def _cut_after(rendered: RenderedText, final_content: str) -> RenderedText:
    """Drops what the template writes after the last message's text, so that the model continues it."""
    content = final_content.strip()
    start = rendered.text.rfind(content)
    if not content or start < 0:
        raise invalid_value("continue_final_message", "the last message's text is not in the rendered prompt")
    text = rendered.text[: start + len(content)]
    return RenderedText(text, tuple(min(end, len(text)) for end in rendered.message_end_chars))
