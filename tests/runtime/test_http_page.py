"""Is the page there, by itself and harmless, and does it get to know what it shows?"""

import json
import re

import pytest

from runtime.http_page import FOLDER
from tests.runtime.http_application import running
from tests.runtime.http_client import Client

FILES = sorted(path.name for path in FOLDER.iterdir())


def test_the_page_and_its_files_need_no_key_and_nothing_from_elsewhere() -> None:
    with running(keys=("secret",)) as client:
        status, headers, body = client.request("GET", "/", headers={})
        assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
        assert headers["content-security-policy"] == "default-src 'self'; frame-ancestors 'none'"
        for name in FILES:
            status, headers, text = client.request("GET", f"/ui/{name}", headers={})
            assert status == 200 and headers["x-content-type-options"] == "nosniff"
            assert text == (FOLDER / name).read_bytes()
            links = set(re.findall(rb"https?://[^\"' )]+", text))
            assert links <= {b"http://www.w3.org/2000/svg"}
        for name in re.findall(r'(?:src|href)="(/ui/[^"]+)"', body.decode()):
            assert name.removeprefix("/ui/") in FILES
        assert client.request("GET", "/ui/../metrics.py", headers={})[0] == 404


def test_what_it_asks_for_needs_the_key() -> None:
    with running(keys=("secret",)) as client:
        assert client.request("GET", "/ui/state", headers={})[0] == 401
        assert client.request("GET", "/ui/state", headers={"Authorization": "Bearer metrics-key"})[0] == 401
        status, _, _ = client.request("GET", "/ui/state", headers={"Authorization": "Bearer secret"})
        assert status == 503  # there is no model here


def test_without_the_page_there_is_nothing_at_its_place() -> None:
    with running(show_page=False) as client:
        for path in ("/", "/ui/page.js", "/ui/state"):
            assert client.request("GET", path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1:80@evil.example"])
def test_the_page_is_behind_the_host_rule_too(host: str) -> None:
    with running() as client:
        assert client.request("GET", "/", headers={"Host": host})[0] == 403


def test_the_tree_says_where_each_part_lies(server: Client) -> None:
    stem = [7 + n % 50 for n in range(128)]
    for end in (11, 12):
        prompt = [*stem, *[end] * 100]
        assert (
            server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "cache_salt": "tree"})[0]
            == 200
        )
    status, _, answer = server.request("GET", "/ui/state")
    state = json.loads(answer)
    assert status == 200 and state["tree_is_whole"] and isinstance(state["evictions"], list)
    branches = {branch["id"]: branch for branch in state["tree"]}
    forks = [
        branch
        for branch in branches.values()
        if (branch["start_tokens"], branch["end_tokens"]) == (0, 128)
        and sum(b["parent"] == branch["id"] for b in branches.values()) == 2
    ]
    assert forks
    children = [branch for branch in branches.values() if branch["parent"] == forks[-1]["id"]]
    for branch in children:
        assert (branch["start_tokens"], branch["end_tokens"]) == (128, 192)
        assert branch["tokens_in"]["device"] == 64 and branch["last_use_ago_s"] >= 0
        assert {"end_tokens": 192, "in": ["device"]} in branch["rows"]


def test_where_keys_are_isolated_nobody_sees_the_tree() -> None:
    key = {"Authorization": "Bearer secret"}
    with running(keys=("secret",), isolate_keys=True) as client:
        status, _, answer = client.request("GET", "/ui/state", headers=key)
    assert status == 200 and json.loads(answer) == {"tree": None, "tree_is_whole": False, "evictions": None}
