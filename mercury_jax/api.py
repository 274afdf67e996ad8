"""`train`, the function behind `mj.train` and `mercury train`.

The training loop in `training/` is independent of model architectures, and `decode/` is independent of training. This
module connects them: it builds the model, data and evaluation of a recipe, passes them to the loop, and saves the
trained model. Decoding is used for the preview samples in the log.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from mercury_jax import compilation, hub, models, noise, sharding
from mercury_jax.checkpoint import manifest
from mercury_jax.config import ModelConfig, RematPolicy, refuse, to_dict
from mercury_jax.decode.defaults import rule_settings
from mercury_jax.decode.sample import sample
from mercury_jax.hub.family import plain_build, writers
from mercury_jax.hub.generation import describe
from mercury_jax.hub.tokenizer import unpack
from mercury_jax.models import drafter
from mercury_jax.models.weight_quant import QuantisedWeight
from mercury_jax.tokenizer import AnyTokenizer, Tokenizer
from mercury_jax.training import data as pipelines, distributed, loop, lora, report
from mercury_jax.training.data.chats import HUB
from mercury_jax.training.data.conversations import end_of_answer
from mercury_jax.training.data.corpus import Shards
from mercury_jax.training.data.pipeline import PackedIterator
from mercury_jax.training.data.sources import find_paths
from mercury_jax.training.objectives import layout_of
from mercury_jax.training.recipe import InitModel, TrainConfig
from mercury_jax.training.step import check_objective, make_evaluator
from mercury_jax.types import LM, Model, Params

_LOG = logging.getLogger("mercury_jax")
TOKENIZER, MODEL = "tokenizer.model", "model"  # names in the run's folder
ADAPTER, DRAFTER = "adapter", "drafter"
DRAFTED_BYTES = 8 << 20  # of the training texts whose ids a drafter drafts: some six seconds of tokenising
TOKENIZER_BYTES = 3_000_000  # bytes of text that a new tokenizer is trained on


def train(config: TrainConfig) -> loop.TrainResult:
    """Trains a model by a recipe, and saves it to `<out>/model`, which `load` reads.

    With `lora.rank` only the adapters are saved, to `<out>/adapter`; `load(init, adapter=...)` merges them. With
    `drafter` only the block drafter is saved, to `<out>/drafter`, which `load_drafter` reads.

    Args:
        config: The recipe. If the folder `out` holds an interrupted run of the same recipe, training continues from its
            last checkpoint.

    Returns:
        The last step, the parameters, and the measured metrics.

    Raises:
        ValueError: Before any computation: data that cannot be read, a tokenizer that does not fit, an objective that
            cannot score the noise, a folder that holds another run, or adapters without a checkpoint in `init`.
    """
    compilation.prepare()
    if not isinstance(config, TrainConfig):
        raise refuse("config", config, "a TrainConfig, as a recipe's config() returns")
    partial = bool(config.lora.rank or config.freeze)
    if partial and not config.init:
        raise refuse(
            "init", "", "a checkpoint, for lora.rank, freeze and drafter: what is frozen is read from it"
        )
    report.check_wandb(config.wandb)
    # An error in one process must end all of them: the others would wait for it in a collective.
    several = (
        distributed.joined(config.join_timeout, config.heartbeat) if config.distributed else nullcontext()
    )
    with several:
        return _train(config)


def _train(config: TrainConfig) -> loop.TrainResult:
    """Trains; every process of the job calls it."""
    partial, adapted = bool(config.lora.rank or config.freeze), isinstance(config.model, InitModel)
    config = _with_model(config)
    _check_evaluation(config)
    at, on, c = loop.resume_step(config), loop.mesh_of(config), config.model_config
    decoding = rule_settings(config.sampler)
    model = _model(config)
    if not isinstance(config.data, pipelines.BatchSource):
        check_objective(
            config.objective,
            model,
            noise.build(config.noise, c.vocab, c.mask),
            config.batch // config.accumulate,
            config.row,
        )
    lora.partition(config.lora, config.freeze, model)  # refuses before anything is loaded
    first = _first(config, on)
    with _tokenizer_kept_by_a_run(config):
        tokenizer, origin = (
            (first.tokenizer, config.init) if first is not None else _tokenizer_and_origin(config)
        )
        pipelines.check_fit(tokenizer, c, origin)
        corruption = noise.build(config.noise, c.vocab, c.mask, noise.specials(tokenizer, c.vocab))
        lm = LM(model, {}, tokenizer, corruption, config.name, {}, decoding)
        if isinstance(config.data, pipelines.BatchSource):
            if jax.process_count() > 1:
                allowed = "documents: with several processes no model decodes yet"
                raise refuse("data", type(config.data).__name__, allowed)
            start = lm if first is None else dataclasses.replace(lm, params=first.params)
            batches, evaluate = config.data.batches(config, start), config.data.evaluator(config, lm)
        else:
            index, count = sharding.process_share(on)
            # Stages with other block sizes differ only in the layout of the rows, so all stages share one compiled
            # update.
            of_block = lambda block: models.build(dataclasses.replace(c, block=block))
            stages = [(n, layout_of(config.objective, of_block(block))) for n, block in config.blocks]
            batches = pipelines.build(
                config.mixture, tokenizer, stages or layout_of(config.objective, model),
                rows=config.batch, row=config.row, seed=config.seed, index=index, count=count,
            )  # fmt: skip
            evaluate = _evaluator(config, model, corruption, tokenizer)
    # The loop donates the parameters, so no reference to them may remain. A resumed run reads trained parameters from
    # its own checkpoint; with LoRA or frozen parameters it still needs the frozen ones of `init`.
    params = None if first is None or (at is not None and not partial) else first.params
    if config.drafter is not None:
        ids = _ids_of(config, tokenizer)
        of_drafter = jax.jit(lambda key: model.init(key)["drafter"])
        params = {"target": params, "drafter": of_drafter(jax.random.key(config.seed))}
    first = None if first is None else dataclasses.replace(first, params={})
    origin = plain_build(hub.config_of(config.init, ignore_config=config.ignore_config)) if adapted else c
    if adapted and not jax.process_index() and writers(origin) and not writers(plain_build(c)):
        _LOG.warning(
            "no family of Hugging Face's layout holds this model (%s, alignment %s, predicts_next %s): mercury_jax "
            "loads the result, and `mercury convert --to hf` will refuse it", c.pattern, c.alignment, c.predicts_next,
        )  # fmt: skip
    keeps = (
        first is not None
        and not config.sampler
        and all(
            getattr(first.model.config, name) == getattr(c, name)
            for name in ("pattern", "block", "alignment")
        )
    )
    if first is not None and first.decoding and not decoding and not keeps and jax.process_index() == 0:
        _LOG.warning(
            f"the default decoding of {config.init} ({describe(first.decoding)}) is not kept: pattern, block or "
            "alignment differ; set `sampler` in the recipe"
        )
    result = loop.run(
        config, _model(config, config.remat), corruption,
        batches,  # pyright: ignore[reportArgumentType]  `distributed.DataState` has the keys that processes share
        evaluate=evaluate if config.eval_every and config.eval_batches else None,
        preview=_preview(config, model, corruption, tokenizer),
        params=params,
    )  # fmt: skip
    made_by = {"recipe": config.name, "seed": config.seed, "steps": result.step}
    card = made_by if first is None else {**first.card, **made_by, "init": config.init}
    if first is not None and keeps and not decoding:
        decoding = first.decoding
    trained = dataclasses.replace(lm, params=result.ema, card=card, decoding=decoding)
    if config.drafter is not None:
        drafter_config = dataclasses.replace(config.drafter, ids=ids)
        made = hub.drafter_of(drafter_config, trained, result.ema["drafter"], config.name)
        hub.save_drafter(config.folder / DRAFTER, made, card=card)
    elif config.lora.rank:
        hub.save_adapter(config.folder / ADAPTER, trained, config.noise, config.init)
    else:
        hub.save(config.folder / MODEL, trained, config.noise)
    return result


def _ids_of(config: TrainConfig, tokenizer: AnyTokenizer) -> tuple[int, ...]:
    """The ids of the first 8 MB of the training texts, and the one that ends an answer; (), all, for shards."""
    if any(isinstance(source, Shards) for source, _ in config.mixture.sources):
        return ()
    found = {end_of_answer(tokenizer)}
    for text in pipelines.texts(config.mixture, DRAFTED_BYTES, config.seed):
        found.update(map(int, tokenizer.encode(text)))
    return tuple(sorted(found))


def _model(config: TrainConfig, remat: RematPolicy = "none") -> Model:
    """Builds the model of a recipe, joined to its drafter if there is one."""
    model = models.build(config.model_config, remat)
    return model if config.drafter is None else drafter.join(config.drafter, model)


def _check_evaluation(config: TrainConfig) -> None:
    """Refuses an evaluation for which no source holds anything out, before data are read or a tokenizer is made."""
    if not config.eval_every or not config.eval_batches or isinstance(config.data, pipelines.BatchSource):
        return
    sources = [source for source, _ in config.mixture.sources]
    # A source of another kind may hold something out: that is known when it is opened.
    documents = [x for x in sources if isinstance(x, pipelines.Text | pipelines.Chat) and x.kind != "stdlib"]
    if len(documents) < len(sources) or any(source.held_out for source in documents):
        return
    for source in documents:
        if source.kind != "hf" and not source.where.startswith(HUB):
            find_paths(source.where)  # a glob that matches no file is said first
    allowed = (
        "0 (no evaluation), or data with something held out for it, such as "
        'data.chat("chats.jsonl", held_out=0.05): no source of this recipe holds anything out'
    )
    raise refuse("eval_every", config.eval_every, allowed)


@contextmanager
def _tokenizer_kept_by_a_run(config: TrainConfig) -> Iterator[None]:
    """Removes a tokenizer made in this context if the run is refused: the next one may want another vocabulary."""
    path = config.folder / TOKENIZER
    had_file, had_folder = path.exists(), path.parent.exists()
    try:
        yield
    except BaseException:
        if jax.process_index() == 0 and not had_file:
            path.unlink(missing_ok=True)
            if not had_folder:
                with suppress(OSError):  # it holds something else, or was not made
                    path.parent.rmdir()
        raise


# Fields of the model config that change how parameters are used, but not the parameters themselves. A recipe may change
# them relative to `init`: this turns an autoregressive checkpoint into a diffusion model.
FREE = tuple(field.name for field in dataclasses.fields(InitModel))


def _with_model(config: TrainConfig) -> TrainConfig:
    """Replaces an `InitModel` in the recipe by the model config of the checkpoint in `init`."""
    if not isinstance(config.model, InitModel):
        return config
    if not config.init:
        allowed = "a checkpoint, since this recipe takes its model from it (--init FOLDER)"
        raise refuse("init", config.init, allowed)
    changes = config.model.changes
    found = hub.config_of(config.init, ignore_config=config.ignore_config, **changes)
    if found.mask is None and config.noise.kind != "uniform":
        # The tokenizer's own mask, else the first id that it does not name.
        tokenizer = hub.tokenizer_of(config.init, ignore_config=config.ignore_config)
        mask = tokenizer.vocab_size if tokenizer.mask is None else tokenizer.mask
        if mask >= found.vocab:
            allowed = f"an id: {config.init} has no mask, and its tokenizer names all {found.vocab} ids"
            raise refuse("model.mask", None, allowed)
        found = dataclasses.replace(found, mask=mask)
    return dataclasses.replace(config, model=found)


def _first(config: TrainConfig, on: Mesh) -> LM | None:
    """Loads the model that the run starts from onto the mesh; None if training starts from new parameters.

    Parameters are loaded in at least fp32. With LoRA, the frozen base keeps the checkpoint's dtype or is quantised.
    """
    if not config.init:
        return None
    mask, trusted = config.model_config.mask, config.ignore_config
    _check_init(config, hub.config_of(config.init, mask=mask, ignore_config=trusted))
    dtype = "float64" if config.model_config.dtype == "float64" else "float32"
    if (config.lora.rank or config.drafter) and dtype == "float32":
        dtype = None  # the base is never updated, so it needs no more precision than the checkpoint has
    fits = mask is not None and hub.takes_mask(config.init, mask, ignore_config=trusted)
    own_mask = mask if fits else None
    quantise = config.lora.quantise or None
    first = hub.load(
        config.init, dtype=dtype, mask=own_mask, mesh=on, ignore_config=trusted, quantise=quantise
    )
    weights = jax.tree.leaves(first.params, is_leaf=lambda x: isinstance(x, QuantisedWeight))
    if not config.lora.rank and any(isinstance(x, QuantisedWeight) for x in weights):
        allowed = "an unquantised checkpoint; of this one, adapters can be trained: --lora.rank 8"
        raise refuse("init", config.init, allowed)
    # The tokenizer of an autoregressive checkpoint has no mask token: the recipe's mask id is added.
    return first if mask is None else dataclasses.replace(first, tokenizer=first.tokenizer.with_mask(mask))


def _check_init(config: TrainConfig, found: ModelConfig) -> None:
    """Checks that the parameters of `init` fit the recipe's model; only the fields in `FREE` may differ."""
    kinds = models.kind(config.model_config), models.kind(found)
    if kinds[0] != kinds[1]:
        raise refuse("model", kinds[0], f"{kinds[1]}, as in init = {config.init!r}; hub.config_of() reads it")
    have, want = to_dict(found), to_dict(config.model_config)
    for name, value in want.items():
        if name not in FREE and have[name] != value:
            raise refuse(f"model.{name}", value, f"{have[name]!r}, as in init = {config.init!r}")


