"""`train`, the call behind `mj.train` and `mercury train`: where models, data, objectives and decoding meet.

`train/` holds the loop and knows no model, and `decode/` knows no trainer; this module builds what a recipe names,
passes it to the loop, and writes the trained model. Decoding is for the previews in the log.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from mercury_jax import compilation, hub, models, noise, sharding
from mercury_jax.checkpoint import manifest
from mercury_jax.config import ModelConfig, refuse, to_dict
from mercury_jax.decode.defaults import rule_settings
from mercury_jax.decode.sample import sample
from mercury_jax.tokenizer import AnyTokenizer, Tokenizer
from mercury_jax.train import data as pipelines, distributed, loop, report
from mercury_jax.train.recipe import TrainConfig
from mercury_jax.train.step import check_objective, make_evaluator
from mercury_jax.types import LM, Model, Params

TOKENIZER = "tokenizer.model"
TOKENIZER_BYTES = 3_000_000  # of text that a new tokenizer is trained on


def train(config: TrainConfig) -> loop.TrainResult:
    """Trains as the recipe says, and leaves a model that `load` reads in `<out>/model`.

    Args:
        config: The recipe. A run of the same recipe that was interrupted continues from its last checkpoint.

    Returns:
        The step that was reached, the parameters and what was measured.

    Raises:
        ValueError: Before any compute: data that cannot be read, a tokenizer that does not fit, an objective that
            cannot score the noise, or a folder that holds another run.
    """
    compilation.prepare()
    if not isinstance(config, TrainConfig):
        raise refuse("config", config, "a TrainConfig, as a recipe's config() returns")
    report.check_wandb(config.wandb)
    # An error of one process ends all of them: the others would wait for it in a collective.
    several = (
        distributed.joined(config.join_timeout, config.heartbeat) if config.distributed else nullcontext()
    )
    with several:
        return _train(config)


def _train(config: TrainConfig) -> loop.TrainResult:
    """`train` among the processes of its job."""
    at, on, c = loop.resume_step(config), loop.mesh_of(config), config.model
    decoding = rule_settings(config.sampler)
    model = models.build(c)
    check_objective(
        config.objective,
        model,
        noise.build(config.noise, c.vocab, c.mask),
        config.batch // config.accumulate,
        config.row,
    )
    first = _first(config, on)
    tokenizer = first.tokenizer if first is not None else _tokenizer(config)
    pipelines.check_fit(tokenizer, c)
    corruption = noise.build(config.noise, c.vocab, c.mask, noise.specials(tokenizer, c.vocab))
    # The run takes over the parameters; a resumed run reads its own from the checkpoint.
    params = None if first is None or at is not None else first.params
    first = None if first is None else dataclasses.replace(first, params={})
    index, count = sharding.process_share(on)
    batches = pipelines.build(
        config.mixture, tokenizer, model.layout,
        rows=config.batch, row=config.row, seed=config.seed, index=index, count=count,
    )  # fmt: skip
    result = loop.run(
        config, model, corruption, batches,
        evaluate=_evaluator(config, model, corruption, tokenizer),
        preview=_preview(config, model, corruption, tokenizer),
        params=params,
    )  # fmt: skip
    made_by = {"recipe": config.name, "seed": config.seed, "steps": result.step}
    card = made_by if first is None else {**first.card, **made_by, "init": config.init}
    lm = LM(model, result.ema, tokenizer, corruption, config.name, card, decoding)
    hub.save(config.folder / "model", lm, config.noise)
    return result


# What says how parameters are used, not what they are: an autoregressive model becomes a diffusion model so.
FREE = ("context", "dtype", "predicts_next", "pattern", "block", "alignment", "mask")


def _first(config: TrainConfig, on: Mesh) -> LM | None:
    """The model that the run starts from, on the mesh, in fp32 at least; None for fresh parameters."""
    if not config.init:
        return None
    mask = config.model.mask
    _check_init(config, hub.config_of(config.init, mask=mask))
    dtype = "float64" if config.model.dtype == "float64" else "float32"
    own_mask = mask if mask is not None and hub.takes_mask(config.init, mask) else None
    first = hub.load(config.init, dtype=dtype, mask=own_mask, mesh=on)
    # The tokenizer of an autoregressive checkpoint has no mask: it gets the recipe's.
    return first if mask is None else dataclasses.replace(first, tokenizer=first.tokenizer.with_mask(mask))


def _check_init(config: TrainConfig, found: ModelConfig) -> None:
    """Whether the parameters of `init` fit the recipe's model: what changes none of them may differ."""
    kinds = models.kind(config.model), models.kind(found)
    if kinds[0] != kinds[1]:
        raise refuse("model", kinds[0], f"{kinds[1]}, as in init = {config.init!r}; hub.config_of() reads it")
    have, want = to_dict(found), to_dict(config.model)
    for name, value in want.items():
        if name not in FREE and have[name] != value:
            raise refuse(f"model.{name}", value, f"{have[name]!r}, as in init = {config.init!r}")


def _tokenizer(config: TrainConfig) -> Tokenizer:
    """The recipe's tokenizer, the run's own from before, or a new one trained on the data."""
    if config.tokenizer:
        return Tokenizer.load(config.tokenizer)
    path = config.folder / TOKENIZER
    if not path.exists() and jax.process_index() == 0:
        texts = pipelines.texts(config.mixture, TOKENIZER_BYTES, config.seed)
        config.folder.mkdir(parents=True, exist_ok=True)
        try:
            made = Tokenizer.train(texts, config.model.vocab)
        except ValueError as error:
            raise ValueError(f"model.vocab: {error}") from error
        manifest.replace(path, made.proto)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("tokenizer")
    return Tokenizer.load(path)


def _evaluator(
    config: TrainConfig, model: Model, corruption: noise.Corruption, tokenizer: AnyTokenizer
) -> Callable[[Params], Mapping[str, float]] | None:
    if not config.eval_every or not config.eval_batches:
        return None
    on = loop.mesh_of(config)
    index, count = sharding.process_share(on)
    held_out = pipelines.build(
        config.mixture, tokenizer, model.layout, rows=config.batch, row=config.row, seed=config.seed, split="test",
        index=index, count=count, prefetch=0,
    )  # fmt: skip
    batches = list(itertools.islice(held_out, config.eval_batches))
    run = make_evaluator(model, config.objective, corruption, jax.random.key(config.seed), on)
    return lambda params: run(params, batches)


def _preview(
    config: TrainConfig, model: Model, corruption: noise.Corruption, tokenizer: AnyTokenizer
) -> Callable[[Params], str] | None:
    """Answers to the recipe's prompts, as text for the log."""
    if not config.sample_every or not config.sample_prompts:
        return None
    prompts = [[{"role": "user", "content": p}] if config.sample_chat else p for p in config.sample_prompts]

    def preview(params: Params) -> str:
        # Of several processes the first one samples, on its own devices: `sample` knows no other process's.
        local = sharding.to_first_process(params, model.shardings)
        if local is None:
            return ""
        lm = LM(model, local, tokenizer, corruption, config.name)
        out = sample(lm, prompts, max_tokens=64, seed=config.seed)
        shown = []
        for prompt, thought, text in zip(config.sample_prompts, out.thinking, out.texts, strict=True):
            thinking = f" [{thought!r}]" if thought else ""
            shown.append(f"{prompt!r} ->{thinking} {text!r}")
        return "\n".join(shown)

    return preview
