"""Training a part of the parameters: low-rank adapters (LoRA, arXiv 2106.09685), or the leaves that are not frozen.

A `Partition` splits the parameters into a trained and a frozen tree. `step.py` differentiates, optimises, averages and
saves only the trained tree; the frozen tree is a read-only argument of each update. `Partition.combine` merges both
into the parameters that the model reads. With LoRA, each targeted matrix becomes a `LoraWeight` of base, a and b, so
that neither base + a b nor a gradient of the base is ever computed.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from mercury_jax.config import NonNegativeInt, PositiveFloat, check_fields, check_pattern, refuse
from mercury_jax.sharding import ShardingRule, gather, matrix_axes, path_name
from mercury_jax.types import Key, LoraWeight, Model, Params, accumulation_dtype

TARGETS = r"(attention|mlp|moe)/"  # matrices of attention, of feed-forwards and of experts


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: W + (alpha / rank) A B, with W frozen and B = 0 initially (arXiv 2106.09685, section 4.1).

    Raises:
        ValueError: A field is out of range.
    """

    rank: NonNegativeInt = 0  # columns of A; 0: no adapters, all parameters are trained
    alpha: PositiveFloat | None = None  # adapters are scaled by alpha / rank; None: the rank, a factor of 1
    targets: str = TARGETS  # regular expression, searched in the paths of matrices: block_0/attention/q/w
    # Rounds the frozen matrices while they are loaded, to int8 or fp8 with a scale for each output (QLoRA, arXiv
    # 2305.14314, in another format). "": as the checkpoint has them, which may itself be quantised.
    quantise: Literal["", "int8", "fp8"] = ""

    def __post_init__(self) -> None:
        check_fields(self, "lora.")
        check_pattern("lora.targets", self.targets)
        if self.quantise and not self.rank:
            raise refuse(
                "lora.quantise", self.quantise, '"" without adapters: rounded parameters cannot be trained'
            )

    @property
    def scale(self) -> float:
        """The factor alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class Partition(NamedTuple):
    """A split of the parameters into a trained and a frozen tree.

    Attributes:
        init: init(key) -> a fresh trained tree.
        split: split(params) -> (trained tree to start from, frozen tree). The trained tree is None for adapters, which
            `init` makes. No array is copied.
        combine: combine(trained, frozen) -> the parameters that the model reads.
    """

    init: Callable[[Key], Params]
    split: Callable[[Params], tuple[Params | None, Params]]
    combine: Callable[[Params, Params], Params]


def partition(config: LoraConfig, freeze: str, model: Model) -> Partition | None:
    """Makes the partition that a recipe describes.

    Args:
        config: Adapters; rank 0 means no adapters.
        freeze: Regular expression, searched in the paths of parameters. Matching parameters are not trained and get no
            adapter. "" matches nothing.
        model: The model. A vision tower is frozen: rows have no images, so that weight decay alone would change it.

    Returns:
        The partition; None if all parameters are trained.

    Raises:
        ValueError: Nothing would be trained, or an expression matches no parameter.
    """
    if model.vision is not None:
        freeze = f"(?:{freeze})|^vision/" if freeze else "^vision/"
    if config.rank:
        return _adapters(config, freeze, model)
    return _unfrozen(freeze, model) if freeze else None


def _shapes(model: Model) -> dict[str, jax.ShapeDtypeStruct]:
    return _flat(jax.eval_shape(model.init, jax.eval_shape(jax.random.key, 0)))


def _flat(tree: Params) -> dict[str, Any]:
    """Returns the leaves of a nested dict by path, such as "block_0/attention/q/w"."""
    return flatten_dict(tree, sep="/")


# --- frozen leaves


def _unfrozen(freeze: str, model: Model) -> Partition:
    paths = list(_shapes(model))
    frozen = {path for path in paths if re.search(freeze, path)}
    if not frozen or len(frozen) == len(paths):
        allowed = f"an expression that finds some of the paths and not all: {_some(paths)}"
        raise refuse("freeze", freeze, allowed)

    def split(params: Params) -> tuple[Params, Params]:
        flat = _flat(params)
        pick = lambda wanted: unflatten_dict(
            {p: x for p, x in flat.items() if (p in frozen) == wanted}, sep="/"
        )
        return pick(False), pick(True)

    def combine(trained: Params, rest: Params) -> Params:
        return unflatten_dict(_flat(trained) | _flat(rest), sep="/")

    return Partition(lambda key: split(model.init(key))[0], split, combine)


def _some(paths: list[str]) -> str:
    """Lists some paths for an error message; the same parameter of several layers is listed once."""
    kinds = dict.fromkeys(re.sub(r"block_\d+", "block_0", path) for path in paths)
    return ", ".join(list(kinds)[:20])


# --- adapters


def target_shapes(config: LoraConfig, freeze: str, model: Model) -> dict[str, tuple[int, ...]]:
    """Finds the matrices that get an adapter: those that `config.targets` matches and `freeze` does not.

    Args:
        config: The adapters.
        freeze: Regular expression of parameters without adapters, see `partition`.
        model: The model.

    Returns:
        The shape of each matrix by path.

    Raises:
        ValueError: No matrix matches.
    """
    matrices = {path: x.shape for path, x in _shapes(model).items() if matrix_axes(path) is not None}
    kept = re.compile(freeze) if freeze else None
    found = {
        path: shape
        for path, shape in matrices.items()
        if re.search(config.targets, path) and not (kept and kept.search(path))
    }
    if not found:
        allowed = f"an expression that finds a matrix: {_some(list(matrices))}"
        raise refuse("lora.targets", config.targets, allowed)
    return found


def _adapters(config: LoraConfig, freeze: str, model: Model) -> Partition:
    shapes = target_shapes(config, freeze, model)
    # Adapters are trained parameters: they stay in the accumulation dtype even if the model computes in bf16, in which
    # small updates would be rounded away.
    dtype = accumulation_dtype(model.config.dtype)

    def init(key: Key) -> Params:
        # W is [*batch, *inputs, *outputs]; A is [*batch, *inputs, rank] and B is [*batch, rank, *outputs]. `batch` is
        # the axis of experts, each of which has an adapter of its own.
        flat: dict[str, Array] = {}
        for i, (path, shape) in enumerate(shapes.items()):
            batch, inputs, outputs = axes_of(path, shape)
            a = jax.random.normal(jax.random.fold_in(key, i), (*batch, *inputs, config.rank), dtype)
            flat[f"{path}/a"] = a * math.prod(inputs) ** -0.5
            # B = 0: training starts from exactly the function of the base model.
            flat[f"{path}/b"] = jnp.zeros((*batch, config.rank, *outputs), dtype)
        return unflatten_dict(flat, sep="/")

    def combine(adapters: Params, base: Params) -> Params:
        flat, factors = _flat(base), _flat(adapters)
        for path in shapes:
            flat[path] = LoraWeight(flat[path], factors[f"{path}/a"], factors[f"{path}/b"], config.scale)
        return unflatten_dict(flat, sep="/")

    return Partition(init, lambda params: (None, params), combine)


def axes_of(path: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Divides the shape of a matrix into batch, input and output axes.

    Args:
        path: Path of the matrix, which decides the roles of its axes (`sharding.matrix_axes`).
        shape: Shape of the matrix.

    Returns:
        Sizes of the batch axes (experts), of the contracted axes, and of the output axes.
    """
    axes = matrix_axes(path)
    assert axes is not None
    stop = axes.batch + axes.inputs
    return shape[: axes.batch], shape[axes.batch : stop], shape[stop:]


