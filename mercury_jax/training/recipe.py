"""Recipes: everything that a training run depends on, in one frozen `TrainConfig`.

A recipe file is Python that defines `config() -> TrainConfig`, so data sources and objectives are Python values. The
command line overrides all other fields: `mercury train configs/x.py --optim.lr 3e-4`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

from mercury_jax.config import (
    Alignment,
    AxisSize,
    ComputeType,
    DrafterConfig,
    ModelConfig,
    NoiseConfig,
    NonNegativeInt,
    Pattern,
    PositiveInt,
    Range,
    RematPolicy,
    ScheduleName,
    ScheduleValue,
    Share,
    ShareBelowOne,
    check_fields,
    check_pattern,
    nearest,
    refuse,
    refuse_if,
    to_dict,
)
from mercury_jax.training import find_recipe
from mercury_jax.training.data.chats import HUB, Chat
from mercury_jax.training.data.conversations import BadLines, Turns
from mercury_jax.training.data.packing import check_blocks
from mercury_jax.training.data.sources import BatchSource, DataSource, Mixture, find_paths, mixture
from mercury_jax.training.lora import LoraConfig
from mercury_jax.training.objectives.objective import Objective
from mercury_jax.training.optim import OptimConfig

Json = Any  # numbers, texts, None, and lists and dicts of them

FROZEN_TARGET = "^target/"  # `freeze` of a recipe with a drafter
VALUES = ("data", "objective", "sampler")  # fields that the command line cannot set


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the axes of the device mesh; -1 takes the devices that the other axes leave.

    Raises:
        ValueError: A size is neither -1 nor 1 or more.
    """

    data: AxisSize = -1  # divides the rows of a batch; parameters are copied
    fsdp: AxisSize = 1  # divides the rows of a batch, the parameters and the optimizer's state
    tensor: AxisSize = 1  # divides heads and hidden units
    expert: AxisSize = 1  # divides the experts of a mixture

    def __post_init__(self) -> None:
        check_fields(self, "mesh.")


@dataclass(frozen=True, kw_only=True)
class InitModel:
    """The model of the checkpoint in `init`, for a recipe that fits several sizes of a family.

    The fields change how the parameters are used, not their shapes; None keeps the value of the checkpoint. If the
    noise needs a mask id and the checkpoint has none, the id is `mask`, or by default the first id above the
    tokenizer's last one (published models round their vocabulary up).
    """

    pattern: Pattern | None = None
    block: PositiveInt | None = None
    alignment: Alignment | None = None
    predicts_next: bool | None = None
    context: PositiveInt | None = None
    dtype: ComputeType | None = None  # of the arithmetic
    mask: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "model.")

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {f.name: x for f in dataclasses.fields(self) if (x := getattr(self, f.name)) is not None}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. See `training.objectives` and `training.data` for the values of `objective` and `data`.

    `data` may be a single source instead of a mixture. A fine-tuning recipe may set `chats` instead of `data`, and take
    its model from the checkpoint in `init` (`InitModel`). All fields are checked at construction, before any compute.

    Attributes:
        name: Name of the run, whose folder is runs/<name>.
        model: Sizes of the model, or the checkpoint of `init` (`InitModel`).
        objective: Loss of a batch, from `training.objectives` or a function of one's own.
        data: Sources of text and their weights; None where `chats` is set.
        chats: Files or a dataset with conversations, instead of `data`; see `data.chat`.
        turns: Of `chats`: train on the last answer of each conversation, or on all of them.
        held_out: Of `chats`: share of the conversations that are held out, for evaluations.
        bad_lines: Lines of `chats` that are no conversation, or do not fit a row: stop, or skip them.
        noise: Noise of the diffusion, and its schedule.
        optim: Optimiser, learning rate and their schedule.
        mesh: Devices along each axis of the mesh.
        lora: Adapters beside the frozen parameters of `init`.
        freeze: Regular expression over paths of parameters that are not trained: "router"; "": none.
        drafter: Sizes of a block drafter for the model of `init`. Only the drafter is trained. None: train the model.
        steps: Number of updates.
        batch: Rows of an update, over all devices and microbatches.
        row: Positions of a row.
        blocks: Pairs (first step, block) if the block changes; (): the model's.
        accumulate: Microbatches of an update.
        remat: What is kept for the backward pass: all (none), matrix products (dots), layer inputs (full).
        ema: Decay of the parameters' moving average; 0: none.
        seed: Seed of the initial parameters, the order of the data and the noise.
        log_every: Steps between rows of metrics.jsonl.
        eval_every: Steps between evaluations on held-out data; 0: never.
        eval_batches: Batches of an evaluation.
        best: min:METRIC or max:METRIC of an evaluation, such as min:loss: the model that the run leaves is that of the
            best evaluation, not of the last step. "": of the last step.
        patience: Evaluations in a row without a better one after which the run ends; 0: it takes all steps.
        sampler: Default decoding rule of the model, from `mj.rules`; None: the one for its noise.
        sample_every: Steps between answers to `sample_prompts`; 0: never.
        sample_prompts: Prompts that the model answers during training.
        sample_chat: Whether the prompts are user turns; otherwise they are raw text to continue.
        save_every: Steps between checkpoints; the last step is always saved.
        keep: Number of newest checkpoints to keep.
        profile: First and last step of a trace in <out>/profile; 0 0: none.
        wandb: Project of Weights & Biases to log to as well; "": none.
        tokenizer: A tokenizer.model; "": trained on the data, kept in the run's folder.
        init: A saved model to start from, its tokenizer included; "": fresh parameters.
        ignore_config: Keys of config.json of `init` that change no logit, by your word.
        out: Folder of the run; "": runs/<name>.
        resume: Continue from the newest checkpoint in `out`; start a new run if `out` has no checkpoint.
        distributed: Several processes: start jax.distributed (SLURM, GKE, ... are detected).
        join_timeout: Seconds within which all processes must have started.
        heartbeat: Seconds without a heartbeat after which a process counts as dead, and the job ends.

    Raises:
        ValueError: A field is out of range.
    """

    name: str
    model: Annotated[
        ModelConfig | InitModel, "a ModelConfig, or InitModel() for that of the checkpoint in init"
    ]
    objective: Annotated[Objective, "a function, as training.objectives makes them"]
    data: Annotated[
        Mixture | DataSource | BatchSource | None,
        "what training.data makes: data.text('notes/*.txt'), data.mixture((data.stdlib(), 0.5), ...), ...",
    ] = None
    chats: str = ""
    turns: Turns = "last"
    held_out: Share = 0.0
    bad_lines: BadLines = "stop"
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    freeze: str = ""
    drafter: DrafterConfig | None = None
    steps: PositiveInt = 1000
    batch: PositiveInt = 16
    row: PositiveInt = 256
    blocks: tuple[tuple[int, int], ...] = ()
    accumulate: PositiveInt = 1
    remat: RematPolicy = "none"
    ema: ShareBelowOne = 0.999
    seed: Annotated[int, Range(0, 2**32, open_high=True), "0 .. 2**32 - 1"] = 0
    log_every: PositiveInt = 10
    eval_every: NonNegativeInt = 200
    eval_batches: NonNegativeInt = 8
    best: str = ""
    patience: NonNegativeInt = 0
    sampler: object = None
    sample_every: NonNegativeInt = 200
    sample_prompts: tuple[str, ...] = ()
    sample_chat: bool = False
    save_every: PositiveInt = 200
    keep: PositiveInt = 2
    profile: tuple[int, int] = (0, 0)
    wandb: str = ""
    tokenizer: str = ""
    init: str = ""
    ignore_config: tuple[str, ...] = ()
    out: str = ""
    resume: bool = False
    distributed: bool = False
    join_timeout: PositiveInt = 300
    heartbeat: PositiveInt = 60

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_values()
        self._check_unread()
        if self.drafter is not None and not self.freeze:
            object.__setattr__(self, "freeze", FROZEN_TARGET)
        check_pattern("freeze", self.freeze)
        if self.blocks:
            self._check_blocks()
        first, last = self.profile
        refuse_if(
            self,
            (not re.fullmatch(r"[\w.-]+", self.name), "name", "letters, digits, and . _ -"),
            (
                isinstance(self.data, BatchSource) and self.chats, "chats",
                f"none beside data = {type(self.data).__name__}",
            ),
            *(
                (
                    getattr(self, name) != default and self.data is not None and not self.chats, name,
                    f"{default} without chats; a source has its own: data.chat(..., {name}=...)",
                )
                for name, default in (("bad_lines", "stop"), ("turns", "last"), ("held_out", 0.0))
            ),
            (
                self.best and not re.fullmatch(r"(min|max):\w+", self.best), "best",
                "min:METRIC or max:METRIC, of an evaluation: min:loss, max:masked_accuracy",
            ),
            (self.best and not (self.eval_every and self.eval_batches), "best", '"" without evaluations'),
            (self.patience and not self.best, "patience", "0 without best, which names the metric"),
            (
                self.profile != (0, 0) and not 1 <= first <= last <= self.steps, "profile",
                f"first and last step, 1 <= first <= last <= steps = {self.steps}",
            ),
            (self.batch % self.accumulate, "accumulate", f"a divisor of batch = {self.batch}"),
            (
                self.drafter and self.freeze != FROZEN_TARGET, "freeze",
                f"'' or {FROZEN_TARGET!r} with a drafter, which alone is trained",
            ),
            (self.drafter and self.lora.rank, "drafter", "None with lora.rank: the target stays as it is"),
        )  # fmt: skip
        if self.lora.rank:
            muon, adamw = self.optim.optimizer == "muon", "adamw (--optim.optimizer adamw) with lora.rank"
            refuse_if(
                self.optim,
                (self.optim.base_width, "base_width", "0 with lora.rank: adapters keep their rank at every width"),
                (muon, "optimizer", f"{adamw}: Muon is not for low-rank factors"),
                prefix="optim.",
            )  # fmt: skip

    def _check_values(self) -> None:
        """Checks the arguments of the objective, and turns a single source into a mixture."""
        try:
            inspect.signature(self.objective).bind("key", "model", "params", "batch", "corruption")
        except TypeError:
            name = getattr(self.objective, "__name__", "it")
            allowed = f"a function of (key, model, params, batch, corruption). Call it: {name}()"
            raise refuse("objective", self.objective, allowed) from None
        if self.data is not None and not isinstance(self.data, Mixture | BatchSource):
            object.__setattr__(self, "data", mixture((self.data, 1.0)))

    @property
    def unread(self) -> dict[str, str]:
        """The fields of `noise` and `lora` that nothing reads, as "noise.power", each with the reason."""
        c = self.noise
        schedule = repr(c.schedule) if isinstance(c.schedule, str) else "a function"
        why = f"noise.kind = {c.kind!r} with noise.schedule = {schedule} does not read it"
        read = {"schedule": c.kind != "hybrid", "uniform": c.kind == "hybrid"}
        read["power"] = read["schedule"] and c.schedule == "polynomial"
        found = {f"noise.{name}": why for name, is_read in read.items() if not is_read}
        if not self.lora.rank:
            found |= dict.fromkeys(("lora.alpha", "lora.targets"), "without lora.rank there are no adapters")
        return found

    def _check_unread(self) -> None:
        """Refuses a value in a field that nothing reads.

        Here, and not in `NoiseConfig` or `LoraConfig`: a checkpoint of an earlier version may hold such a value.
        """
        for path, why in self.unread.items():
            part, name = path.split(".")
            config = getattr(self, part)
            if getattr(config, name) != getattr(type(config), name):
                raise refuse(path, getattr(config, name), f"its default: {why}")

    def _check_blocks(self) -> None:
        """Checks that the last of `blocks` is the block of the model, with which it is saved and evaluated."""
        check_blocks(self.blocks)
        model, (first, block) = self.model, self.blocks[-1]
        refuse_if(
            self,
            (first >= self.steps, "blocks", f"first steps below steps = {self.steps}"),
            (
                isinstance(self.data, BatchSource), "blocks",
                f"() for data = {type(self.data).__name__}, not documents",
            ),
            (
                model.pattern == "bidirectional", "blocks",
                "() for the pattern bidirectional, which trains on whole documents whatever its block is",
            ),
        )  # fmt: skip
        if isinstance(model, ModelConfig):
            refuse_if(
                self,
                (model.autoregressive, "blocks", "() for an autoregressive model: it has no mask to predict"),
                (block != model.block, "blocks", f"{model.block} as the last block, that of the model"),
            )

    @property
    def mixture(self) -> Mixture:
        """The documents of `data`, or the conversations of `chats`.

        Raises:
            ValueError: The recipe has neither, or `chats` matches no file.
        """
        if self.chats:
            if not self.chats.startswith(HUB):
                find_paths(self.chats, "chats")
            return mixture(
                (Chat(self.chats, turns=self.turns, held_out=self.held_out, bad_lines=self.bad_lines), 1.0)
            )
        if isinstance(self.data, BatchSource):
            raise refuse(
                "data", type(self.data).__name__, "documents: a mixture, or a source of training.data"
            )
        if not isinstance(self.data, Mixture):
            allowed = "files with conversations, since this recipe has no other data"
            raise refuse("chats", self.chats, allowed)
        return self.data

    @property
    def model_config(self) -> ModelConfig:
        """The config of the model.

        Raises:
            ValueError: `model` is still an `InitModel`: the checkpoint in `init` was not read.
        """
        if isinstance(self.model, InitModel):
            allowed = "a checkpoint, since this recipe takes its model from it (--init FOLDER)"
            raise refuse("init", self.init, allowed)
        return self.model

    @property
    def folder(self) -> Path:
        """The folder of the run, for checkpoints, metrics and samples."""
        return Path(self.out or f"runs/{self.name}")


def load_recipe(recipe: str | Path) -> TrainConfig:
    """Runs a recipe file, which is the user's own code, and returns the result of its `config()`.

    Args:
        recipe: A Python file, or the name of a recipe that comes with mercury_jax, such as "nano".

    Returns:
        The config. A recipe may start from another one: `dataclasses.replace(load_recipe("nano"), steps=100)`.

    Raises:
        ValueError: The file is missing, has no `config()`, or a field of its config is wrong.
    """
    path = find_recipe(recipe)
    make = runpy.run_path(str(path)).get("config")
    if not callable(make):
        raise ValueError(
            f"recipe {path} has no config(): a recipe is a Python file that defines config() -> TrainConfig"
        )
    try:
        config = make()
    except TypeError as error:
        # A misspelt keyword: Python's message names the function or class. If it is one of ours, suggest the nearest
        # name of its signature.
        found = re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", str(error))
        modules = [m for name, m in list(sys.modules.items()) if name.startswith("mercury_jax.")]
        named = (getattr(m, found[1], None) for m in modules) if found else ()
        called = next(filter(callable, named), None)
        if not found or called is None:
            raise
        known = list(inspect.signature(called).parameters)
        raise refuse(f"{found[1]} key", found[2], nearest(found[2], known)) from error
    if not isinstance(config, TrainConfig):
        allowed = f"a config() that returns a TrainConfig, not {type(config).__name__}"
        raise refuse("recipe", str(path), allowed)
    return config


def override(config: TrainConfig, argv: Sequence[str]) -> TrainConfig:
    """Applies command-line arguments such as `--optim.lr 3e-4` to a config.

    tyro parses and checks the values; on a wrong value it prints a message and exits with code 2. The fields in
    `VALUES` cannot be set here.

    Args:
        config: The config of the recipe.
        argv: The arguments.

    Returns:
        The changed config.

    Raises:
        ValueError: An argument names no field; the message suggests the nearest one.
    """
    import tyro  # only the command line needs it

    known = list(field_names(config))
    negated = [f"{head}{dot}no_{last}" for head, dot, last in (name.rpartition(".") for name in known)]
    for word in argv:
        name = word.split("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name not in [*known, "help", *negated]:
            raise refuse("option", word.split("=")[0], nearest(name, [f"--{k}" for k in known]))
    # tyro sees a class without the fields in `VALUES`, with the fields of the recipe as defaults.
    names = [f.name for f in dataclasses.fields(config) if f.name not in VALUES]
    plain = _without_values(type(config), type(config.model))
    default = plain(**{name: getattr(config, name) for name in names})
    # tyro warns about the fields in `VALUES`, whose type it does not know.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        new = tyro.cli(
            plain, default=default, args=list(argv), prog="mercury train RECIPE",
            # Experts and RoPE scaling have options where the recipe has them; they are no subcommands.
            config=(tyro.conf.SuppressFixed, tyro.conf.AvoidSubcommands), registry=_option_types(),
        )  # fmt: skip
    return dataclasses.replace(config, **{name: getattr(new, name) for name in names})


@functools.cache
def _option_types() -> Any:
    """How tyro reads a field that is a name on the command line, and in a recipe may also be a function."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    names = get_args(ScheduleName)
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def schedule(info: Any) -> Any:
        return None if info.type != ScheduleValue else PrimitiveConstructorSpec(
            nargs=1, metavar=f"{{{','.join(names)}}}", choices=names, instance_from_str=lambda words: words[0],
            is_instance=lambda value: True, str_from_instance=lambda x: [x if isinstance(x, str) else "function"],
        )  # fmt: skip

    return registry


