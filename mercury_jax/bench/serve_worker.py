"""A server in a process of its own, for those who measure it or attack it. Run as a script, never imported.

    python serve_worker.py '{"model": null, "settings": {"slots": 16}, "options": {}}'

Prints one JSON line {"url"} when it listens, a second one {"ready"} when every program is compiled, and then runs
until it gets a signal. It is what `mercury serve` runs, on a free port, with all of the engine's settings.
"""

import json
import logging
import sys
import threading
import time


def main(asked: dict) -> int:
    from mercury_jax import load
    from mercury_jax.serve.app import create_app
    from mercury_jax.serve.engine.engine import Engine
    from mercury_jax.serve.engine.request import EngineConfig
    from mercury_jax.serve.options import ServerOptions
    from mercury_jax.serve.server import Server, freeze_startup_objects, listen

    logging.basicConfig(stream=sys.stderr)
    engine = Engine(load(asked.get("model")), EngineConfig(**asked.get("settings", {})))
    app = create_app(engine, ServerOptions(**asked.get("options", {})))
    server = Server(app, engine, asked.get("drain", 30.0), freeze_startup_objects)
    socket = listen("127.0.0.1", 0)
    began = time.perf_counter()
    say = lambda **told: print(json.dumps(told), flush=True)

    def wait() -> None:
        while not (engine.ready and engine.compiled):
            if server.failure is not None:
                return
            time.sleep(0.05)
        say(ready=time.perf_counter() - began)

    say(url="http://{}:{}".format(*socket.getsockname()[:2]))
    threading.Thread(target=wait, daemon=True).start()
    server.run(sockets=[socket])
    if server.failure is not None:
        raise server.failure
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
