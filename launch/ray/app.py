"""`python launch/ray/app.py [OPTIONS] -- [OPTIONS OF mercury serve]`: the app of `mercury serve` on Ray Serve.

A replica is one engine behind the same ASGI app. Ray starts and ends replicas by the number of requests in them,
sends requests to those that are warm, and drains one before it ends. See launch/ray/README.md.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, HTTPOptions

from mercury_jax.cli import serve as command

# Requests that a replica takes beyond its slots and its queue, only to refuse them: with 429 and Retry-After in the
# API's own words, where Ray's refusal would be a bare 503.
SPARE = 64


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="launch/ray/app.py", description=__doc__, epilog="Behind --: mercury serve --help"
    )
    p.add_argument("--least", type=int, default=1, metavar="N", help="replicas at all times (default 1)")
    p.add_argument("--most", type=int, default=1, metavar="N", help="replicas under load (default 1)")
    p.add_argument("--load", type=float, metavar="X", help="requests of a replica, running and waiting, beyond which "
                   "another one starts (default: its slots)")  # fmt: skip
    p.add_argument("--gpus", type=float, default=0.0, metavar="X", help="of a replica (default 0)")
    p.add_argument("--cpus", type=float, default=1.0, metavar="X", help="of a replica (default 1)")
    return p


def build(words: Sequence[str]) -> Callable[[], Any]:
    """A function that makes the ASGI app in a replica, whose lifespan is that of its engine.

    words: options of `mercury serve`. ValueError for one that is wrong, before anything is sent to a replica.
    """
    args = command.parser().read(list(words))
    settings, told = command.settings_of(args), command.options_of(args)

    def app() -> Any:
        import dataclasses

        from starlette.concurrency import run_in_threadpool

        from mercury_jax.cli import options, show
        from mercury_jax.serve.app import create_app
        from mercury_jax.serve.engine.engine import Engine

        lm = show.load(args.model, **options.reading(args))
        engine = Engine(lm, settings)
        made = create_app(engine, dataclasses.replace(told, aliases=command.aliases(args.alias, lm.name)))

        @contextlib.asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            await run_in_threadpool(engine.start)  # Ray sends nothing to a replica before this is over
            yield
            await run_in_threadpool(engine.stop)  # behind Ray's own draining: what still runs is cancelled

        made.router.lifespan_context = lifespan
        return made

    return app


class Replica:
    """Ray asks it every few seconds, and replaces a replica that raises."""

    def check_health(self) -> None:
        if not self.app.state.service.engine.ready:  # type: ignore[attr-defined]  Ray's wrapper has the app
            raise RuntimeError("the engine has ended")


def application(spread: argparse.Namespace, words: Sequence[str]) -> serve.Application:
    """The app as a deployment: how many replicas there are, and what each may hold."""
    args = command.parser().read(list(words))
    scaled = AutoscalingConfig(
        min_replicas=spread.least, max_replicas=spread.most, target_ongoing_requests=spread.load or args.slots
    )
    deployment = serve.deployment(
        name="mercury",
        autoscaling_config=scaled,
        max_ongoing_requests=args.slots + args.queue + SPARE,
        max_queued_requests=args.queue + SPARE,
        graceful_shutdown_timeout_s=args.drain,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": spread.cpus, "num_gpus": spread.gpus},
    )
    return deployment(serve.ingress(build(words))(Replica)).bind()


def main(argv: Sequence[str]) -> int:
    from mercury_jax.serve.options import check_address

    end = argv.index("--") if "--" in argv else len(argv)
    spread, words = parser().parse_args(argv[:end]), argv[end + 1 :]
    args = command.parser().read(list(words))
    check_address(args.host, command.options_of(args))  # the proxies' door has the same lock as ours
    app = application(spread, words)
    serve.start(http_options=HTTPOptions(host=args.host, port=args.port))
    serve.run(app, route_prefix="/", blocking=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
