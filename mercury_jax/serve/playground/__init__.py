"""The playground: one page that shows the denoising, and the three routes that it talks to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from mercury_jax.serve.options import ServerOptions


def routes(engine: Any, options: ServerOptions | None = None) -> list[BaseRoute]:
    """The page at `/`, what it loads under `/playground/static`, and `/playground/{info,stream,top}`.

    engine: a `serve.engine.Engine`, or what has its `lm`, `settings`, `context`, `ready`, `closing` and
    `submit`. options: the server's; where they hold keys, the page has a field for one. These routes check no
    key themselves: they belong behind the guard of the others.
    """
    from mercury_jax.serve.options import ServerOptions
    from mercury_jax.serve.playground.app import Playground

    return Playground(engine, options or ServerOptions()).routes()
