"""Access control of every route: without a key, with a wrong one, with malformed hosts, paths and methods."""

import asyncio
import base64
import dataclasses
import hmac
import re
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from mercury_jax.serve import auth
from mercury_jax.serve.app import GET_ROUTES, POST_ROUTES, PUBLIC_ROUTES, STORE_ROUTES, create_app
from mercury_jax.serve.auth import AuthMiddleware, RateLimiter, digest
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.options import ServerOptions
from tests.serve.asgi_client import send_request
from tests.serve.scripted_engine import ScriptedEngine
from tests.tiny import tiny

KEYS = ("first-key-123", "second-key-456")
SECRET = "nano-the-secret"  # the model's name: what no answer without a key may hold


def model():
    return dataclasses.replace(tiny(), name=SECRET)


def app_of(**options):
    return create_app(ScriptedEngine(model()), ServerOptions(playground=False, **options))


@pytest.fixture(scope="module")
def locked():
    return TestClient(app_of(keys=KEYS), base_url="http://localhost")


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def routes_of(app):
    """Returns the paths of the public and of the protected routes."""
    return [r.path for r in app.router.routes], [r.path for r in app.router.default.app.routes]


ROUTES = [path for paths in routes_of(app_of()) for path in paths]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
CROOKED = (
    "/{0}", "//{0}", "/./{0}", "/x/../{0}", "/health/../{0}", "/%2e%2e/{0}", "/{0}/", "/{0}%00", "/{0}?x=/health",
    "/%2f{0}", "/health/{0}", "/health%2f..%2f{0}", "/health;/{0}", "/health%00/{0}", "/ready/{0}", "@localhost/{0}",
    "http://localhost/health/{0}", "", "/health/", "//health", "/Health",
)  # fmt: skip


def test_the_app_has_the_listed_routes():
    protected = [*GET_ROUTES, *POST_ROUTES, *STORE_ROUTES]
    assert routes_of(app_of()) == ([*PUBLIC_ROUTES], protected)
    assert set(PUBLIC_ROUTES) == {"/health", "/ready"}


def authorization(value):
    return [(b"authorization", value.encode("latin-1"))]


# Headers that hold no valid key.
WRONG = (
    [],
    *(
        authorization(f"Bearer {key}")
        for key in ("first-key-12", "first-key-1234", "é", f"{KEYS[0]},{KEYS[1]}")
    ),
    *(authorization(value) for value in ("Bearer", KEYS[0], "Basic !", "Basic Zm9v")),
    [(b"x-api-key", KEYS[0].encode()), *authorization("Bearer x")],
    [(b"x-api-key", KEYS[0].encode()), (b"x-api-key", KEYS[0].encode())],
    [*authorization(f"Bearer {KEYS[0]}"), *authorization("Bearer x")],
)


@pytest.mark.parametrize(
    "path", [p for p in ROUTES if p not in PUBLIC_ROUTES] + ["/", "/nothing", "/v1/invocations", "/docs"]
)
def test_without_a_key_only_health_and_readiness_answer(path):
    """Also paths that do not exist, with every method and with malformed spellings of the path."""
    app = app_of(keys=KEYS)
    path = path.replace("{id:path}", SECRET).replace("{id}", SECRET)
    for method in METHODS:
        for headers in WRONG:
            answer = send_request(app, method, path, headers)
            assert answer.status == 401 and SECRET.encode() not in answer.body, (method, headers)
            error = answer.json["error"]  # of the Messages API: the code is in the details
            assert error.get("details", {"error_code": error.get("code")})["error_code"] == "invalid_api_key"
            # A request without a key is told how to send one.
            kind, _, key = dict(headers).get(b"authorization", b"").partition(b" ")
            wrong = (
                len(dict(headers)) == len(headers)
                and kind in (b"Bearer", b"Basic")
                and key not in (b"", b"!", b"Zm9v")
            )
            words = (
                "Incorrect API key provided" if wrong else "No API key found; .*`Authorization: Bearer KEY`"
            )
            assert re.search(words, answer.json["error"]["message"]), headers
    for shape in CROOKED:
        answer = send_request(app, "GET", shape.format(path.lstrip("/")))
        assert answer.status == 401, shape


def test_a_key_may_come_in_the_header_of_anthropics_clients(locked):
    answer = lambda key: locked.get("/v1/models", headers={"x-api-key": key})
    assert answer(KEYS[1]).status_code == 200
    refused = answer("wrong")
    assert refused.status_code == 401 and "Incorrect API key" in refused.json()["error"]["message"]


ORIGIN = "http://localhost:3000"


