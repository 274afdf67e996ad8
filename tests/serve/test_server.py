"""The server on real sockets: malformed requests, addresses, signals and draining; and its command line."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mercury_jax.cli import arguments as command_line, serve
from mercury_jax.serve import server
from mercury_jax.serve.app import create_app
from mercury_jax.serve.options import ServerOptions, check_address
from tests.serve.scripted_engine import ScriptedEngine, snapshot, text_snapshots

PAYLOAD = {"model": "nano", "messages": [{"role": "user", "content": "347+585="}]}
WORDS = "347+585 is 932, and so it was before."


class LiveServer:
    """A server in a thread, with a client."""

    def __init__(self, engines, drain=5.0, **options):
        self.engines = engines if isinstance(engines, list) else [engines]
        sock = server.listen("127.0.0.1", 0)
        self.port = sock.getsockname()[1]
        self.server = server.Server(
            create_app(engines, ServerOptions(playground=False, **options)), engines, drain
        )
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [sock]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def get(self, path):
        return self.request("GET", path)

    def request(self, method, path, data=None):
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        body = None if data is None else json.dumps(data)
        line.request(method, path, body, {"content-type": "application/json"} if body else {})
        answer = line.getresponse()
        return SimpleNamespace(
            status=answer.status, headers=dict(answer.headers), body=answer.read().decode()
        )

    def raw(self, data, wait=5.0):
        """Returns the response to raw bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as line:
            with contextlib.suppress(OSError):
                line.sendall(data)
            parts = []
            with contextlib.suppress(OSError):
                while part := line.recv(65536):
                    parts.append(part)
            return b"".join(parts)

    def stop(self):
        for engine in self.engines:
            engine.gate.set()
        self.server.should_exit = True
        self.thread.join(20)


@pytest.fixture
def live_server(nano):
    made = []

    def start(*args, **kwargs):
        made.append(LiveServer(*args, **kwargs))
        return made[-1]

    yield start
    for one in made:
        one.stop()


@pytest.mark.long
def test_headers_are_bounded_and_malformed_bytes_get_400(live_server, nano):
    one = live_server(ScriptedEngine(nano, text_snapshots(nano, "932")))
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    for bad in (
        head + b"X: " + b"a" * 40_000 + b"\r\n\r\n",
        head + b"".join(b"X-%d: 1\r\n" % i for i in range(4000)) + b"\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n\r\n\r\n garbage\r\n\r\n",
        head + b"Host: localhost\r\n\r\n", head + b"Content-Length: -5\r\n\r\n", head + b"Bad Name: x\r\n\r\n",
        head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", head + b"Transfer-Encoding: x\r\n\r\n",
    ):  # fmt: skip
        answer = one.raw(bad, wait=2.0)
        assert answer.startswith(b"HTTP/1.1 4"), (bad[:60], answer[:60])
        assert b'{"error":{"message":' in answer and b"server:" not in answer.lower()
    assert one.get("/v1/models").status == 200


def test_two_lengths_of_one_body_close_the_connection(live_server, nano):
    """Request smuggling: what follows the shorter body is not answered as a second request."""
    one = live_server(ScriptedEngine(nano, text_snapshots(nano, "932")))
    for path in ("/v1/chat/completions", "/health"):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
        lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        second = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        said = one.raw(head + lengths + b"0\r\n\r\n" + second, wait=2.0)
        assert said.startswith(b"HTTP/1.1 400") and b"connection: close" in said.lower(), said
        assert b"Transfer-Encoding" in said and said.count(b"HTTP/1.1") == 1


def test_endless_headers_are_refused_by_their_size(live_server, nano):
    """Their size is bounded, not only the time."""
    one = live_server(ScriptedEngine(nano))
    with socket.create_connection(("127.0.0.1", one.port), timeout=5) as line:
        line.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: ")
        with contextlib.suppress(OSError):
            for _ in range(30):
                line.sendall(b"a" * 1000)
                time.sleep(0.005)
        said = b""
        with contextlib.suppress(OSError):
            said = line.recv(65536)
    assert said.startswith(b"HTTP/1.1 4") and b'{"error":{"message":' in said


