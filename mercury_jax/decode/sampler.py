"""Rules, logits processors and stopping criteria, and the `Sampler` that combines them.

Each of these three kinds of part is a pure function of one row. A decorator turns the function into a factory, whose
calls make the parts that a `Sampler` holds:

    @mj.rule(source="Fast-dLLM, arXiv 2505.22618")
    def threshold(key, view, memory, p: Annotated[Param, Between(0, 1)] = 0.9):
        return accept(view, view.masked & (view.stats.p_sample >= p)), memory

    sampler = Sampler(threshold(0.95), processors=(mj.processors.top_p(0.9),))

The arguments after `memory` (for a processor: after `view`) are parameters. They are the leaves of the part's pytree
and therefore traced: changing them, or giving one value per row (an array [B]), never recompiles. Parts defined in a
module are registered by name for `mj.rules`, `mercury info`, the command line and the server (`registration.py`).
`denoise.decide` calls the rule and the stopping criterion under `vmap`, once per denoising step for each row;
`view.process_logits` calls the processors, once for each chunk of the vocabulary, and `allow` twice.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import refuse
from mercury_jax.types import Hidden, Key, Params, Proposal, View, shown

Memory: TypeAlias = Any  # a pytree of arrays that a rule or a stopping criterion carries from step to step
Param: TypeAlias = float | jax.Array | np.ndarray  # one number, or one per row
Logits = Float[Array, "L V"]
NOISE = ("absorbing", "uniform")  # kinds of noise: with a mask id, and without one
# Whether a pass feeds leave-one-out masks, and whether they attend to each other ("joint") or each only to itself.
LeaveOneOutMasks: TypeAlias = bool | Literal["joint"]


# What a rule may rely on in a model and its noise, and which rule to choose where that is missing.
CAPABILITIES = {
    "leave-one-out masks": "a rule without leave-one-out predictions: they need attention_mask and positions in apply",
    "aligned logits": "a rule without leave-one-out predictions: this model's logits are shifted",
    "hidden padding": "a rule that keeps the number of tokens: apply takes neither lengths nor attention_mask, so it "
    "would see the padding of shorter rows",
    "no self-conditioning": "a rule that keeps the number of tokens: this model reads its predictions of the pass "
    "before",
    "no time": "ancestral: this model takes the time, and predicts anew in each step",
    "hybrid noise": "ancestral: the noise of this model is no mixture of masks and random tokens",
}


class Static(NamedTuple):
    """A parameter that is one array for all rows, such as a table of ids; a plain array is one number per row."""

    value: jax.Array | np.ndarray


@runtime_checkable
class RuleFunction(Protocol):
    """The function of a rule: decides the next token of each position of one row in one denoising step."""

    def __call__(self, key: Key, view: View, memory: Memory, /) -> tuple[Proposal, Memory]:
        """Computes the proposal of one row.

        Args:
            key: Key of this step and row.
            view: What the rule sees of the row's window.
            memory: What the rule returned in the previous step, or its `init` at the start of the block.

        Returns:
            The proposal, and the memory for the next step, with unchanged structure, shapes and dtypes.
        """
        ...


@runtime_checkable
class LogitsProcessorFunction(Protocol):
    """The function of a logits processor: changes the logits of one row before the token statistics are computed."""

    def __call__(self, logits: Logits, view: View, /) -> Logits:
        """Changes the logits of one row.

        Args:
            logits: Logits of the window; a chunk of the vocabulary if the processor has `needs_logits=False`.
            view: What a processor sees of the window; `view.stats` is not computed yet, and None.

        Returns:
            Logits of the same shape and dtype.
        """
        ...


@runtime_checkable
class StoppingFunction(Protocol):
    """The function of a stopping criterion: decides whether a row's block is finished before its last step."""

    def __call__(
        self, view: View, proposal: Proposal, memory: Memory, /
    ) -> tuple[Bool[Array, ""] | bool, Memory]:
        """Decides whether the block of one row is finished.

        Args:
            view: What the criterion sees of the row's window, before this step.
            proposal: The proposal of the rule in this step.
            memory: What the criterion returned in the previous step, or its `init` at the start of the block.

        Returns:
            Whether the block is finished, and the memory for the next step, with unchanged structure and shapes.
        """
        ...


