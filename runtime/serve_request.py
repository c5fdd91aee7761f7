"""What is asked of the server, whatever the protocol it came in, and what is it told back?

The one internal form between protocols (thin translations at the edge) and generation. Frozen records; made
on the HTTP thread or a worker, read anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.parsers.events import CallArguments, CallEnd, CallStart, Content, Reasoning
from runtime.request import PromptLogprobs, RequestTimes, SamplingParams, TokenLogprob, Usage
from runtime.structure import Structure
from runtime.tools import ToolUse

# What an answer is made of, in order; every CallStart has an id.
PromptThinking = Literal["open", "closed", "unsaid"]
Part = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation for the chat template. `tools` and `variables` go to the template beside the messages."""

    messages: tuple[dict[str, Any], ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class TextPrompts:
    """One or several prompts, each text or token ids, answered side by side."""

    prompts: tuple[str | tuple[int, ...], ...]
    add_special_tokens: bool = True


@dataclass(frozen=True)
class ServeRequest:
    """`sampling.max_tokens` is 0 where the client named no limit. `n` choices are made for each prompt;
    choice index = prompt index * n + i. `logprobs` counts the best candidates shown beside each token, None
    for none; `prompt_logprobs` does so beside each token of the prompt. With `prompt_only` the answer is the echoed
    prompt alone. `call_id_prefix` begins the ids made for tool calls, `reasoning_fields` are the names under which a
    chat answer has its reasoning, `repeated` is what the answer says again of the request.
    """

    model: str
    prompt: ChatPrompt | TextPrompts
    sampling: SamplingParams
    n: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    echo: bool = False
    prompt_only: bool = False
    prompt_logprobs: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    cache_receipt: bool = False
    logits_digests: bool = False
    tools: ToolUse = field(default_factory=ToolUse)
    structure: Structure | None = None
    include_reasoning: bool = True
    reasoning_fields: tuple[str, ...] = ("reasoning", "reasoning_content")
    call_id_prefix: str = "call_"
    repeated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, ChatPrompt)

    @property
    def scored_best(self) -> int | None:
        """The number of candidates at each position of the prompt; None: its tokens are not scored."""
        echoed = self.sampling.logprobs if self.echo else None
        wanted = [k for k in (self.prompt_logprobs, echoed) if k is not None]
        return max(wanted, default=None)

    @property
    def prompt_field(self) -> str:
        """The field that an error about the prompt names."""
        return "messages" if self.is_chat else "prompt"


@dataclass(frozen=True)
class RenderedPrompt:
    """Token ids of one prompt; `message_end_tokens[i]` counts the tokens up to the end of message i. `text`
    is None where the client sent token ids. `thinking`: whether its end has begun the model's thinking, has closed
    it, or says nothing of it.
    """

    token_ids: tuple[int, ...]
    message_end_tokens: tuple[int, ...] = ()
    text: str | None = None
    thinking: PromptThinking = "unsaid"


@dataclass(frozen=True)
class Answer:
    """What is fixed about the answer to a request before its first token."""

    request: ServeRequest
    response_id: str
    created_s: int
    prompts: tuple[RenderedPrompt, ...]

    def prompt_of(self, index: int) -> RenderedPrompt:
        """The prompt that choice `index` continues."""
        return self.prompts[index // self.request.n]


@dataclass(frozen=True)
class ChoiceDelta:
    """What one choice gained: visible parts and the tokens behind them. The last one carries `finish_reason`,
    and `stop_reason` where a stop string or one of the request's stop ids ended it, and the cache receipt
    where one was asked for; the first one carries what was asked of the prompt's tokens. `usage` is the running
    count. `logits_digests` is one for each token, where asked.
    """

    index: int
    parts: tuple[Part, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    usage: Usage
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    times: RequestTimes | None = None
    logits_digests: tuple[str, ...] = ()
    receipt: Mapping[str, Any] | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def text(self) -> str:
        """The visible text, without reasoning and calls."""
        return "".join(part.text for part in self.parts if isinstance(part, Content))


def total_usage(usages: list[Usage], n: int) -> Usage:
    """Usage of a whole answer: completions summed over its choices, each prompt counted once however many
    choices it has. `usages` lie in order of choice index."""
    firsts = usages[::n]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in firsts),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )
