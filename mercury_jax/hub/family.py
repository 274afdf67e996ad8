"""What a checkpoint family is: how its config.json reads, and where each of our parameters stands in its files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mercury_jax.config import ModelConfig, NoiseConfig, refuse
from mercury_jax.hub.keys import Json, Keys, check


class Leaf(NamedTuple):
    """Where one of our parameters stands in the files.

    name: the tensor's name; "{e}" where each expert has a tensor of its own; several names are joined along
        our last axis (gate and up).
    inputs: 0 for the same order of axes; k > 0 for a torch Linear, [out, in] there, whose in-axes are our
        first k axes (behind that of the experts).
    experts: ours is stacked from so many; with no "{e}" in the name the file's tensor is stacked already.
    fold: the file has so many of our last axes as one (the biases of heads).
    rows: (a, b, c) where ours are the rows [a, b) of a tensor of c rows (fused queries, keys and values).
    """

    name: str | tuple[str, ...]
    inputs: int = 0
    experts: int = 0
    fold: int = 0
    rows: tuple[int, int, int] | None = None

    def flat(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The file's shape of an array that is no matrix of a Linear: heads and their width may be one axis there."""
        return (*shape[: -self.fold], math.prod(shape[-self.fold :])) if self.fold else shape

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors that this leaf is made from."""
        parts = (self.name,) if isinstance(self.name, str) else self.name
        each = range(self.experts) if any("{e}" in p for p in parts) else range(1)
        return tuple(p.replace("{e}", str(e)) for p in parts for e in each)


class Family(NamedTuple):
    """One family of checkpoints.

    architectures: entries of config.json's list that it takes, if `fits` says yes to the rest.
    checkpoints: ids on the Hugging Face hub.
    keys: what may stand in their config.json; a function of it where its classes differ.
    config: their config.json -> ours; ValueError for what we do not build. Call `read`, which looks at the keys first.
    names: our parameters' paths ("block_0/attention/q/w") -> `Leaf`.
    noise: what it was trained with; None for an autoregressive model.
    about, block, licence: for tables; block is that of its published models.
    ignored: regular expressions of tensors that are no parameters of ours.
    export: our config -> their config.json, None where we cannot write the family.
    decoding: (config.json, generation_config.json) -> how the reference decodes, as `LM.decoding` has it.
    """

    name: str
    architectures: tuple[str, ...]
    checkpoints: tuple[str, ...]
    keys: Keys | Callable[[Json], Keys]
    config: Callable[[Json], ModelConfig]
    names: Callable[[ModelConfig], dict[str, Leaf]]
    noise: NoiseConfig | Callable[[Json], NoiseConfig] | None
    about: str = ""
    block: str = "any"
    ignored: tuple[str, ...] | Callable[[ModelConfig], tuple[str, ...]] = ()
    fits: Callable[[Json], bool] = lambda config: True
    export: Callable[[ModelConfig], dict[str, Any]] | None = None
    licence: str = "see the checkpoint"
    decoding: Callable[[Json, Json], Mapping[str, Any]] | None = None

    def read(self, config: Json, file: str = "config.json") -> ModelConfig:
        """Our config from theirs.

        Args:
            config: The object in config.json.
            file: Where it stands, for messages.

        Raises:
            ValueError: for a key that the family does not know, and for a value that we do not build.
        """
        keys = self.keys(config) if callable(self.keys) else self.keys
        check(keys, config, f"{file} ({self.name})")
        return self.config(config)

    def uses(self, tensor: str, config: ModelConfig) -> bool:
        """Whether a tensor of the file is meant to be read."""
        patterns = self.ignored(config) if callable(self.ignored) else self.ignored
        return not any(re.search(pattern, tensor) for pattern in patterns)


def need(config: Json, *keys: str) -> Any:
    """The first of `keys` that config.json has; refused by name where it has none."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise refuse(f"config.json: {keys[0]}", None, "a value: this family cannot be built without it")