@runtime_checkable
class HiddenHead(Protocol):
    """A head over the hidden states of a pass, whose output a rule reads as `view.hidden` (`Rule.needs_hidden`)."""

    def __call__(self, params: Params, hidden: Hidden, /) -> Any:
        """Computes what the rule reads.

        Args:
            params: Parameters of the model.
            hidden: Hidden states of the windows, leaves [B, L, ...].

        Returns:
            Arrays [B, L, ...].
        """
        ...


def no_memory(canvas: Int[Array, "L"], vocab: int) -> Memory:
    """Returns the empty memory of a rule or stopping criterion that carries nothing from step to step."""
    return ()


# Errors that JAX raises if a function needs the value of a traced array, and the explanation that replaces them.
_TRACING_ERRORS = {
    jax.errors.TracerBoolConversionError: "decides by a traced value in Python (if, while, and, or, not); "
    "allowed: jnp.where(condition, a, b), jax.lax.cond, or & | ~",
    jax.errors.TracerIntegerConversionError: "uses a traced value as a Python int (range, a shape, a list's index); "
    "allowed: arrays of fixed shapes, with jnp.where or a comparison in place of the number",
    jax.errors.TracerArrayConversionError: "gives a traced value to numpy; allowed: the same function of jax.numpy",
    jax.errors.NonConcreteBooleanIndexError: "selects by a traced mask, which gives an unknown shape; "
    "allowed: jnp.where(mask, a, b)",
    jax.errors.ConcretizationTypeError: "needs the number behind a traced value; "
    "allowed: jax.numpy functions of fixed shapes, jnp.where, jax.lax.cond",
}


def call_part(name: str, function: Callable[..., Any], /, *args: Any, **params: Any) -> Any:
    """Calls the function of a part, and converts errors of tracing and of shapes to ValueErrors that name it.

    A user's function is first called while a loop is traced, where a Python `if` or a wrong shape would raise a long
    error about tracers. Errors of other types, such as a NameError, are not caught.

    Args:
        name: Name of the function for error messages.
        function: The function of a rule, processor, stopping criterion or cache policy, or the `init` of one.
        args: Its positional arguments.
        params: Its parameters; a `Static` is replaced by the array that it holds.

    Returns:
        What the function returns.

    Raises:
        ValueError: The function fails.
    """
    try:
        return function(*args, **{k: x.value if isinstance(x, Static) else x for k, x in params.items()})
    except (TypeError, ValueError, IndexError) as error:
        for kind, explanation in _TRACING_ERRORS.items():
            if isinstance(error, kind):
                raise ValueError(f"{name} {explanation}") from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{name} fails: {lines[0]}") from error


def part_text(part: Any) -> str:
    """Writes a part as the call that makes it, such as `ema(p=0.8, decay=0.5)`; arrays by dtype and shape."""
    value = lambda x: shown(x.value if isinstance(x, Static) else x)
    return f"{part.name}({', '.join(f'{name}={value(x)}' for name, x in dict(part.params).items())})"


def _pytree(cls: Any) -> Any:
    """Registers a dataclass as a pytree: `params` holds the leaves, and all other fields are static."""
    meta = [field.name for field in dataclasses.fields(cls) if field.name != "params"]
    return jax.tree_util.register_dataclass(cls, data_fields=["params"], meta_fields=meta)