def adapted_shardings(config: LoraConfig, freeze: str, model: Model) -> tuple[ShardingRule, ...]:
    """Makes the sharding rules of a model with adapters.

    Each factor is sharded along the axes that it shares with its matrix; the axis of size rank is never sharded.

    Args:
        config: The adapters.
        freeze: Regular expression of parameters without adapters, see `partition`.
        model: The model.

    Returns:
        Rules for trees of factors, for what `Partition.combine` returns, and for the model's own parameters.
    """
    rules: dict[str, tuple[Any, ...]] = {}
    for path, shape in target_shapes(config, freeze, model).items():
        own = next(
            (axes for pattern, axes in model.shardings if re.search(pattern, path)), (None,) * len(shape)
        )
        batch, inputs, _ = map(len, axes_of(path, shape))
        pattern = re.sub(r"\d+", r"\\d+", re.escape(path))  # one rule for the same matrix of all layers
        rules[f"{pattern}/base$"] = own
        rules[f"{pattern}/a$"] = (*own[: batch + inputs], None)
        rules[f"{pattern}/b$"] = (*own[:batch], None, *own[batch + inputs :])
    return (*rules.items(), *model.shardings)


# --- checking that a resumed run has the same frozen tree


@jax.jit
def _sums(x: Array) -> Array:
    """Computes two sums over the bits of an array, modulo 2**32: one plain, one weighted by position.

    The plain sum detects a changed element, the weighted one also a permutation. Integer addition modulo 2**32 is
    associative, so the result does not depend on how the array is sharded.
    """
    kind = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    kind = jnp.uint4 if x.dtype in (jnp.int4, jnp.float4_e2m1fn) else kind
    bits = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32)  # float64: one more axis, of two words
    # The flat index of each element, made of iotas instead of a reshape, which would gather a sharded array.
    position, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        position += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    # Knuth's multiplicative hash of the position, made odd: an odd factor is invertible, so no change of bits vanishes.
    weight = (position * jnp.uint32(2654435761)) | jnp.uint32(1)
    return jnp.stack([bits.sum(dtype=jnp.uint32), (bits * weight).sum(dtype=jnp.uint32)])


def digest(params: Params) -> str:
    """Computes a fingerprint of the values of all arrays, the same on any mesh, without copying them to the host.

    It detects any change of a single element and distinguishes checkpoints. It is not cryptographic: an attacker could
    construct other arrays with the same fingerprint.

    Args:
        params: Nested dict of arrays.

    Returns:
        32 hexadecimal digits.
    """
    leaves = {path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}
    found = hashlib.sha256()
    for path in sorted(leaves):
        x = leaves[path]
        found.update(f"{path} {x.dtype} {x.shape} {gather(_sums(x)).tolist()}\n".encode())
    return found.hexdigest()[:32]
