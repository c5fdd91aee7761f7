"""Does the official OpenAI client get what it expects, streaming and not?"""

import json
import random
import threading
from typing import Any

import pytest
from openai import OpenAI

from tests.runtime.http_client import Client

MESSAGES: list[Any] = [{"role": "user", "content": "Hello there"}]
CHAT = "/v1/chat/completions"
# Tiny random models must not end by chance where a test counts tokens.
EXACT = {"ignore_eos": True}


def ask(openai_client: OpenAI, **fields: Any) -> Any:
    extra = {**EXACT, **fields.pop("extra_body", {})}
    defaults = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    return openai_client.chat.completions.create(**{**defaults, **fields}, extra_body=extra)


def test_models_are_listed_with_their_length(openai_client: OpenAI) -> None:
    models = openai_client.models.list().data
    assert [model.id for model in models] == ["tiny", "org/alias"]
    assert models[0].max_model_len == 512  # type: ignore[attr-defined]
    assert openai_client.models.retrieve("org/alias").id == "org/alias"


def test_a_stream_joins_to_the_whole_answer(openai_client: OpenAI) -> None:
    whole = ask(openai_client, extra_body={"return_token_ids": True})
    chunks = list(
        ask(
            openai_client,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    ids = [i for c in chunks[:-1] for i in getattr(c.choices[0], "token_ids", None) or ()]
    assert ids == whole.choices[0].token_ids and len(ids) == 12
    assert chunks[0].choices[0].prompt_token_ids == whole.choices[0].prompt_token_ids
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.role for c in chunks[1:-1]] == [None] * (len(chunks) - 2)
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert {(c.id, c.created, c.model) for c in chunks} == {(chunks[0].id, chunks[0].created, "tiny")}


def test_usage_adds_up(openai_client: OpenAI) -> None:
    answer = ask(openai_client, extra_body={"return_token_ids": True})
    usage = answer.usage
    assert usage.prompt_tokens == len(answer.choices[0].prompt_token_ids)
    assert usage.completion_tokens == len(answer.choices[0].token_ids) == 12
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert usage.completion_tokens_details.reasoning_tokens == 0


def test_usage_in_streams_comes_only_when_asked_for(server: Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, **EXACT}
    assert all("usage" not in chunk for chunk in server.events(CHAT, {**body, "stream_options": {}}))
    chunks = server.events(CHAT, {**body, "stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    options = {"include_usage": True, "continuous_usage_stats": True, "other": 1}
    chunks = server.events(CHAT, {**body, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and set(counts) == {0, 1, 2, 3}


def test_choices_are_seeded_apart_and_the_first_equals_n_1(openai_client: OpenAI) -> None:
    sampled = {"temperature": 1.0, "seed": 7, "max_tokens": 16}
    one = ask(openai_client, **sampled)
    three = ask(openai_client, n=3, **sampled)
    again = ask(openai_client, n=3, **sampled)
    texts = [choice.message.content for choice in three.choices]
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) == 3 and texts == [choice.message.content for choice in again.choices]
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == 48


def test_the_seed_that_was_drawn_gives_the_same_answer_again(server: Client) -> None:
    """Whole or streamed, an answer tells its seed; a negative one comes back as it was sent."""
    body = {"messages": MESSAGES, "max_tokens": 16, "temperature": 1.0}
    status, headers, answer = server.request("POST", CHAT, body)
    again_status, again_headers, again = server.request(
        "POST", CHAT, {**body, "seed": int(headers["x-seed"])}
    )
    assert (status, again_status) == (200, 200) and again_headers["x-seed"] == headers["x-seed"]
    texts = [json.loads(raw)["choices"][0]["message"]["content"] for raw in (answer, again)]
    assert texts[0] == texts[1]
    _, other, _ = server.request("POST", CHAT, {**body, "stream": True})
    assert 0 <= int(other["x-seed"]) < 2**63 and other["x-seed"] != headers["x-seed"]
    assert server.request("POST", CHAT, {**body, "seed": -3})[1]["x-seed"] == "-3"


def test_choices_interleave_in_a_stream_each_ending_once(server: Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, "temperature": 1, "n": 2, **EXACT}
    chunks = server.events(CHAT, body)
    for index in (0, 1):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]


def test_a_stop_string_ends_both_modes_alike(openai_client: OpenAI, server: Client) -> None:
    free = ask(openai_client).choices[0].message.content
    stop = free[4:6]
    expected = free[: free.index(stop)]
    whole = ask(openai_client, stop=[stop, "never there"], extra_body={"return_token_ids": True})
    choice = whole.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == (expected, "stop", stop)
    assert whole.usage.completion_tokens == len(choice.token_ids) < 12
    chunks = list(ask(openai_client, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert (chunks[-1].choices[0].finish_reason, chunks[-1].choices[0].stop_reason) == ("stop", stop)
    shown = ask(openai_client, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert shown.choices[0].message.content == expected + stop


def test_a_stop_token_counts_and_is_not_shown(openai_client: OpenAI) -> None:
    free = ask(openai_client, extra_body={"return_token_ids": True})
    stop_id = free.choices[0].token_ids[6]
    end = free.choices[0].token_ids.index(stop_id) + 1
    stopped = ask(openai_client, extra_body={"return_token_ids": True, "stop_token_ids": [stop_id]})
    assert stopped.choices[0].token_ids == free.choices[0].token_ids[:end]
    assert stopped.usage.completion_tokens == end
    assert (stopped.choices[0].finish_reason, stopped.choices[0].stop_reason) == ("stop", stop_id)
    assert free.choices[0].message.content.startswith(stopped.choices[0].message.content)


def test_logprobs_are_finite_and_sorted(openai_client: OpenAI) -> None:
    answer = ask(openai_client, logprobs=True, top_logprobs=3, max_tokens=4)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 4
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        # Greedy: the token is the best one.
        assert entry.logprob == tops[0] <= 0 and entry.bytes == entry.top_logprobs[0].bytes
    alone = ask(openai_client, logprobs=True, max_tokens=2)
    assert [entry.top_logprobs for entry in alone.choices[0].logprobs.content] == [[], []]


def test_logit_bias_decides_the_token(openai_client: OpenAI) -> None:
    answer = ask(openai_client, logit_bias={"65": 100}, max_tokens=3, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == [65, 65, 65]


def test_completions_take_text_and_ids_and_lists(openai_client: OpenAI) -> None:
    def complete(prompt: Any, **fields: Any) -> Any:
        extra = {**EXACT, "return_token_ids": True}
        return openai_client.completions.create(
            model="tiny", prompt=prompt, max_tokens=4, temperature=0, extra_body=extra, **fields
        )

    text = complete("Once upon")
    ids = text.choices[0].prompt_token_ids
    assert text.choices[0].token_ids == complete(ids).choices[0].token_ids
    several = complete([ids, [1, 2, 3]], n=1)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].token_ids == text.choices[0].token_ids
    assert several.choices[1].prompt_token_ids == [1, 2, 3]
    assert several.usage.prompt_tokens == len(ids) + 3
    assert complete(["Once upon", "x"]).choices[0].text == text.choices[0].text
    echoed = complete("Once upon", echo=True)
    assert echoed.choices[0].text == "Once upon" + text.choices[0].text


def test_completion_logprobs_have_offsets_into_the_text(openai_client: OpenAI) -> None:
    answer = openai_client.completions.create(
        model="tiny", prompt="abc", max_tokens=5, temperature=0, logprobs=2, extra_body=EXACT
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.text_offset is not None
    assert len(logprobs.tokens or ()) == len(logprobs.token_logprobs or ()) == len(logprobs.text_offset) == 5
    assert all(len(top) == 2 for top in logprobs.top_logprobs or ())
    assert logprobs.text_offset == sorted(logprobs.text_offset) and logprobs.text_offset[0] == 0


@pytest.mark.parametrize("seed", range(16))
def test_random_requests_give_the_same_streamed_and_whole(server: Client, seed: int) -> None:
    rng = random.Random(seed)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "".join(rng.choices("abc <|é漢\n", k=rng.randint(0, 40)))}],
        "max_tokens": rng.randint(1, 40),
        "temperature": rng.choice([0, 0.7, 1.5]),
        "seed": rng.randint(-5, 5),
        "top_k": rng.choice([-1, 3, 50]),
        "top_p": rng.choice([0.5, 1]),
        "stop": rng.choice([None, "e", ["a", "in"], list("etaoin"), "\n"]),
        "include_stop_str_in_output": rng.random() < 0.3,
        "min_tokens": rng.choice([0, 1]),
        "n": rng.choice([1, 1, 3]),
        "frequency_penalty": rng.choice([0, 1.5]),
        "logprobs": rng.random() < 0.3,
        "return_token_ids": True,
    }
    status, whole = server.post(CHAT, body)
    assert status == 200, whole
    chunks = server.events(CHAT, {**body, "stream_options": {"include_usage": True}})
    cached = [answer["usage"].pop("prompt_tokens_details")["cached_tokens"] for answer in (whole, chunks[-1])]
    assert cached[0] <= cached[1] < whole["usage"]["prompt_tokens"]  # the second time more is known
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert [i for c in own for i in c.get("token_ids", ())] == choice["token_ids"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["stop_reason"] == choice["stop_reason"]
        streamed = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert streamed == (choice["logprobs"] or {"content": []})["content"]
    assert whole["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole["choices"])


def test_a_completion_stream_joins_to_the_whole(server: Client, openai_client: OpenAI) -> None:
    body = {"prompt": "Once", "max_tokens": 6, "temperature": 0, "echo": True, **EXACT}
    status, whole = server.post("/v1/completions", body)
    assert status == 200
    chunks = server.events("/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


def test_many_requests_at_once_give_the_tokens_they_give_alone(server: Client) -> None:
    prompts = [[i, i + 1, i + 2, 7] for i in range(1, 13)]

    def tokens(prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **EXACT}
        return server.post("/v1/completions", body)[1]["choices"][0]["token_ids"]

    alone = [tokens(prompt) for prompt in prompts]
    together: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda i=i: together.update({i: tokens(prompts[i])}))
        for i in range(len(prompts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(len(prompts))] == alone


def test_history_is_normalised(server: Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"value": '}}
    messages = [
        {"role": "developer", "content": "A"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "system", "content": "B"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "r"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "z"}]},
        {"role": "assistant", "content": "w", "tool_calls": []},
        {"role": "user", "content": "v"},
    ]
    before = server.metrics()["strata_malformed_history_arguments_total"]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    status, answer = server.post(CHAT, body)
    assert status == 200
    assert server.metrics()["strata_malformed_history_arguments_total"] == before + 1
    plain = [{"role": "system", "content": "A\n\nB"}, *messages[1:2], *messages[3:]]
    same = server.post(CHAT, {**body, "messages": plain})[1]
    assert answer["choices"][0]["prompt_token_ids"] == same["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "stop": None},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"stream_options": {"include_usage": True}, "store": True, "metadata": {"a": "b"}, "user": "u"},
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none", "top_k": -1},
        {"max_completion_tokens": 1, "max_tokens": 100_000, "temperature": None, "functions": None},
    ],
)
def test_what_clients_send_beside_is_accepted(server: Client, fields: dict[str, Any]) -> None:
    status, answer = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, **fields})
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 1


def test_request_ids_are_echoed_or_made(server: Client) -> None:
    json_type = {"Content-Type": "application/json"}
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
    _, headers, _ = server.request("POST", CHAT, body, {**json_type, "x-request-id": "mine-1"})
    assert headers["x-request-id"] == "mine-1"
    _, headers, _ = server.request("POST", CHAT, body, {**json_type, "x-request-id": "x" * 129})
    assert len(headers["x-request-id"]) == 32


def test_nothing_is_compiled_after_ready(server: Client) -> None:
    assert server.post(CHAT, {"messages": MESSAGES, "max_tokens": 2})[0] == 200
    assert server.metrics()["strata_compiles_after_ready_total"] == 0