@_pytree
@dataclass(frozen=True)
class Rule:
    """A decoding rule with its parameters; made by the factories in `mj.rules`.

    Attributes:
        function: The pure function, a `RuleFunction` with further keyword parameters.
        params: The values of these parameters.
        name: For messages and reports.
        init: init(canvas [L], vocabulary size) makes the memory at the start of each block.
        temperature: Sampling temperature unless the sampler sets one; 0: argmax.
        stopping: Makes the stopping criterion that belongs to the rule; None: the default of the noise.
        noise: The kinds of noise for which the rule is defined.
        leave_one_out: Whether the rule reads `view.leave_one_out`. Each pass then also feeds one additional mask per
            position of the window, which does not attend to the token at its own position. With True it attends to
            none of the other additional masks, with "joint" to all of them.
        needs_hidden: Whether the rule reads `view.hidden`. True: the hidden states of the window, as the model's head
            reads them, leaves [L, ...]. A function head(params, hidden): its output, such as the score [L] of a
            trained planner or remasker.
        variable_length: Whether the rule inserts or deletes positions.
        needs_logits: Whether the rule reads `view.logits`. If no part of a sampler does, a large vocabulary is
            processed in chunks, and the logits [L, V] never exist at once.
        needs: Further properties of the model that the rule relies on: names of `CAPABILITIES`.
    """

    function: Callable[..., tuple[Proposal, Memory]]
    params: dict[str, Any]
    name: str
    init: Callable[[jax.Array, int], Memory] = no_memory
    temperature: float = 0.0
    stopping: Callable[[], StoppingCriterion] | None = None
    noise: tuple[str, ...] = NOISE
    leave_one_out: LeaveOneOutMasks = False
    needs_hidden: bool | HiddenHead = False
    variable_length: bool = False
    needs_logits: bool = True
    needs: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return part_text(self)

    @property
    def requires(self) -> tuple[str, ...]:
        """The `CAPABILITIES` of a model that the rule relies on."""
        leave_one_out = ("leave-one-out masks", "aligned logits") if self.leave_one_out else ()
        moves = ("hidden padding", "no self-conditioning") if self.variable_length else ()
        return (*leave_one_out, *moves, *self.needs)

    def __call__(self, key: Key, view: View, memory: Memory) -> tuple[Proposal, Memory]:
        """Runs the rule on one row and checks shapes and dtypes of what it returns, while tracing.

        Args:
            key: Key of this step and row.
            view: What the rule sees of the row's window.
            memory: Memory from the previous step.

        Returns:
            The proposal, and the memory for the next step.

        Raises:
            ValueError: Names the rule and the field with the wrong shape or dtype.
        """
        name = f"the rule {self.name}"
        returned = call_part(name, self.function, key, view, memory, **self.params)
        if type(returned) is not tuple or len(returned) != 2 or not isinstance(returned[0], Proposal):
            allowed = "(Proposal, memory); mj.rules.accept makes a Proposal"
            raise refuse(f"what {name} returned", _describe(returned), allowed)
        length = view.canvas.shape[0]
        shapes = {"canvas": (length,), "answer": (length,), "used": (), "source": (length,)}
        for field, shape in shapes.items():
            value = getattr(returned[0], field)
            if isinstance(value, int) and shape == ():
                continue
            kind = getattr(value, "dtype", None)
            if getattr(value, "shape", None) != shape or not (kind and jnp.issubdtype(kind, jnp.integer)):
                allowed = f"whole numbers {list(shape)}, such as int32"
                raise refuse(f"{field} of the Proposal of {name}", _describe(value), allowed)
        return returned[0], _same_structure(f"memory of {name}", returned[1], memory)


@_pytree
@dataclass(frozen=True)
class LogitsProcessor:
    """A logits processor with its parameters; made by the factories in `mj.processors`.

    Attributes:
        function: The pure function, a `LogitsProcessorFunction` with further keyword parameters.
        params: The values of these parameters.
        name: For messages and reports.
        needs_logits: Whether the processor compares the logits of different ids. If not, it may be called with a chunk
            of the vocabulary, whose first column is the id `view.first_id`.
        draws_only: Whether only the draw of tokens reads the processor's logits. The statistics, such as the confidence
            that a rule compares with its threshold, are then computed without it, as are `view.logits`.
    """

    function: Callable[..., Logits]
    params: dict[str, Any]
    name: str
    needs_logits: bool = True
    draws_only: bool = False

    def __repr__(self) -> str:
        return part_text(self)

    def __call__(self, logits: Logits, view: View) -> Logits:
        """Runs the processor on one row and checks shape and dtype of what it returns, while tracing.

        Args:
            logits: Logits of the window, or of a chunk of the vocabulary.
            view: What the processor sees of the row's window.

        Returns:
            The changed logits.

        Raises:
            ValueError: Names the processor and what it returned.
        """
        name = f"the logits processor {self.name}"
        returned = call_part(name, self.function, logits, view, **self.params)
        if getattr(returned, "shape", None) != logits.shape or returned.dtype != logits.dtype:
            raise refuse(f"what {name} returned", _describe(returned), f"logits {_describe(logits)}")
        return returned