@functools.cache
def _without_values(kind: type[TrainConfig], model: type) -> type[TrainConfig]:
    """Derives a config class for tyro, which would turn each dataclass in `VALUES` into options or subcommands.

    The fields in `VALUES` get a type that tyro does not know, and so no option. `model` gets the type that the recipe
    has, instead of the union of `ModelConfig` and `InitModel`.
    """
    import tyro

    # tyro would call the pairs [INT INT [INT INT ...]], with an empty default.
    pairs = tyro.conf.arg(
        metavar="STEP BLOCK [STEP BLOCK ...]", help_behavior_hint=lambda default: f"(default: {default or 'none'})",
        help="the first step of each block, if the block changes; none: the model's block throughout",
    )  # fmt: skip
    return dataclasses.make_dataclass(
        kind.__name__,
        [
            *((name, Any, field(default=object())) for name in VALUES),
            ("model", model),
            ("blocks", Annotated[tuple[tuple[int, int], ...], pairs], field(default=())),
        ],
        bases=(kind,),
        namespace={
            "__doc__": kind.__doc__,
            "__module__": kind.__module__,  # tyro looks up the source of this class, whose comments --help prints
            "_check_values": lambda self: None,
        },
        frozen=True,
        kw_only=True,
    )


def field_names(config: object, prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of all fields that the command line can set: `steps`, `optim.lr`, `mesh.data`.

    Args:
        config: A dataclass.
        prefix: Prefix of each name.

    Yields:
        The names, without the fields in `VALUES`.
    """
    for f in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        value = getattr(config, f.name)
        if not prefix and f.name in VALUES:
            continue
        if dataclasses.is_dataclass(value):
            yield from field_names(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name


def resolved(config: object) -> Json:
    """Converts a config to values that JSON can write, for `config.json` and checkpoints.

    Args:
        config: A config, or a value of one of its fields.

    Returns:
        Dicts, lists and plain values. A function, such as an objective, becomes its name and the values that it closed
        over, so that two configs with different arguments of an objective differ.
    """
    if isinstance(config, NoiseConfig):
        return to_dict(config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {f.name: resolved(getattr(config, f.name)) for f in dataclasses.fields(config)}
        return {"function": type(config).__qualname__, **fields} if callable(config) else fields
    if isinstance(config, dict):
        return {str(k): resolved(v) for k, v in config.items()}
    if isinstance(config, (list, tuple)):
        return [resolved(v) for v in config]
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    if not callable(config):
        return str(config)
    function = inspect.unwrap(config)  # decorators close over other things
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    closed = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return {"function": name.replace(".<locals>", ""), **{k: resolved(v) for k, v in sorted(closed.items())}}
