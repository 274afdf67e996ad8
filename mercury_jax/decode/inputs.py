"""Checks of the arguments that the public functions share: the model, prompts, seeds and numbers.

Each public function runs these checks first, so that a wrong argument raises an error before anything is compiled. The
errors name the argument, its value and what is allowed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mercury_jax import compilation
from mercury_jax.config import AtLeast, refuse
from mercury_jax.decode import image_prompts
from mercury_jax.decode.registration import check_number
from mercury_jax.images import Image
from mercury_jax.types import LM, Key, Model, PackedPass, Params

MAX_TOKENS = 1_000_000  # beyond this, `max_tokens` is a mistake
ALLOWED_PROMPTS = "a text (str), a list of messages, or ids (whole numbers)"

Message: TypeAlias = Mapping[str, Any]
Ids: TypeAlias = Sequence[int] | np.ndarray | jax.Array
PromptLike: TypeAlias = str | Sequence[Message] | Ids  # a text, a conversation, or ids
Prompts: TypeAlias = PromptLike | Sequence[PromptLike]
WholeNumbers: TypeAlias = int | Ids  # one for all prompts, or one for each
Seeds: TypeAlias = WholeNumbers | Key  # the same, or keys of `jax.random.key`

T = TypeVar("T")


class Prompt(NamedTuple):
    """One prompt as ids, whether it was a conversation, and its images."""

    ids: list[int]
    chat: bool
    images: tuple[Image, ...] = ()


def encode_prompts(
    lm: LM,
    prompt: Any,
    *,
    thinking: bool | Sequence[bool] = False,
    previous: Sequence[Prompt] = (),
    begin: bool = True,
    name: str = "prompt",
    images: bool = False,
) -> tuple[list[Prompt], bool]:
    """Checks prompts and encodes them.

    Args:
        prompt: A text, a conversation (a list of {"role", "content"}, a content being a text or a list of
            {"type": "text", "text": ...}), ids (a list or a 1-D integer array, numpy or JAX), or a list of any of
            these; a 2-D integer array is a list of rows of ids.
        images: Whether the contents of messages may have image parts.
    """
    # A list is one prompt if it holds messages or numbers, and several prompts otherwise.
    prompt = _as_numpy(prompt, name)
    thinks = lambda i: thinking if isinstance(thinking, bool) else i < len(thinking) and thinking[i]
    before = lambda i: previous[i] if i < len(previous) else None if begin else Prompt([], False)
    binary = isinstance(prompt, bytes | bytearray)
    first = prompt[0] if isinstance(prompt, Sequence) and len(prompt) > 0 and not binary else None
    ids_or_chat = isinstance(first, Mapping | int | float | np.integer | np.floating)
    if isinstance(prompt, str) or ids_or_chat or (isinstance(prompt, np.ndarray) and prompt.ndim == 1):
        return [_encode_one(lm, prompt, name, thinks(0), before(0), images)], True
    if binary or not isinstance(prompt, Sequence | np.ndarray) or len(prompt) == 0:
        raise refuse(name, prompt, f"{ALLOWED_PROMPTS}, or a non-empty list of these")
    each = enumerate(prompt)
    return [_encode_one(lm, p, f"{name}[{i}]", thinks(i), before(i), images) for i, p in each], False


def prompt_rows(lm: LM, prompt: Any, rows: int, name: str = "prompt", row: str = "prompt") -> list[list[int]]:
    """Encodes the prompt of each row: one prompt for all of them, or a list with one per row.

    Args:
        prompt: One prompt or several, as in `encode_prompts`.
    """
    prompts, single = encode_prompts(lm, prompt, name=name)
    if not single and len(prompts) != rows:
        raise refuse(name, f"a list of {len(prompts)}", f"one prompt, or {rows}: one for each {row}")
    return [list(p.ids) for p in prompts] * (rows if single else 1)


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


def _encode_one(
    lm: LM, prompt: Any, name: str, thinking: bool, previous: Prompt | None, images: bool
) -> Prompt:
    """Encodes one prompt. If it continues a conversation, the end of the last turn comes first."""
    end_turn = [lm.tokenizer.end_turn] if previous is not None and previous.chat else []
    if isinstance(prompt, str):
        if not prompt:
            raise refuse(name, prompt, "a text of at least one character")
        ids = lm.tokenizer.encode(prompt)
        return Prompt([*(lm.tokenizer.begin if previous is None else end_turn), *ids], False)
    if isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
        render = lm.tokenizer.follow if end_turn else lm.tokenizer.render
        # A content of text parts is joined as the server joins it.
        messages, found = image_prompts.split_conversation(lm, prompt, images)
        ids, placed = image_prompts.place(lm, render(messages, thinking=thinking), found)
        return Prompt(ids, True, placed)
    ids = check_ids(lm, prompt, name, ALLOWED_PROMPTS)
    if not ids:
        raise refuse(name, prompt, "at least one token")
    return Prompt([*end_turn, *ids], False)


def check_ids(lm: LM, ids: Any, name: str, allowed: str) -> list[int]:
    """Checks that a value is a list of ids of the vocabulary.

    Args:
        ids: A list, or a 1-D array of numpy or JAX.
    """
    ids = _as_numpy(ids, name)
    if isinstance(ids, np.ndarray) and ids.ndim == 1:
        ids = ids.tolist()
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str | bytes | bytearray)
    if not is_list or not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in ids):
        raise refuse(name, ids, allowed)
    found = [int(i) for i in ids]
    for i in found:
        if not 0 <= i < lm.model.config.vocab:
            raise refuse(f"{name} id", i, f"0..{lm.model.config.vocab - 1}")
    return found


def per_prompt(
    name: str, value: Any, count: int, check: Callable[[str, Any], T], each: str = "prompt"
) -> list[T]:
    """Checks an argument that is one value for all prompts, or a list or array with one value per prompt.

    Args:
        value: The argument as the caller gave it.
    """
    if isinstance(value, Tracer):
        raise refuse(name, value, "concrete numbers: under jit use the decoder itself")
    if isinstance(value, jax.Array):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, list | tuple | np.ndarray):
        return [check(name, value)] * count
    if len(value) != count:
        allowed = f"one for all, or {count}: one for each {each}"
        raise refuse(name, f"a list of {len(value)}", allowed)
    return [check(f"{name}[{i}]", one) for i, one in enumerate(value)]


def check_max_tokens(lm: LM, prompts: Sequence[Prompt], max_tokens: Any) -> np.ndarray:
    """Checks that prompts and answers fit into the context.

    Args:
        max_tokens: Maximum number of tokens of an answer; one for all prompts, or one for each.

    Returns:
        The maximum number of tokens of each answer, int [prompts].
    """
    whole = lambda name, value: check_whole(name, value, 1, MAX_TOKENS)
    budgets = per_prompt("max_tokens", max_tokens, len(prompts), whole)
    context, several = lm.model.config.context, np.ndim(max_tokens) > 0
    for i, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        size = len(prompt.ids)
        if size >= context:
            raise refuse(f"prompt[{i}]", f"{size} tokens", f"fewer than the model's context of {context}")
        if size + budget > context:
            allowed = f"1..{context - size}: the model's context is {context} tokens"
            raise refuse(f"max_tokens[{i}]" if several else "max_tokens", budget, allowed)
    return np.array(budgets)


def check_whole(name: str, value: Any, low: int, high: int, allowed: str = "") -> int:
    """Checks that a value is a whole number in a range.

    Args:
        name: Name of the argument in errors.
        value: A whole number of Python or numpy; not a bool.
        low: Lower end, included.
        high: Upper end, included.
        allowed: What is allowed, for errors; "": the range.

    Returns:
        The value as an int.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise refuse(name, value, allowed or f"a whole number in {low}..{high}")
    return int(value)