@_pytree
@dataclass(frozen=True)
class StoppingCriterion:
    """A stopping criterion with its parameters; made by the factories in `mj.stopping`.

    Attributes:
        function: The pure function, a `StoppingFunction` with further keyword parameters.
        params: The values of these parameters.
        name: For messages and reports.
        init: init(canvas [L], vocabulary size) makes the memory at the start of each block.
        needs_logits: Whether the criterion reads `view.logits`.
        keeps_decided: Whether decided tokens are final. A block then also ends with an end of text that has no mask
            before it; under other criteria the rule may still revise the tokens before it.
    """

    function: Callable[..., tuple[Bool[Array, ""] | bool, Memory]]
    params: dict[str, Any]
    name: str
    init: Callable[[jax.Array, int], Memory] = no_memory
    needs_logits: bool = True
    keeps_decided: bool = False

    def __repr__(self) -> str:
        return part_text(self)

    def __call__(self, view: View, proposal: Proposal, memory: Memory) -> tuple[Bool[Array, ""], Memory]:
        """Runs the criterion on one row and checks what it returns, while tracing.

        Args:
            view: What the criterion sees of the row's window, before this step.
            proposal: The proposal of the rule in this step.
            memory: Memory from the previous step.

        Returns:
            Whether the block is finished, and the memory for the next step.

        Raises:
            ValueError: Names the criterion and what it returned.
        """
        name = f"the stopping criterion {self.name}"
        returned = call_part(name, self.function, view, proposal, memory, **self.params)
        if type(returned) is not tuple or len(returned) != 2:
            raise refuse(f"what {name} returned", _describe(returned), "(done, memory)")
        done = jnp.asarray(returned[0]) if isinstance(returned[0], bool) else returned[0]
        if getattr(done, "shape", None) != () or getattr(done, "dtype", None) != jnp.bool_:
            raise refuse(f"done of {name}", _describe(done), "one bool")
        return done, _same_structure(f"memory of {name}", returned[1], memory)


def _same_structure(name: str, new: Memory, old: Memory) -> Memory:
    """Returns the new memory if its leaves have the structure, shapes and dtypes that `init` gave them."""
    kinds = lambda tree: [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]
    if jax.tree.structure(new) != jax.tree.structure(old) or kinds(new) != kinds(old):
        raise refuse(name, _describe(new), f"{_describe(old)}, as init made it")
    return new


def _describe(value: Any) -> str:
    """Describes a value by the shapes and dtypes of its arrays, whose numbers are unknown while tracing."""
    if isinstance(value, jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple | list):
        inner = ", ".join(_describe(x) for x in value)
        return f"{type(value).__name__}({inner})" if hasattr(value, "_fields") else f"({inner})"
    return repr(value)


# The arguments of each kind of part, by position; the parameters of a function follow them.
ARGUMENTS = {
    "rule": ("key", "view", "memory"),
    "cache policy": ("key", "view", "memory"),
    "logits processor": ("logits", "view"),
    "stopping criterion": ("view", "proposal", "memory"),
}