def test_a_body_larger_than_the_limit_is_refused_before_it_is_read(live_server, nano):
    one = live_server(ScriptedEngine(nano), max_body=1000)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    said = one.raw(head + b"Content-Length: 10000000\r\n\r\n{", wait=2.0)
    assert said.startswith(b"HTTP/1.1 413") and b"connection: close" in said
    chunks = b"".join(b"400\r\n" + b" " * 0x400 + b"\r\n" for _ in range(50))
    assert one.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, wait=2.0).startswith(
        b"HTTP/1.1 413"
    )
    assert one.get("/v1/models").status == 200


def test_slow_headers_and_idle_connections_are_closed(live_server, nano, monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    one = live_server(ScriptedEngine(nano, text_snapshots(nano, "932")))
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for start in (b"", b"GET / HT", first):
        with socket.create_connection(("127.0.0.1", one.port), timeout=5) as line:
            line.sendall(start)
            if start == first:
                assert line.recv(65536)
            began = time.monotonic()
            with contextlib.suppress(OSError):  # one letter at a time, for ever
                while time.monotonic() - began < 5:
                    line.sendall(b"X" if start else b"")
                    line.settimeout(0.05)
                    with contextlib.suppress(TimeoutError):
                        if not line.recv(65536):
                            break
            assert time.monotonic() - began < 3
    line = http.client.HTTPConnection("127.0.0.1", one.port, timeout=5)
    for pause in (0, 0.6):  # a connection that waits for its next request is no trickle
        time.sleep(pause)
        line.request("GET", "/health")
        assert line.getresponse().read()


def test_a_client_that_closes_the_connection_frees_its_slot(live_server, nano):
    engine = ScriptedEngine(
        nano, text_snapshots(nano, *[WORDS[:n] for n in range(3, len(WORDS))]), pause=0.05
    )
    one = live_server(engine)
    for stream in (True, False):
        body = json.dumps({**PAYLOAD, "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" \
               f"Content-Length: {len(body)}\r\n\r\n".encode()  # fmt: skip
        with socket.create_connection(("127.0.0.1", one.port)) as line:
            line.sendall(head + body)
            while not engine.tickets or engine.tickets[-1].finished:
                time.sleep(0.01)
            ticket = engine.tickets[-1]
        until = time.monotonic() + 3
        while not ticket.cancelled and time.monotonic() < until:
            time.sleep(0.01)
        assert ticket.cancelled
        while not ticket.finished:
            time.sleep(0.01)


@pytest.mark.parametrize("host, fits", [("127.0.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True),
                                        ("0.0.0.0", False), ("::", False), ("10.0.0.5", False)])  # fmt: skip
def test_a_public_address_needs_a_key(host, fits):
    check_address(host, ServerOptions(keys=("a-long-enough-key",)))
    if fits:
        check_address(host, ServerOptions())
    else:
        with pytest.raises(ValueError, match="API key"):
            check_address(host, ServerOptions())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.5"])
def test_a_public_address_without_a_key_is_refused_before_the_model_is_loaded(host, monkeypatch):
    monkeypatch.delenv(serve.KEYS, raising=False)
    monkeypatch.setattr(serve.show, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    monkeypatch.setattr(server, "listen", lambda *a: pytest.fail("it listened"))
    for keys in ("", " , "):
        monkeypatch.setenv(serve.KEYS, keys)
        with pytest.raises(ValueError, match=f"host is '{re.escape(host)}'; allowed: 127.0.0.1.*API key"):
            serve.run(["--host", host, "--port", "0"])


def test_a_port_in_use_is_refused_at_once():
    with contextlib.closing(server.listen("127.0.0.1", 0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=str(port)):
            server.listen("127.0.0.1", port)
    for bad in (-1, 70_000):
        with pytest.raises(ValueError, match="65535"):
            server.listen("127.0.0.1", bad)


def test_connections_use_tcp_nodelay(nano, live_server):
    one = live_server(ScriptedEngine(nano))
    with socket.create_connection(("127.0.0.1", one.port)):
        while not (held := list(one.server.server_state.connections)):
            time.sleep(0.01)
        assert held[0].transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_failing_warm_up_ends_the_server(nano):
    engine = ScriptedEngine(nano)
    engine.start = lambda: (_ for _ in ()).throw(RuntimeError("no memory"))
    one = LiveServer(engine)
    one.thread.join(10)
    assert not one.thread.is_alive() and str(one.server.failure) == "no memory"


def in_background(call, *args):
    box = []
    thread = threading.Thread(target=lambda: box.append(call(*args)), daemon=True)
    thread.start()
    return thread, box


def test_a_signal_drains(live_server, nano):
    """/ready fails first, new requests get 503, and running ones finish."""
    engine = ScriptedEngine(nano, text_snapshots(nano, "347", WORDS))
    engine.gate.clear()
    one = live_server(engine)
    running = [
        in_background(one.request, "POST", "/v1/chat/completions", {**PAYLOAD, "stream": s})
        for s in (True, False)
    ]
    while len(engine.tickets) < 2:
        time.sleep(0.01)
    assert one.get("/ready").status == 200
    one.server.handle_exit(signal.SIGTERM, None)
    late = [one.get("/ready"), one.request("POST", "/v1/chat/completions", PAYLOAD), one.get("/health")]
    assert [answer.status for answer in late] == [503, 503, 200] and "Retry-After" in str(
        late[1].headers
    ).title()
    engine.gate.set()
    for thread, box in running:
        thread.join(10)
        assert box[0].status == 200 and WORDS in box[0].body.replace(
            '"}', WORDS if "data" in box[0].body else ""
        )
    one.thread.join(15)
    assert not one.thread.is_alive()


@pytest.mark.parametrize("again", [False, True])
def test_requests_beyond_the_drain_time_are_cancelled_with_an_error(live_server, nano, again):
    engine = ScriptedEngine(nano, text_snapshots(nano, "347", WORDS))
    one = live_server(engine, drain=60 if again else 0.3)
    engine.gate.clear()
    running = [
        in_background(one.request, "POST", "/v1/chat/completions", {**PAYLOAD, "stream": s})
        for s in (True, False)
    ]
    while len(engine.tickets) < 2:
        time.sleep(0.01)
    began = time.monotonic()
    one.server.handle_exit(signal.SIGTERM, None)
    if again:
        one.server.handle_exit(signal.SIGINT, None)
    for thread, _ in running:
        thread.join(10)
    events, whole = running[0][1][0], running[1][1][0]
    assert whole.status == 503 and "shutting down" in whole.body
    assert (
        events.status == 200
        and events.body.count('"error"') == 1
        and events.body.endswith("data: [DONE]\n\n")
    )
    one.thread.join(15)
    assert not one.thread.is_alive() and time.monotonic() - began < 5


@pytest.mark.long
@pytest.mark.parametrize("stream, drain", [(True, 2.0), (False, 0.2)])
def test_a_reader_that_has_stopped_has_the_time_to_drain(
    live_server, nano, monkeypatch, caplog, stream, drain
):
    """Then its connection is closed, without a traceback, and the server ends."""
    listen = server.listen

    def with_small_buffers(*address):
        made = listen(*address)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return made

    monkeypatch.setattr(server, "listen", with_small_buffers)
    words = nano.tokenizer.encode("a word " * 20_000)
    engine = ScriptedEngine(nano, [snapshot(words, finish="stop")])
    one = live_server(engine, drain=drain)
    body = json.dumps({**PAYLOAD, "stream": stream})
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", one.port))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        line.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        assert line.recv(10) == b"HTTP/1.1 2"
        time.sleep(0.5)
        began = time.monotonic()
        one.server.handle_exit(signal.SIGTERM, None)
        one.thread.join(15)
    assert not one.thread.is_alive()
    assert max(drain, server.NOTICE_SECONDS + server.FLUSH_SECONDS) <= time.monotonic() - began + 0.1
    assert time.monotonic() - began < drain + 4
    assert not [record for record in caplog.records if record.exc_info or "uvicorn" in record.name]


@pytest.mark.slow
def test_a_signal_while_compiling_ends_the_process_cleanly(tmp_path):
    """Runs the real command with an empty cache: the process neither aborts nor leaves half a cache entry."""
    with server.listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mercury_jax", "serve", "--port", str(port)],
        env=env | {"JAX_PLATFORMS": "cpu", "MERCURY_CACHE": str(tmp_path)},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = iter(process.stderr.readline, "")
    while not next(said).startswith("compiling"):
        pass
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0 and list(said)[-1] == "stopped\n"


OWN_RULE = '''"""A rule of the user's own."""

import jax.numpy as jnp

import mercury_jax as mj


@mj.rule(name="leftmost", noise="absorbing")
def leftmost(key, view, memory, count=1.0):
    """Accepts the `count` leftmost masks."""
    return mj.rules.accept(view, view.masked & (jnp.cumsum(view.masked) <= count)), memory
'''


@pytest.mark.slow
def test_the_real_command_serves_a_rule_of_the_users_own(tmp_path):
    """A file of 12 lines: its rule decodes requests that name none, and the playground offers it."""
    (tmp_path / "my_rules.py").write_text(OWN_RULE)
    command = ["serve", "--port", "0", "--slots", "1", "--rule", "my_rules:leftmost", "--count", "4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mercury_jax", *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert process.stderr is not None
    try:
        said = []
        while not said or not said[-1].startswith("ready in"):
            said.append(process.stderr.readline())
            assert said[-1], "".join(said)
        url = re.search(r"http://[\d.:]+", "".join(said))
        assert url is not None
        line = http.client.HTTPConnection(url[0].removeprefix("http://"), timeout=60)

        def ask(method, path, data=None):
            headers = {"content-type": "application/json"}
            line.request(method, path, None if data is None else json.dumps(data), headers)
            return line.getresponse().read().decode()

        body = {"model": "nano", "prompt": "def fibonacci(n):", "max_tokens": 32, "stream": False}
        tokens = json.loads(ask("POST", "/v1/completions", body))["usage"]["completion_tokens"]
        passes = re.search(r"mercury_forwards_total (\d+)", ask("GET", "/metrics"))
        assert passes is not None and tokens / 4 <= int(passes[1]) <= 8
        offered = json.loads(ask("GET", "/playground/info"))["rules"]
        assert (offered[0]["name"], offered[0]["value"]) == ("leftmost", 4.0)
        assert offered[0]["about"] == "Accepts the `count` leftmost masks." and len(offered) > 9
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def arguments(*words):
    return command_line.read(serve.Serve, words, "mercury serve")


def test_command_line_options_reach_the_app(monkeypatch):
    monkeypatch.setenv(serve.KEYS, " one-more-key, ")
    options = serve.options_of(
        arguments("--api-key", "first-key-123", "--rate", "60", "--strict-temperature")
    )
    assert "key" not in repr(options) and "first" not in repr(options)
    assert (
        options.keys == ("first-key-123", "one-more-key")
        and options.rate == 60
        and options.strict_temperature
    )
    assert "localhost" in options.hosts and "*" not in options.hosts
    assert serve.options_of(arguments("--host", "0.0.0.0")).hosts == ("*",)
    assert "gpu" in serve.options_of(arguments("--host", "0.0.0.0", "--allow-host", "gpu")).hosts
    settings = serve.settings_of(arguments("--slots", "3", "--queue", "0", "--prefix-cache", "2"))
    assert (settings.slots, settings.queue, settings.prefix_bytes) == (3, 0, 2 << 20)
    assert (
        serve.aliases_of(["a", "b=nano"], "nano") == {"a": "nano", "b": "nano"}
        and serve.aliases_of((), "x") is None
    )


@pytest.mark.parametrize("words", [["--slots", "0"], ["--queue", "-1"], ["--default-effort", "huge"], ["--rate", "0"],
                                   ["--max-body", "0"], ["--api-key", "short"], ["--context", "-5"],
                                   ["--kv", "int4"]])  # fmt: skip
def test_invalid_command_line_numbers_are_refused(words):
    with pytest.raises(ValueError, match="allowed"):
        [read(arguments(*words)) for read in (serve.settings_of, serve.options_of)]
    for bad in ("tensor", "tensor=x", "rows=2", "tensor=2;data=2", "tensor=0", "data=64"):
        with pytest.raises(ValueError, match="--mesh"):
            serve.mesh_of(bad)