def tokenizer_of(config: TrainConfig) -> AnyTokenizer:
    """Finds or trains the tokenizer of a run.

    In this order: the tokenizer that the recipe names, the one that its shards were packed with, the one in the run's
    folder, or a new one trained on the data.
    """
    return _tokenizer_and_origin(config)[0]


def _tokenizer_and_origin(config: TrainConfig) -> tuple[AnyTokenizer, str]:
    """The tokenizer of `tokenizer_of`, and where it is from, for messages."""
    if config.tokenizer:
        return Tokenizer.load(config.tokenizer), f"tokenizer = {config.tokenizer!r}"
    packed = {s.where: s.tokenizer() for s, _ in config.mixture.sources if isinstance(s, Shards)}
    if len(set(packed.values())) > 1:
        raise refuse("data", ", ".join(packed), "shards that were packed with one tokenizer")
    if packed:
        return unpack(next(iter(packed.values()))), f"the tokenizer of {next(iter(packed))}"
    path = config.folder / TOKENIZER
    origin = "the tokenizer"
    if path.exists():
        origin = f"{path}, which an earlier run has left; delete this file to train a tokenizer on the data"
    elif jax.process_index() == 0:
        texts = pipelines.texts(config.mixture, TOKENIZER_BYTES, config.seed)
        try:
            made = Tokenizer.train(texts, config.model_config.vocab)
        except ValueError as error:
            # In the words of the recipe.
            raise ValueError(str(error).replace("vocab_size", "model.vocab", 1)) from error
        config.folder.mkdir(parents=True, exist_ok=True)
        manifest.replace(path, made.proto)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("tokenizer")
    return Tokenizer.load(path), origin