def function_parameters(function: Any, kind: str) -> list[inspect.Parameter]:
    """Returns the parameters of a function that follow the arguments of its kind."""
    names, title = ARGUMENTS[kind], function_title(function)
    wanted = f"({', '.join(names)})"
    if type(function) in KINDS or hasattr(function, "params"):
        raise refuse(f"function of a {kind}", f"the {kind} {title}", f"a function of {wanted}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # no function, or one that Python cannot inspect
        raise refuse(f"function of a {kind}", function, f"a function of {wanted}") from None
    # The first parameters must be the arguments of the kind, in their order; `*args` may stand for them.
    found = list(signature.parameters.values())
    positional = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = min(len(positional), len(names))
    variadic = any(p.kind is p.VAR_POSITIONAL for p in found)
    swapped = any(name in names and names.index(name) != i for i, name in enumerate(positional))
    if (count < len(names) and not variadic) or swapped or any(p.kind is p.VAR_KEYWORD for p in found):
        allowed = f"{wanted}, then parameters: ({', '.join(names)}, p=0.9)"
        raise refuse(f"arguments of the {kind} {title}", str(signature), allowed)
    return [p for p in found[count:] if p.kind is not p.VAR_POSITIONAL]


def function_title(function: Any) -> str:
    """Returns the name of a function or of a part for messages.

    Args:
        function: A function, a factory or a part.
    """
    return getattr(function, "name", None) or getattr(function, "__name__", type(function).__name__)


# `Sampler` must be a named tuple, so that JAX finds the parameters in its fields; a class of its own, because a named
# tuple cannot check its fields.
class _SamplerFields(NamedTuple):
    rule: Rule
    processors: tuple[LogitsProcessor, ...] = ()
    stopping: StoppingCriterion | None = None
    temperature: Param | None = None
    allow: tuple[LogitsProcessor, ...] = ()
    speculate: int | None = None


class Sampler(_SamplerFields):
    """How an answer is decoded: a rule, logits processors and a stopping criterion.

    A rule alone is accepted wherever a sampler is.

    Args:
        rule: Decides which positions are accepted in each step.
        processors: Change the logits before the rule reads them. A temperature processor changes the confidence that
            the rule reads; the argument `temperature` changes only the sampled tokens, and so do top-k, top-p and
            min-p (`LogitsProcessor.draws_only`).
        stopping: Decides when a block is finished early. None: the criterion of the rule, or else the default of the
            noise.
        temperature: Sampling temperature of tokens; 0: argmax. None: the temperature of the rule.
        allow: Processors that forbid ids. They run before and again after `processors`, so that none of those can
            make a forbidden id possible again.
        speculate: Maximum number of tokens to draft; the draft is verified by one causal pass of the same weights, so
            that the answer is that of autoregressive decoding. 0: no draft, plain autoregressive decoding. Only for
            models whose encoding pass was trained to predict the next token.

    Raises:
        ValueError: Names the field that holds a value of the wrong kind.
    """

    __slots__ = ()

    def __new__(
        cls,
        rule: Rule | RuleFunction,
        processors: Sequence[LogitsProcessor] = (),
        stopping: StoppingCriterion | None = None,
        temperature: Param | None = None,
        allow: Sequence[LogitsProcessor] = (),
        speculate: int | None = None,
    ) -> Sampler:
        """Checks the fields; a plain function is taken as a rule."""
        rule = _check_part("sampler.rule", rule, Rule, "a rule such as rules.threshold(0.9)")
        if stopping is not None:
            allowed = "a stopping criterion such as stopping.steady(), or None"
            stopping = _check_part("sampler.stopping", stopping, StoppingCriterion, allowed)
        lists = {"processors": processors, "allow": allow}
        allowed = "a tuple of logits processors such as (processors.top_p(0.9),)"
        for name, found in lists.items():
            if not isinstance(found, tuple | list):
                raise refuse(f"sampler.{name}", getattr(found, "name", found), allowed)
            check = lambda i, x, name=name: _check_part(f"sampler.{name}[{i}]", x, LogitsProcessor, allowed)
            lists[name] = tuple(check(i, x) for i, x in enumerate(found))
        processors, allow = lists.values()
        return super().__new__(cls, rule, tuple(processors), stopping, temperature, tuple(allow), speculate)

    @property
    def parts(self) -> tuple[Rule | LogitsProcessor | StoppingCriterion, ...]:
        """The rule, all processors, and the stopping criterion where there is one."""
        stopping = () if self.stopping is None else (self.stopping,)
        return (self.rule, *self.processors, *self.allow, *stopping)


SamplerLike: TypeAlias = Sampler | Rule | RuleFunction


def accept(view: View, which: Bool[Array, "L"], answer: Int[Array, "L"] | None = None) -> Proposal:
    """Accepts the sampled tokens at the given positions and refills the other open positions with noise.

    For absorbing noise the noise is the mask, so that these positions stay as they are. For uniform noise they get new
    random tokens.

    Args:
        view: The view of one row.
        which: Positions whose sampled token is written to the canvas.
        answer: Tokens that would be emitted now. None: the accepted and decided tokens, and the argmax elsewhere.

    Returns:
        A proposal that keeps every position where it is.

    Raises:
        ValueError: `which` is not bool [L].
    """
    length = view.canvas.shape
    if getattr(which, "shape", None) != length or getattr(which, "dtype", None) != jnp.bool_:
        raise refuse("which of mj.rules.accept", _describe(which), f"bool{list(length)}, as view.masked")
    drawn = view.stats.sample
    canvas = jnp.where(which, drawn, jnp.where(view.masked, view.noise, view.canvas))
    if answer is None:
        answer = jnp.where(which, drawn, jnp.where(view.masked, view.stats.argmax, view.canvas))
    return propose(view, canvas, answer)


def propose(view: View, canvas: Int[Array, "L"], answer: Int[Array, "L"] | None = None) -> Proposal:
    """Makes a proposal that keeps every position where it is.

    Args:
        view: The view of one row.
        canvas: The next tokens of the window, noise included.
        answer: Tokens that would be emitted now; None: the canvas.

    Returns:
        The proposal.

    Raises:
        ValueError: `canvas` or `answer` is not an integer array [L].
    """
    for name, value in (("canvas", canvas), ("answer", canvas if answer is None else answer)):
        kind = getattr(value, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.integer) or value.shape != view.canvas.shape:
            allowed = f"whole numbers {list(view.canvas.shape)}, as view.canvas"
            raise refuse(f"{name} of mj.rules.propose", _describe(value), allowed)
    at = jnp.arange(canvas.shape[0], dtype=jnp.int32)
    return Proposal(canvas, canvas if answer is None else answer, view.used, at)


def check_sampler(sampler: Any) -> Sampler:
    """Checks that the fields of a sampler hold parts of the right kind, and converts a rule to a sampler.

    Args:
        sampler: A `Sampler`, a `Rule`, or a plain function with the signature of a rule.
    """
    if isinstance(sampler, Sampler):
        return Sampler(*sampler)  # `_replace` does not check
    allowed = "a rule such as rules.threshold(0.9), or a Sampler"
    return Sampler(_check_part("sampler", sampler, Rule, allowed))


KINDS = {Rule: "rule", LogitsProcessor: "logits processor", StoppingCriterion: "stopping criterion"}


def _check_part(field: str, part: Any, kind: type, allowed: str) -> Any:
    """Returns the part if it is of this kind; where a rule is expected, a plain function becomes one."""
    if isinstance(part, kind):
        return part
    if type(part) in KINDS:
        raise refuse(field, f"the {KINDS[type(part)]} {part.name}", allowed)
    if hasattr(part, "params"):  # a factory
        raise refuse(field, f"{part.__name__} without its call", f"{part.__name__}()")
    if kind is Rule and callable(part) and not isinstance(part, type):
        if parameters := [p for p in function_parameters(part, "rule") if p.default is p.empty]:
            found = f"a function with the parameter {parameters[0].name}"
            raise refuse(field, found, "one without; see mj.rule")
        return Rule(part, {}, function_title(part))
    raise refuse(field, part, allowed)


def broadcast_params(tree: Any, rows: int, n: int = 1) -> Any:
    """Broadcasts every parameter of a sampler to one value per row.

    Args:
        tree: A sampler or a part. Numbers are repeated for all rows; arrays must have one entry per prompt.

    Returns:
        The same tree with arrays [B, ...]; JAX arrays where the parameter is one, else numpy arrays.
    """

    def widen(path: Any, x: Any) -> Any:
        # numpy unless the parameter is a JAX array: for a small request, dispatching a call of jnp would cost the host
        # more than everything else.
        array = x.value if isinstance(x, Static) else x
        xp = jnp if isinstance(array, jax.Array) else np
        array = xp.asarray(array, dtypes.canonicalize_dtype(jnp.result_type(array)))
        if isinstance(x, Static):
            return Static(xp.broadcast_to(array, (rows, *array.shape)))
        if array.ndim == 0:
            return xp.broadcast_to(array, (rows,))
        if array.shape[0] * n != rows:
            name = str(getattr(path[-1], "key", getattr(path[-1], "name", path[-1])))
            allowed = f"a number, or one for each of the {rows // n} {'rows' if n == 1 else 'prompts'}"
            raise refuse(f"shape of {name}", list(array.shape), allowed)
        return array if n == 1 else xp.repeat(array, n, axis=0)

    return jax.tree_util.tree_map_with_path(widen, tree, is_leaf=lambda x: isinstance(x, Static))
