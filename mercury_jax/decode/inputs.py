"""Checks of the arguments that the public calls share: the model, prompts, seeds, plans, meshes.

Each call runs them first, so that a wrong argument is named before anything is encoded or compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh

from mercury_jax import chat
from mercury_jax.config import Plan, refuse
from mercury_jax.decode.registration import AtLeast, check_number
from mercury_jax.types import LM, PackedPass, Params

MAX_TOKENS = 1_000_000  # beyond this, `max_tokens` is a mistake
ALLOWED_PROMPTS = "a text (str), a list of messages, or ids (whole numbers)"

Message: TypeAlias = Mapping[str, Any]
Ids: TypeAlias = Sequence[int] | np.ndarray | jax.Array
PromptLike: TypeAlias = str | Sequence[Message] | Ids  # a text, a conversation, or ids
Prompts: TypeAlias = PromptLike | Sequence[PromptLike]


class Prompt(NamedTuple):
    """One prompt as ids, and whether it was a conversation."""

    ids: list[int]
    chat: bool


def encode_prompts(
    lm: LM, prompt: Any, *, thinking: bool = False, previous: Sequence[Prompt] = (), name: str = "prompt"
) -> tuple[list[Prompt], bool]:
    """Checks prompts and encodes them.

    Args:
        lm: Its tokenizer encodes texts and renders conversations; its vocabulary bounds the ids.
        prompt: A text, a conversation (a list of {"role", "content"}, a content being a text or a list of
            {"type": "text", "text": ...}), ids (a list or a 1-D integer array, numpy or JAX), or a list of any of
            these; a 2-D integer array is a list of rows of ids.
        thinking: Whether the answer to a conversation must begin with its thinking.
        previous: What the prompts continue, one for each, answers included.
        name: The argument that errors name.

    Returns:
        The prompts, and whether a single one was given.

    Raises:
        ValueError: For anything else: bytes, floats, empty prompts, ids outside of the vocabulary.
    """
    prompt = _as_numpy(prompt, name)
    before = lambda i: previous[i] if i < len(previous) else None
    if isinstance(prompt, np.ndarray):
        single = prompt.ndim == 1
    else:
        first = prompt[0] if isinstance(prompt, Sequence) and len(prompt) > 0 else None
        single = isinstance(first, Mapping | int | float | np.integer | np.floating) or isinstance(
            prompt, str
        )
        if isinstance(prompt, bytes | bytearray):
            single = False
    if single:
        return [_encode_one(lm, prompt, name, thinking, before(0))], True
    if isinstance(prompt, np.ndarray):
        prompt = list(prompt)
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence) or len(prompt) == 0:
        raise refuse(name, prompt, f"{ALLOWED_PROMPTS}, or a non-empty list of these")
    return [_encode_one(lm, p, f"{name}[{i}]", thinking, before(i)) for i, p in enumerate(prompt)], False


def _as_numpy(prompt: Any, name: str) -> Any:
    """Converts a JAX array to numpy; refuses arrays that are not [T] or [B, T] of whole numbers."""
    if isinstance(prompt, Tracer):
        raise refuse(name, prompt, "concrete ids: under jit use the decoder itself")
    if isinstance(prompt, jax.Array):
        prompt = np.asarray(prompt)
    if not isinstance(prompt, np.ndarray):
        return prompt
    if prompt.ndim not in (1, 2) or prompt.size == 0 or not np.issubdtype(prompt.dtype, np.integer):
        found = f"{prompt.dtype}{list(prompt.shape)}"
        raise refuse(name, found, "whole numbers [T] or [B, T], at least one token")
    return prompt


def _encode_one(lm: LM, prompt: Any, name: str, thinking: bool, previous: Prompt | None) -> Prompt:
    """Encodes one prompt; behind a conversation, its last turn is ended first."""
    end_turn = [lm.tokenizer.end_turn] if previous is not None and previous.chat else []
    if isinstance(prompt, str):
        if not prompt:
            raise refuse(name, prompt, "a text of at least one character")
        ids = lm.tokenizer.encode(prompt)
        return Prompt([*(lm.tokenizer.begin if previous is None else end_turn), *ids], False)
    if isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
        render = lm.tokenizer.follow if end_turn else lm.tokenizer.render
        messages = [_join_content(i, message) for i, message in enumerate(prompt)]
        return Prompt(render(messages, thinking=thinking), True)
    prompt = _as_numpy(prompt, name)
    is_list = isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes | bytearray)
    if not is_list or not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in prompt):
        raise refuse(name, prompt, ALLOWED_PROMPTS)
    ids = [int(i) for i in prompt]
    if not ids:
        raise refuse(name, prompt, "at least one token")
    for i in ids:
        if not 0 <= i < lm.model.config.vocab:
            raise refuse(f"{name} id", i, f"0..{lm.model.config.vocab - 1}")
    return Prompt([*end_turn, *ids], False)


def _join_content(index: int, message: Any) -> Any:
    """A message whose content is one text; a content of text parts is joined as the server joins it."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": chat.join_parts(content, f"messages[{index}].content")}