def check_seed(seed: Any, name: str = "seed") -> int:
    """Checks a seed and returns it as an int."""
    return check_whole(name, seed, 0, 2**31 - 1, "a whole number in 0..2**31 - 1")


def row_seeds(seed: Any, prompts: int, n: int = 1, each: str = "prompt") -> np.ndarray | Key:
    """Computes the seed or key of each row. The n answers to a prompt are adjacent rows.

    Args:
        seed: A whole number: answer j of prompt i draws from seed + i n + j. A list with one number per prompt: from
            seed[i] + j. Keys of `jax.random.key` instead of numbers: `fold_in(key, k)` replaces seed + k. With one key
            per prompt and n = 1, each prompt draws from its key itself.
    """
    is_array = isinstance(seed, jax.Array)
    if is_array and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if isinstance(seed, Tracer) or seed.shape not in ((), (prompts,)):
            allowed = f"one key of jax.random.key, or {prompts}: one for each {each}; not traced under jit"
            raise refuse("seed", f"keys {list(seed.shape)}", allowed)
        if seed.ndim and n == 1:
            return seed
        rows = np.arange(prompts * n)
        keys, numbers = (seed[rows // n], rows % n) if seed.ndim else (seed, rows)
        return jax.vmap(jax.random.fold_in, in_axes=(0 if seed.ndim else None, 0))(keys, numbers)
    if is_array and seed.dtype == jnp.uint32 and seed.ndim:  # two numbers that are one key
        raise refuse(
            "seed", f"uint32{list(seed.shape)}", "a key of jax.random.key, not of jax.random.PRNGKey"
        )
    seeds = per_prompt("seed", seed, prompts, lambda name, one: check_seed(one, name), each)
    step = np.arange(n) if np.ndim(seed) else np.arange(prompts * n).reshape(prompts, n)
    return ((np.array(seeds)[:, None] + step) % 2**31).ravel()


def check_temperature(value: Any) -> Any:
    """Checks a temperature, or an array with one per row; values that are traced under `jit` pass unchecked."""
    return check_number("temperature", value, AtLeast(0))


def check_logprobs(count: Any) -> int | None:
    """Checks how many alternatives to record for each token.

    Args:
        count: Number of alternatives, 0 to 100; None: no log-probabilities are recorded.
    """
    allowed = "0..100 alternatives, or None"
    return None if count is None else check_whole("logprobs", count, 0, 100, allowed)


def check_lm(lm: Any) -> None:
    """Checks that `lm` is an LM that holds parameters."""
    if not isinstance(lm, LM):
        raise refuse("lm", lm, "a model as mj.load() returns it")
    compilation.prepare()
    # An empty dict is fine: a Model is a record of functions, which need not have parameters.
    leaves = jax.tree.leaves(lm.params)
    if lm.params is None or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        raise refuse("lm.params", lm.params, "the parameters of lm.model, a nested dict of arrays")


def refuse_nan(is_nan: np.ndarray, where: str, name: str = "logits") -> None:
    """Refuses logits that are NaN.

    Args:
        is_nan: Which rows have NaN logits [B].
    """
    for row in np.flatnonzero(is_nan):
        raise ValueError(
            f"{name} of row {row} are NaN in {where}; allowed: numbers. "
            "The parameters hold NaN, or the arithmetic overflowed: try dtype float32"
        )


@contextlib.contextmanager
def explain_wrong_params(lm: LM, name: str = "lm.params") -> Iterator[None]:
    """Context manager around a compiled pass, which explains a failure due to parameters of another model.

    The check traces a pass of its own, which takes as long as tracing the model, so it runs only after a failure.
    """
    try:
        yield
    except Exception as error:
        if type(error) is not ValueError:  # ours; the layers of a model raise subclasses and other kinds
            check_params(lm.model, lm.params, name)
        raise


def check_params(model: Model, params: Params, name: str) -> None:
    """Checks that a model can be traced with its parameters."""
    at = jnp.zeros((1, 1), jnp.int32)
    time = jnp.zeros((1,)) if model.config.timed else None
    given = PackedPass(at, at, jnp.zeros((1, 1, 2, 2), jnp.int32), time=time)
    try:
        jax.eval_shape(lambda params: model.head(params, model.apply(params, given)), params)
    except Exception as error:  # whatever the architecture raises for parameters that are not its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        count = len(jax.tree.leaves(params))
        raise refuse(name, f"{count} arrays", f"the parameters of lm.model ({reason})") from error


@runtime_checkable
class Reward(Protocol):
    """A reward function for answers, defined by the user; runs on the host, in Python or numpy."""

    def __call__(
        self, prompts: Sequence[PromptLike], texts: Sequence[str], /
    ) -> Sequence[float] | np.ndarray | jax.Array:
        """Returns one finite number per text; texts[i] answers prompts[i], which is as the caller gave it."""
        ...


def call_reward(reward: Reward, prompts: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
    """Calls a user's reward and checks what it returns.

    Returns:
        The rewards, float64 [B].
    """
    try:
        values = np.asarray(reward(prompts, texts))
    except Exception as error:
        what = f"reward(prompts, texts) failed for {len(texts)} texts: {type(error).__name__}: {error}"
        raise RuntimeError(what) from error
    if values.shape != (len(texts),) or values.dtype.kind not in "biuf" or not np.isfinite(values).all():
        found = values.tolist() if values.size <= 8 else f"{values.dtype}{list(values.shape)}"
        if values.shape == (len(texts),) and values.dtype.kind == "f":
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            found = f"{values[at]} for text {at}"
        raise refuse("what reward returned", found, f"{len(texts)} finite numbers, one for each text")
    return values.astype(np.float64)


def repeat_prompts(lm: LM, prompt: Any, n: int) -> list[Any]:
    """Repeats every prompt n times: n times the first, then n times the second, and so on."""
    check_lm(lm)
    n = check_whole("n", n, 1, MAX_TOKENS)
    _, single = encode_prompts(lm, prompt)
    return [one for one in ([prompt] if single else list(prompt)) for _ in range(n)]


class Effort(NamedTuple):
    """How much compute an answer may use. The answer itself may have `max_tokens` tokens at every effort.

    Attributes:
        thinking: Maximum tokens of thinking before the answer of a conversation; 0: no thinking.
        p: Probability at which the rule `threshold` accepts a token.
        steps: Maximum denoising steps per block, as a share of its tokens.
    """

    thinking: int
    p: float
    steps: float


EffortLike: TypeAlias = str | Effort
