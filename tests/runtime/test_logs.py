"""Does each request leave one line that can be found by its id, and never what was said?"""

import json
import logging

import pytest

from runtime.logs import JsonLines
from tests.runtime.http_client import Client
from tests.runtime.scripted_engine import ScriptedEngine

SECRET = "tell nobody"


def test_a_request_leaves_one_line_with_its_id_and_counts(
    scripted: tuple[Client, ScriptedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    server, engine = scripted
    engine.script = [SECRET]
    caplog.set_level(logging.INFO, "strata")
    sent = {"Content-Type": "application/json", "x-request-id": "id-1"}
    body = {"prompt": SECRET}
    assert server.request("POST", "/v1/completions", body, sent)[0] == 200
    assert (
        server.request("POST", "/v1/completions", {"prompt": 5}, {**sent, "x-request-id": "id-2"})[0] == 400
    )
    assert server.request("POST", "/v1/compl%0Aetions", body, {**sent, "x-request-id": "id-3"})[0] == 404
    assert server.request("GET", "/health")[0] == 200
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    told = [line for line in lines if line["message"].startswith("request request_id=")]
    assert [(line["request_id"], line["status"], line["path"]) for line in told] == [
        ("id-1", 200, "/v1/completions"),
        ("id-2", 400, "/v1/completions"),
        ("id-3", 404, "(no such path)"),
    ]
    assert (told[0]["prompt_tokens"], told[0]["completion_tokens"]) == (len(SECRET), len(SECRET) + 1)
    assert told[0]["took_s"] >= 0 and told[0]["level"] == "info" and told[0]["logger"] == "strata.http"
    assert SECRET not in caplog.text and "\n" not in told[2]["message"]


def test_an_exception_is_part_of_its_line() -> None:
    try:
        raise ValueError("a fault")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("strata", logging.ERROR, "", 0, "it %s", ("failed",), info)
    line = JsonLines().format(record)
    assert "\n" not in line and json.loads(line)["message"] == "it failed"
    assert "ValueError: a fault" in json.loads(line)["exception"]