def _evaluator(
    config: TrainConfig, model: Model, corruption: noise.Corruption, tokenizer: AnyTokenizer
) -> Callable[[Params], Mapping[str, float]] | None:
    if not config.eval_every or not config.eval_batches:
        return None
    on = loop.mesh_of(config)
    index, count = sharding.process_share(on)
    held_out = pipelines.build(
        config.mixture, tokenizer, layout_of(config.objective, model), rows=config.batch, row=config.row,
        seed=config.seed, split="test", index=index, count=count, prefetch=0,
    )  # fmt: skip
    batches = list(itertools.islice(held_out, config.eval_batches))
    times = int(count * held_out.epochs()) if isinstance(held_out, PackedIterator) else 0
    if times > 1 and config.eval_batches > 1 and not jax.process_index():
        _LOG.warning(
            "the held-out data are small: the %d batches of an evaluation read them about %d times; --eval-batches %d "
            "reads them once", config.eval_batches, times, max(1, config.eval_batches // times),
        )  # fmt: skip
    run = make_evaluator(model, config.objective, corruption, jax.random.key(config.seed), on)
    return lambda params: run(params, batches)


def _preview(
    config: TrainConfig, model: Model, corruption: noise.Corruption, tokenizer: AnyTokenizer
) -> Callable[[Params], str] | None:
    """Makes the function that samples answers to the recipe's prompts, as text for the log."""
    if not config.sample_every or not config.sample_prompts:
        return None
    rules = lora.adapted_shardings(config.lora, config.freeze, model) if config.lora.rank else model.shardings
    prompts = [[{"role": "user", "content": p}] if config.sample_chat else p for p in config.sample_prompts]

    def preview(params: Params) -> str:
        # With several processes, process 0 samples on its own devices, since `sample` uses only local devices.
        local = sharding.to_first_process(params, rules)
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
