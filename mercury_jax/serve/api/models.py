"""The models routes: the one model that is loaded, under each of its names."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.serve.api import errors
from mercury_jax.serve.api.numbers import DEFAULT_TOKENS
from mercury_jax.serve.api.service import Service

FEATURES = ("tools", "json_mode", "structured_outputs")
# In the words of the vendor's client, whose types ask for them.
ENDPOINTS = ("chat.completions", "completions", "fim.completions", "edit.completions", "apply.completions")
SAMPLING = (
    "temperature", "stop", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "logprobs", "max_tokens",
)  # fmt: skip


def model(service: Service, name: str, features: tuple[str, ...] = FEATURES) -> dict[str, Any]:
    """The vendor's model object, with OpenAI's `object` and `owned_by`. Nothing here costs anything."""
    engine = service.engine
    about = f"{engine.lm.name}, a diffusion language model of {engine.lm.parameters:,} parameters"
    return {
        "id": name,
        "object": "model",
        "owned_by": "mercury_jax",
        "name": name if name == engine.lm.name else f"{name} ({engine.lm.name})",
        "created": service.created,
        "description": about,
        "input_modalities": ["text"],
        "output_modalities": ["text"],
        "context_length": engine.context,
        "max_output_length": min(engine.context, DEFAULT_TOKENS),
        "pricing": {"prompt": "0", "completion": "0", "input_cache_reads": "0", "input_cache_writes": "0"},
        "supported_sampling_parameters": list(SAMPLING),
        "supported_features": list(features),
        "supported_endpoints": list(ENDPOINTS),
    }


def listing(service: Service, features: tuple[str, ...] = FEATURES) -> dict[str, Any]:
    return {"object": "list", "data": [model(service, name, features) for name in service.names]}


async def every(service: Service, request: Request) -> Response:
    return errors.Json(listing(service))


async def plain(service: Service, request: Request) -> Response:
    """Those of fill-in-the-middle and of edits, which have neither tools nor schemas."""
    return errors.Json(listing(service, ()))


async def one(service: Service, request: Request) -> Response:
    name = request.path_params["id"]
    if name not in service.names:
        raise errors.unknown_model(name)
    return errors.Json(model(service, name))
