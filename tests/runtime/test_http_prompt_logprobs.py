"""Do clients get the log-probabilities of a prompt's tokens: echo with logprobs, and vLLM's prompt_logprobs?"""

from typing import Any

import pytest
from openai import OpenAI

from tests.runtime.http_client import Client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Once upon a time, größer than “life”, there was 🦊."
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6}


def complete(server: Client, **changes: Any) -> dict[str, Any]:
    status, answer = server.post(COMPLETIONS, {**GREEDY, **changes})
    assert status == 200, answer
    return answer


def test_echo_with_logprobs_scores_prompt_and_answer(server: Client) -> None:
    (plain,) = complete(server, logprobs=3)["choices"]
    answer = complete(server, logprobs=3, echo=True)
    (choice,) = answer["choices"]
    found, n_prompt = choice["logprobs"], answer["usage"]["prompt_tokens"]
    assert choice["text"] == PROMPT + plain["text"]
    assert {len(values) for values in found.values()} == {n_prompt + 6}
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for logprob, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
        assert len(top) == 3 and logprob <= max(top.values()) <= 0
    assert found["tokens"][n_prompt:] == plain["logprobs"]["tokens"]
    assert found["token_logprobs"][n_prompt:] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
    offsets = found["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[n_prompt] == len(PROMPT)
    ids = server.post("/tokenize", {"prompt": PROMPT})[1]["tokens"]
    for i, start in enumerate(offsets[:n_prompt]):
        assert server.post("/detokenize", {"tokens": ids[:i]})[1]["prompt"].rstrip("�") == PROMPT[:start]


def test_the_prompt_alone_is_what_an_evaluation_asks_for(server: Client, openai_client: OpenAI) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "echo": True, "logprobs": 1}
    alone = openai_client.completions.create(**asked, max_tokens=0)
    with_token = openai_client.completions.create(**asked, max_tokens=1)
    assert alone.choices[0].text == PROMPT and alone.choices[0].finish_reason == "length"
    assert alone.usage.completion_tokens == 0 and alone.usage.total_tokens == alone.usage.prompt_tokens
    logprobs = with_token.choices[0].logprobs
    assert alone.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:-1]
    # The log-probability of a continuation, as lm-eval sums it, does not depend on what follows it.
    start = openai_client.completions.create(**{**asked, "prompt": PROMPT[:20]}, max_tokens=0)
    n_start = len(start.choices[0].logprobs.tokens) - 1
    assert start.choices[0].logprobs.token_logprobs[1:n_start] == pytest.approx(
        logprobs.token_logprobs[1:n_start], abs=1e-4
    )
    assert complete(server, echo=True, max_tokens=0)["choices"][0]["text"] == PROMPT


def test_streamed_echo_has_the_same_text_and_logprobs(server: Client) -> None:
    changes = {"logprobs": 20, "echo": True, "prompt": [PROMPT * 3, list(range(1, 90))], "n": 2}
    whole = complete(server, **changes, seed=1)["choices"]
    joined = [{"text": "", "logprobs": {name: [] for name in whole[0]["logprobs"]}} for _ in whole]
    for chunk in server.events(COMPLETIONS, {**GREEDY, **changes, "seed": 1}):
        for choice in chunk["choices"]:
            one = joined[choice["index"]]
            one["text"] += choice["text"]
            for name, values in (choice.get("logprobs") or {}).items():
                one["logprobs"][name] += values
    for one, expected in zip(joined, whole, strict=True):
        assert one == {"text": expected["text"], "logprobs": expected["logprobs"]}


def test_prompt_logprobs_has_vllms_form(server: Client) -> None:
    ids = list(range(7, 107))
    (choice,) = complete(server, prompt=ids, prompt_logprobs=2, max_tokens=1)["choices"]
    found = choice["prompt_logprobs"]
    (echoed,) = complete(server, prompt=ids, echo=True, logprobs=2, max_tokens=1)["choices"]
    assert choice["logprobs"] is None and found[0] is None and len(found) == len(ids)
    for i in range(1, len(ids)):
        own = found[i][str(ids[i])]
        assert own["logprob"] == echoed["logprobs"]["token_logprobs"][i]
        ranks = sorted(entry["rank"] for entry in found[i].values())
        assert ranks[:2] == [1, 2] and len(ranks) == (2 if own["rank"] <= 2 else 3)
        best = max(found[i].values(), key=lambda entry: entry["logprob"])
        assert best["rank"] == 1

    messages = [{"role": "user", "content": "Hello <|im_end|> there"}]
    status, chat = server.post(
        CHAT, {"messages": messages, "prompt_logprobs": 0, "n": 2, "max_tokens": 2, "cache_receipt": True}
    )
    assert status == 200
    tokens = server.post("/tokenize", {"messages": messages})[1]["tokens"]
    scored = chat["prompt_logprobs"]
    assert [next(iter(entry)) for entry in scored[1:]] == [str(token_id) for token_id in tokens[1:]]
    assert all(len(entry) == 1 for entry in scored[1:])
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert chat["choices"][0]["cache_receipt"]["credited_tokens"] == 0


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ],
)
def test_what_cannot_be_is_refused(server: Client, changes: dict[str, Any], param: str) -> None:
    status, answer = server.post(COMPLETIONS, {**GREEDY, **changes})
    assert (status, answer["error"]["param"]) == (400, param)