def check_max_tokens(lm: LM, prompts: Sequence[Prompt], max_tokens: Any) -> int:
    """Checks that prompts and answers fit into the context.

    Args:
        lm: Its context is the bound.
        prompts: Of all rows.
        max_tokens: Most tokens of an answer.

    Returns:
        max_tokens as an int.

    Raises:
        ValueError: It is not a whole number, or a prompt leaves no room for it.
    """
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int | np.integer):
        raise refuse("max_tokens", max_tokens, "a whole number from 1 on")
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise refuse("max_tokens", max_tokens, f"1..{MAX_TOKENS}")
    context = lm.model.config.context
    for i, prompt in enumerate(prompts):
        size = len(prompt.ids)
        if size >= context:
            raise refuse(f"prompt[{i}]", f"{size} tokens", f"fewer than the model's context of {context}")
        if size + max_tokens > context:
            allowed = f"1..{context - size}: the model's context is {context} tokens"
            raise refuse("max_tokens", max_tokens, allowed)
    return int(max_tokens)


def check_seed(seed: Any) -> int:
    """Returns the seed as an int; ValueError unless it is a whole number in 0..2**31 - 1.

    Args:
        seed: Of the call.

    Returns:
        The seed.

    Raises:
        ValueError: It is anything else.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**31:
        raise refuse("seed", seed, "a whole number in 0..2**31 - 1")
    return int(seed)


def check_temperature(value: Any) -> Any:
    """Returns a temperature, or an array with one per row; values that are traced under `jit` pass unchecked."""
    return check_number("temperature", value, AtLeast(0))


def check_logprobs(count: Any) -> int | None:
    """Returns how many alternatives to keep at each token, or None; ValueError unless 0..100.

    Args:
        count: Alternatives per token.

    Returns:
        The count.

    Raises:
        ValueError: It is anything else.
    """
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 <= count <= 100:
        raise refuse("logprobs", count, "0..100 alternatives, or None")
    return int(count)


def check_plan(plan: Any) -> Plan:
    """Returns the plan, or the default one for None; ValueError for anything else.

    Args:
        plan: Of the call.

    Returns:
        The plan.

    Raises:
        ValueError: It is anything else.
    """
    if plan is None:
        return Plan()
    if not isinstance(plan, Plan):
        raise refuse("plan", plan, "a Plan, such as mj.Plan(block=32, steps=16), or None")
    return plan


def check_mesh(mesh: Any) -> Mesh | None:
    """Returns the mesh with axes that the compiler shards (`AxisType.Auto`), whatever kind the user's are.

    Raises:
        ValueError: It is no mesh, or has no axis named data.
    """
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise refuse("mesh", mesh, "a jax Mesh, such as mj.mesh(data=4), or None")
    if "data" not in mesh.shape:
        raise refuse("mesh", f"axes {', '.join(mesh.axis_names)}", "a mesh with an axis named data")
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def check_lm(lm: Any) -> None:
    """Raises ValueError unless `lm` is an LM that holds parameters.

    Args:
        lm: Of the call.

    Raises:
        ValueError: Names the model or its parameters.
    """
    if not isinstance(lm, LM):
        raise refuse("lm", lm, "a model as mj.load() returns it")
    # An empty dict is fine: a Model is a record of functions, which need not have parameters.
    leaves = jax.tree.leaves(lm.params)
    if lm.params is None or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        raise refuse("lm.params", lm.params, "the parameters of lm.model, a nested dict of arrays")


@contextlib.contextmanager
def explain_wrong_params(lm: LM) -> Iterator[None]:
    """Around a compiled pass: where tracing fails because the parameters are not the model's, says so.

    The check traces a pass of its own, which takes as long as the model's tracing, so it only runs after a failure.
    """
    try:
        yield
    except Exception as error:
        if type(error) is not ValueError:  # ours; the layers of a model raise subclasses and other kinds
            _check_params(lm)
        raise


def _check_params(lm: LM) -> None:
    """Raises ValueError if the model cannot be traced with its parameters."""

    def one_pass(params: Params) -> Any:
        at = jnp.zeros((1, 1), jnp.int32)
        time = jnp.zeros((1,)) if lm.model.config.timed else None
        hidden = lm.model.apply(params, PackedPass(at, at, jnp.zeros((1, 1, 2, 2), jnp.int32), time=time))
        return lm.model.head(params, hidden)

    try:
        jax.eval_shape(one_pass, lm.params)
    except Exception as error:  # whatever the architecture raises for parameters that are not its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        count = len(jax.tree.leaves(lm.params))
        raise refuse("lm.params", f"{count} arrays", f"the parameters of lm.model ({reason})") from error