def test_a_page_of_an_allowed_origin_may_ask_and_read(locked):
    """A browser asks by OPTIONS without the key; every answer, a refusal too, may be read by the page."""
    asked = {"origin": ORIGIN, "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    allowed = lambda answer: answer.headers.get("access-control-allow-origin")
    client = TestClient(app_of(keys=KEYS, origins=(ORIGIN,)), base_url="http://localhost")
    for path in ("/v1/chat/completions", "/v1/models", "/health"):
        answer = client.options(path, headers=asked)
        assert answer.status_code == 200 and allowed(answer) == ORIGIN
        assert {"authorization", "content-type"} <= set(
            answer.headers["access-control-allow-headers"].split(",")
        )
        assert {"GET", "POST"} <= set(answer.headers["access-control-allow-methods"].split(", "))
        assert allowed(client.options(path, headers={**asked, "origin": "http://evil.example"})) is None
    for headers, status in (({}, 401), (bearer(KEYS[0]), 200)):
        answer = client.get("/v1/models", headers={"origin": ORIGIN, **headers})
        assert answer.status_code == status and allowed(answer) == ORIGIN
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert client.options("/v1/models").status_code == 401  # no browser asks like this
    assert allowed(client.get("/health", headers={"origin": "http://evil.example"})) is None
    anyone = TestClient(app_of(origins=("*",)), base_url="http://localhost")
    assert allowed(anyone.get("/v1/models", headers={"origin": "http://a.example"})) == "*"
    assert locked.options("/v1/models", headers=asked).status_code == 401
    for wrong in ("localhost:3000", "http://a/", "a", ""):
        with pytest.raises(ValueError, match=r"origin is .*allowed: scheme://host"):
            ServerOptions(origins=(wrong,))


def test_a_target_in_absolute_form_names_its_host():
    """RFC 9112, section 3.2.2: the host of the target counts, not the header."""
    app = app_of(keys=KEYS)
    key = authorization(f"Bearer {KEYS[0]}")
    for target in (
        "http://localhost/v1/models",
        "HTTP://localhost:8000/v1/models?a=http://b",
        "https://localhost/v1/models",
    ):
        for host in (b"localhost", b"evil.example", None):
            assert send_request(app, "GET", target, key, host=host).status == 200
        assert send_request(app, "GET", target).status == 401
    assert send_request(app, "GET", "http://localhost/health").status == 200
    assert send_request(app, "GET", "http://localhost").status == 401
    assert send_request(app, "GET", "http://evil.example/v1/models", key).status == 403
    assert send_request(app, "GET", "http://a@localhost/v1/models", key).status == 400


def test_the_playground_needs_a_key(nano):
    app = create_app(ScriptedEngine(nano), ServerOptions(keys=KEYS))
    _, guarded = routes_of(app)
    assert {"/", "/playground/info", "/playground/stream", "/playground/top"} <= set(guarded)
    for path in (*guarded, "/playground/static/main.js", "/playground/static/../app.py"):
        for method in METHODS:
            assert send_request(app, method, path, WRONG[1]).status == 401
    assert send_request(app, "GET", "/", authorization(f"Bearer {KEYS[0]}")).status == 200


@pytest.mark.parametrize("path", ["/", "/health", "/v1/chat/completions", "/playground/stream"])
def test_a_websocket_is_closed(path):
    """The server has no websockets; they are closed with and without a key."""
    seen, sent = [], []

    async def inner(scope, receive, send):
        seen.append(scope)

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
             "headers": [(b"host", b"localhost"), *authorization(f"Bearer {KEYS[0]}")], "subprotocols": []}  # fmt: skip
    asyncio.run(AuthMiddleware(inner, ServerOptions(keys=KEYS))(scope, None, send))
    assert seen == [] and [message["type"] for message in sent] == ["websocket.close"]
    sent.clear()
    asyncio.run(app_of(keys=KEYS)({**scope, "headers": []}, None, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


POISON = (
    "localhost/health", "localhost/health?", "localhost#/health", "a@localhost", "@localhost", "localhost:80@evil",
    "localhost:", "localhost:99999999", "localhost\\x", "local host", "[::1", "::1", "localhost,evil", "", "/",
    "%6cocalhost", "localhost:8000:8000", "..", "-", "localhost\t", "é",
)  # fmt: skip


@pytest.mark.parametrize("host", POISON)
def test_a_malformed_host_is_refused_with_and_without_a_key(host):
    for app in (app_of(), app_of(keys=KEYS, hosts=("*",))):
        for headers in ([], authorization(f"Bearer {KEYS[0]}")):
            answer = send_request(app, "GET", "/v1/models", headers, host=host.encode("latin-1"))
            assert answer.status == 400 and SECRET.encode() not in answer.body
    for hosts in (None, b"localhost"):
        twice = [] if hosts is None else [(b"host", b"localhost")]
        assert send_request(app_of(), "GET", "/v1/models", twice, host=hosts).status == 400


def test_an_unknown_host_is_refused():
    plain = TestClient(app_of(), base_url="http://localhost")
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "localhost."):
        assert plain.get("/v1/models", headers={"host": host}).status_code == 200
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1:8000"):
        answer = plain.get("/v1/models", headers={"host": host})
        assert answer.status_code == 403 and SECRET not in answer.text
    named = TestClient(app_of(hosts=("gpu.example",)), base_url="http://gpu.example")
    assert named.get("/v1/models").status_code == 200
    assert named.get("/v1/models", headers={"host": "localhost"}).status_code == 403
    anyone = TestClient(app_of(hosts=("*",)), base_url="http://whatever.example")
    assert anyone.get("/v1/models").status_code == 200


def test_every_key_is_accepted_as_bearer_token_or_password(locked):
    for key in KEYS:
        assert locked.get("/v1/models", headers=bearer(key)).status_code == 200
        word = base64.b64encode(f"anyone:{key}".encode()).decode()
        assert locked.get("/v1/models", headers={"authorization": f"Basic {word}"}).status_code == 200
    asked = locked.get("/", headers={"accept": "text/html"}).headers["www-authenticate"]
    assert asked.startswith("Basic") and locked.get("/").headers["www-authenticate"].startswith("Bearer")


def test_health_and_readiness_need_no_key_and_reveal_nothing(locked):
    for path in PUBLIC_ROUTES:
        answer = locked.get(path, headers={"host": "10.0.0.7:8000"})  # as a probe of a cluster payloads
        assert answer.status_code == 200 and set(answer.json()) == {"status"}


def test_all_keys_are_compared_in_constant_time(monkeypatch):
    """All keys are compared, also after one has matched, and only by `hmac.compare_digest`."""
    seen = []

    def compare(a, b):
        seen.append((a, b))
        return hmac.compare_digest(a, b)

    middleware = AuthMiddleware(app_of(), ServerOptions(keys=KEYS))
    monkeypatch.setattr(auth, "hmac", SimpleNamespace(compare_digest=compare))
    for key in (*KEYS, "wrong"):
        seen.clear()
        headers = [(b"authorization", f"Bearer {key}".encode())]
        if key == "wrong":
            with pytest.raises(ApiError):
                middleware.authenticate(headers)
        else:
            assert middleware.authenticate(headers) == digest(key).hex()
        assert [b for _, b in seen] == [digest(k) for k in KEYS]
        assert all(isinstance(a, bytes) and len(a) == 32 for a, _ in seen)


def test_no_response_allows_another_origin(locked):
    """No CORS: a page of another origin can neither read a response nor pass a preflight."""
    foreign = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for method in ("GET", "OPTIONS", "POST"):
        for headers in (foreign, {**foreign, **bearer(KEYS[0])}):
            answer = locked.request(method, "/v1/models", headers=headers)
            assert not [name for name in answer.headers if name.startswith("access-control")]
    answer = locked.options("/v1/chat/completions", headers={**foreign, **bearer(KEYS[0])})
    assert answer.status_code == 405


def test_the_rate_limit_counts_each_key_separately():
    now = [0.0]
    rate = RateLimiter(60, lambda: now[0])
    for _ in range(60):
        rate.take("a")
    with pytest.raises(ApiError) as error:
        rate.take("a")
    assert error.value.status == 429 and error.value.headers["retry-after"] == "1"
    rate.take("b")
    now[0] += 1.01
    rate.take("a")
    with pytest.raises(ApiError):
        rate.take("a")


def test_the_rate_limit_counts_authenticated_requests_only(locked):
    client = TestClient(app_of(keys=KEYS, rate=2), base_url="http://localhost")
    for _ in range(5):
        assert client.post("/v1/chat/completions", headers=bearer("wrong-key")).status_code == 401
    codes = [client.post("/v1/chat/completions", headers=bearer(KEYS[0])).status_code for _ in range(4)]
    assert codes == [415, 415, 429, 429]
    assert client.get("/v1/models", headers=bearer(KEYS[0])).status_code == 200


@pytest.mark.parametrize("key", ["", "short", "with space", "tab\tkey--", "schlüssel"])
def test_a_weak_or_unprintable_key_is_refused_at_startup(key):
    with pytest.raises(ValueError, match="API key") as error:
        ServerOptions(keys=(key,))
    assert not key or key not in str(error.value)


def test_aliases_stand_for_the_loaded_model():
    client = TestClient(app_of(aliases={"mercury-2": SECRET}), base_url="http://localhost")
    names = [m["id"] for m in client.get("/v1/models").json()["data"]]
    assert names == [SECRET, "mercury-2"]
    assert client.get("/v1/models/mercury-2").json()["id"] == "mercury-2"
    assert client.get("/v1/models/mercury-9/x").json()["error"]["code"] == "model_not_found"
    with pytest.raises(ValueError, match="gpt"):
        app_of(aliases={"gpt": "another"})
