"""Are keys, Host and Origin checked on every route, before anything else happens?

The application itself on a real socket, with no model behind it: what passes the guard gets a 503.
"""

import json
from collections.abc import Iterator

import pytest

from tests.runtime.http_application import PAGE, running
from tests.runtime.http_client import Client

CHAT = "/v1/chat/completions"
JSON_TYPE = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def keyed() -> Iterator[Client]:
    with running(keys=("first-key", "second-key"), admin_keys=("admin-key",)) as client:
        yield client


@pytest.fixture(scope="module")
def keyless() -> Iterator[Client]:
    with running() as client:
        yield client


def code_of(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str | None]:
    return answer[0], json.loads(answer[2])["error"]["code"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        *[("GET", p) for p in ("/v1/models", "/v1/models/tiny", "/version", "/metrics")],
    ],
)
def test_every_route_but_health_needs_a_key(keyed: Client, method: str, path: str) -> None:
    body = b"{}" if method == "POST" else None
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "first-key"},
        {"x-api-key": "f"},
    ):
        answer = keyed.request(method, path, body, {**JSON_TYPE, **headers})
        assert code_of(answer) == (401, "invalid_api_key")
        assert answer[1]["www-authenticate"] == "Bearer"
    for headers in (
        {"Authorization": "Bearer first-key"},
        {"Authorization": "bearer second-key"},
        {"x-api-key": "first-key"},
    ):
        assert keyed.request(method, path, body, {**JSON_TYPE, **headers})[0] != 401


def test_health_and_ready_are_open(keyed: Client) -> None:
    assert keyed.request("GET", "/health")[0] == 200
    assert keyed.request("GET", "/ping")[0] == 200
    answer = keyed.request("GET", "/ready")
    assert code_of(answer) == (503, "unavailable") and answer[1]["retry-after"]


def test_the_metrics_key_opens_metrics_alone(keyed: Client) -> None:
    headers = {"Authorization": "Bearer metrics-key"}
    assert keyed.request("GET", "/metrics", headers=headers)[0] == 200
    assert keyed.request("GET", "/v1/models", headers=headers)[0] == 401


ADMIN_ROUTES = [
    *(
        ("POST", path)
        for path in ("/admin/cache/flush", "/flush_cache", "/reset_prefix_cache", "/admin/cache")
    ),
    ("GET", "/admin/cache"),
]


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_admin_routes_take_the_admin_key_alone(
    keyed: Client, keyless: Client, method: str, path: str
) -> None:
    body = b"{}" if method == "POST" else None
    for key in ("first-key", "metrics-key", "", "wrong"):
        answer = keyed.request(method, path, body, {**JSON_TYPE, "Authorization": f"Bearer {key}"})
        assert code_of(answer) == (401, "invalid_api_key")
    answer = keyed.request(method, path, body, {**JSON_TYPE, "Authorization": "Bearer admin-key"})
    assert code_of(answer) == (503, "unavailable")  # let in, but there is no model here
    assert code_of(keyless.request(method, path, body)) == (404, "not_found")


def test_the_admin_key_opens_nothing_else(keyed: Client) -> None:
    headers = {**JSON_TYPE, "Authorization": "Bearer admin-key"}
    assert keyed.request("GET", "/v1/models", headers=headers)[0] == 401
    assert keyed.request("POST", CHAT, b"{}", headers)[0] == 401
    assert keyed.request("GET", "/metrics", headers=headers)[0] == 401


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1/../v1/models", "/%2Fv1/models", "/v1%2Fmodels", "/V1/models", "/v1/models/"]
)
@pytest.mark.parametrize("host", ["localhost", "foo?", "foo#", "a/health?x=", "localhost/health"])
def test_no_spelling_of_a_path_or_host_goes_around_the_key(keyed: Client, path: str, host: str) -> None:
    """Case C06."""
    assert keyed.request("GET", path, headers={"Host": host})[0] in (400, 401, 403, 404)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:99", 200),
        ("[::1]:8000", 200),
        ("LOCALHOST", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1@evil.example", 403),
    ],
)
def test_on_loopback_only_loopback_names_are_hosts(keyless: Client, host: str, status: int) -> None:
    """Case C12."""
    assert keyless.request("GET", "/health", headers={"Host": host})[0] == status


def test_hosts_can_be_allowed_and_elsewhere_all_are() -> None:
    with running(allowed_hosts=("proxy.example",)) as client:
        assert client.request("GET", "/health", headers={"Host": "Proxy.Example:443"})[0] == 200
    with running(host="0.0.0.0") as client:
        assert client.request("GET", "/health", headers={"Host": "any.example"})[0] == 200


def test_pages_of_other_origins_are_refused(keyless: Client) -> None:
    assert keyless.request("GET", "/v1/models", headers={"Origin": "https://evil.example"})[0] == 403
    own = keyless.url
    assert keyless.request("GET", "/v1/models", headers={"Origin": own})[0] == 200
    _, headers, _ = keyless.request("GET", "/v1/models", headers={"Origin": PAGE})
    assert headers["access-control-allow-origin"] == PAGE and headers["vary"] == "Origin"


def test_preflight_needs_no_key_and_names_the_headers(keyed: Client) -> None:
    """Case A035."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    status, headers, _ = keyed.request("OPTIONS", CHAT, headers={"Origin": PAGE, **asked})
    assert (status, headers["access-control-allow-origin"], headers["vary"]) == (204, PAGE, "Origin")
    allowed = headers["access-control-allow-headers"]
    assert all(name in allowed for name in ("authorization", "content-type", "x-api-key", "x-stainless-os"))
    status, headers, _ = keyed.request("OPTIONS", CHAT, headers={"Origin": "https://evil.example", **asked})
    assert status == 403 and "access-control-allow-origin" not in headers


def test_before_the_model_is_there_requests_are_told_so(keyless: Client) -> None:
    answer = keyless.request("POST", CHAT, b"{}")
    assert code_of(answer) == (503, "unavailable") and answer[1]["retry-after"]


def test_heads_have_bounds(keyless: Client) -> None:
    """Case C14."""
    assert keyless.request("GET", "/health", headers={"x-large": "x" * 7_000})[0] == 200
    assert keyless.request("GET", "/health", headers={"x-large": "x" * 9_000})[0] == 400
    assert keyless.request("GET", "/health", headers={f"x-{i}": "x" for i in range(200)})[0] == 400
    assert keyless.request("GET", "/health?" + "x" * 9_000)[0] in (400, 414)


def test_every_answer_has_a_request_id(keyless: Client) -> None:
    for path in ("/health", "/nothing", "/v1/models"):
        assert len(keyless.request("GET", path)[1]["x-request-id"]) == 32
