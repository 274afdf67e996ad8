"""`python launch/ray/app.py [OPTIONS] -- [OPTIONS OF mercury serve]`: the app of `mercury serve` on Ray Serve.

A replica is the same ASGI app with its engines. Ray starts and ends replicas by the number of requests in them, sends
requests to those that are ready, and drains one before it ends. See launch/ray/README.md.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, HTTPOptions

from mercury_jax.cli import app as entry, arguments, serve as command
from mercury_jax.cli.arguments import Float, Int, OptionalFloat

# Requests that a replica accepts beyond its slots and its queue, only to refuse them itself: with 429, Retry-After and
# the error body of the API, where Ray would answer with a bare 503.
SPARE = 64


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Serve a model on Ray Serve. Options of `mercury serve` follow after --.

    examples:
      python launch/ray/app.py --least 1 --most 4 --gpus 1 -- --slots 16
    """

    least: Int = 1
    """Replicas at all times."""
    most: Int = 1
    """Replicas under load."""
    load: OptionalFloat = None
    """Requests of a replica, running and waiting, beyond which another one starts. Default: the slots of its models."""
    gpus: Float = 0.0
    """GPUs of a replica."""
    cpus: Float = 1.0
    """CPUs of a replica."""


def build(words: Sequence[str]) -> Callable[[], Any]:
    """A function that makes the ASGI app in a replica; the lifespan of the app is that of its engines.

    Args:
        words: Options of `mercury serve`.

    Raises:
        ValueError: A wrong option, before anything is sent to a replica.
    """
    args, parameters = arguments.read_with_rule(command.Serve, words, "mercury serve")
    models, settings, options = command.models_of(args), command.settings_of(args), command.options_of(args)

    def app() -> Any:
        from starlette.concurrency import run_in_threadpool

        from mercury_jax.serve.app import create_app

        engines = command.load_engines(args, models, parameters, settings)
        aliases = command.aliases_of(args.alias, engines[0].lm.name)
        made = create_app(engines, dataclasses.replace(options, aliases=aliases))

        @contextlib.asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            # Ray sends no request before this has returned.
            for engine in engines:
                await run_in_threadpool(engine.start)
            yield
            # Ray has drained the replica; what still runs is cancelled.
            for engine in engines:
                await run_in_threadpool(engine.stop)

        made.router.lifespan_context = lifespan
        return made

    return app


class Replica:
    """Ray calls `check_health` every few seconds, and replaces a replica that raises."""

    def check_health(self) -> None:
        services = self.app.state.models.services  # type: ignore[attr-defined]  Ray's wrapper has the app
        if not all(service.engine.ready for service in services):
            raise RuntimeError("an engine has ended")


def application(replicas: Replicas, words: Sequence[str]) -> serve.Application:
    """The app as a deployment: how many replicas there are, and what each may use."""
    args, _ = arguments.read_with_rule(command.Serve, words, "mercury serve")
    count = len(command.models_of(args))
    slots, queue = command.settings_of(args).slots * count, args.queue * count
    scaling = AutoscalingConfig(
        min_replicas=replicas.least,
        max_replicas=replicas.most,
        target_ongoing_requests=replicas.load or slots,
    )
    deployment = serve.deployment(
        name="mercury",
        autoscaling_config=scaling,
        max_ongoing_requests=slots + queue + SPARE,
        max_queued_requests=queue + SPARE,
        graceful_shutdown_timeout_s=args.drain,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
    )
    return deployment(serve.ingress(build(words))(Replica)).bind()


def run(argv: Sequence[str]) -> int:
    """Starts the deployment and blocks until it ends."""
    from mercury_jax.serve.options import check_address

    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    replicas, words = arguments.read(Replicas, words[:end], "python launch/ray/app.py"), words[end + 1 :]
    args, _ = arguments.read_with_rule(command.Serve, words, "mercury serve")
    # As `mercury serve`: an address beyond the loopback needs a key.
    check_address(args.host, command.options_of(args))
    app = application(replicas, words)
    serve.start(http_options=HTTPOptions(host=args.host, port=args.port))
    serve.run(app, route_prefix="/", blocking=True)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run_script(run))
