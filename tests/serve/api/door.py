"""An app in front of a script, as an attack meets it: what must be refused, and what must not be reached."""

import time

from starlette.testclient import TestClient

from mercury_jax.serve.api import Options, create_app
from tests.serve.api.scripted import Scripted, saying

CHAT = "/v1/chat/completions"
ASK = {"model": "nano", "messages": [{"role": "user", "content": "347+585="}]}
LEAST = {
    CHAT: ASK,
    "/v1/completions": {"model": "nano", "prompt": "a"},
    "/v1/fim/completions": {"model": "nano", "prompt": "a"},
    "/v1/edit/completions": ASK,
    "/v1/apply/completions": ASK,
}


class Door:
    """An app in front of a script, and what reached the engine behind it."""

    def __init__(self, nano, slots=4, **options):
        self.engine = Scripted(nano, saying(nano, "932"), slots=slots)
        self.client = TestClient(
            create_app(self.engine, Options(**{"playground": False, **options})), base_url="http://localhost"
        )

    def post(self, ask, path=CHAT, **more):
        return self.client.post(path, json=ask, **more)

    def refuses(self, ask, path=CHAT, status=400, within=5.0):
        """Whether a request is refused in words, in time, and before anything reaches the engine."""
        before, began = len(self.engine.tickets), time.perf_counter()
        answer = self.post(ask, path)
        assert answer.status_code == status, answer.text[:300]
        assert isinstance(answer.json()["error"]["message"], str) and len(answer.text) < 2000
        assert len(self.engine.tickets) == before and time.perf_counter() - began < within
        return answer.json()["error"]

    def serves(self):
        """Whether it still answers."""
        assert self.post(ASK).json()["choices"][0]["message"]["content"] == "932"


def schema_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def tool_of(parameters, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
