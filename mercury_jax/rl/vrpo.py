"""VRPO: preference optimisation of diffusion models with variance reduction (LLaDA 1.5, arXiv 2505.19223).

DPO (arXiv 2305.18290) compares log p of two answers under the policy and a reference policy. A masked diffusion model
replaces log p by a Monte Carlo estimate of the ELBO. The log-sigmoid is not linear, so the variance of that estimate
also biases the loss. VRPO reduces the variance: several noise levels with one mask each, and the same masks for the
policy and the reference.

`Preferences` reads the data from JSONL files: prompts with a chosen and a rejected answer. A line is {"prompt": text,
"chosen": text, "rejected": text}, or {"messages": [...], "chosen": ..., "rejected": ...} with a conversation that both
answers continue. The pairs of a batch and the seed of its masks depend on the step only, so a resumed run continues
exactly.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import PositiveFloat, PositiveInt, ShareBelowOne, check_fields, refuse, refuse_if
from mercury_jax.decode import inputs
from mercury_jax.decode.rollout import AnswerBatch, answer_batch, pad_answers, token_log_probs
from mercury_jax.decode.state import ArrayLike
from mercury_jax.noise import Corruption
from mercury_jax.rl.rollouts import PolicyBatches, copy_params, seed_of
from mercury_jax.tasks.task import read_json_lines
from mercury_jax.training.data.conversations import end_of_answer, read_string
from mercury_jax.training.data.packing import DataSplit
from mercury_jax.training.data.sources import find_paths, side_of
from mercury_jax.training.recipe import TrainConfig
from mercury_jax.types import LM, Key, Loss, Model, Params


class PreferenceBatch(NamedTuple):
    """Pairs of answers to the same prompt, the preferred one first: what `VRPO` scores.

    Attributes:
        answers: Answers laid out for the model, padded to S tokens each; every leaf is [B, 2, ...].
        seed: Seed of the masks; the same value in all rows of a microbatch.
        reference: ELBO of each answer under the reference policy, estimated with the same masks, in nats.
    """

    answers: AnswerBatch
    seed: Int[np.ndarray, "B"]
    reference: Float[np.ndarray, "B 2"]

    @property
    def editable(self) -> Bool[Array, "B 2 S"]:
        """Marks the answer tokens, which the loop counts as scored tokens."""
        return jnp.arange(self.answers.slots.shape[-1]) < jnp.asarray(self.answers.lengths)[..., None]


@dataclass(frozen=True, kw_only=True)
class VRPO:
    """DPO loss on ELBO estimates (VRPO, arXiv 2505.19223).

        -log sigmoid(beta [(B(chosen) - B_ref(chosen)) - (B(rejected) - B_ref(rejected))]), averaged over pairs.

    B is the "elbo" estimate of `mj.rl.token_log_probs`, summed over the answer. The three variance reductions of the
    paper are all used: the budget of `samples` forward passes goes to different noise levels, each level has one mask,
    and the policy and the reference see the same masks (antithetic sampling). The levels are stratified in addition.

    Attributes:
        beta: Strength of the regularisation towards the reference policy (DPO's beta).
        samples: Masks drawn for each answer. Each costs a forward and a backward pass.

    Raises:
        ValueError: A field is out of range.
    """

    beta: PositiveFloat = 0.1
    samples: PositiveInt = 8

    def __post_init__(self) -> None:
        check_fields(self)

    def bounds(self, lm: LM, params: Params, answers: AnswerBatch, seed: ArrayLike) -> Float[Array, "B 2"]:
        """Estimates the ELBO of both answers of each pair.

        Args:
            lm: Model and noise; its own parameters are not read.
            params: Parameters of the policy to evaluate.
            answers: `PreferenceBatch.answers`, leaves [B, 2, ...].
            seed: Seed of the masks [B], the same value in all rows.

        Returns:
            The bound on log p of each answer in nats [B, 2].
        """
        # Chosen and rejected answers become rows of one batch, so that a single pass scores both.
        both = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:]), answers)  # [2 B, ...]
        key = jax.random.key(jnp.asarray(seed)[0])
        found = token_log_probs(lm, params, both, key, estimator="elbo", samples=self.samples)  # [2 B, S]
        return found.sum(-1).reshape(-1, 2)

    def __call__(
        self, key: Key, model: Model, params: Params, batch: PreferenceBatch, corruption: Corruption
    ) -> Loss:
        """Implements `Objective` for pairs of answers."""
        del key  # masks are drawn from the batch's seed, under which the reference was estimated
        lm = LM(model, params, None, corruption)  # pyright: ignore[reportArgumentType]  # ids need no tokenizer
        # DPO's implicit reward of each answer [B, 2]: how far the policy moved from the reference on it.
        bounds = self.bounds(lm, params, batch.answers, batch.seed)
        rewards = self.beta * (bounds - jnp.asarray(batch.reference))
        margin = rewards[:, 0] - rewards[:, 1]
        rows = jnp.float32(len(margin))
        metrics = {
            "margin": (margin.sum(), rows),
            "accuracy": ((margin > 0).sum().astype(jnp.float32), rows),
            "chosen_reward": (rewards[:, 0].sum(), rows),
            "rejected_reward": (rewards[:, 1].sum(), rows),
        }
        return Loss(-jax.nn.log_sigmoid(margin), jnp.ones_like(margin), metrics)


class Pair(NamedTuple):
    """Token ids of a prompt and of both answers. Each answer includes its end-of-turn or end-of-text id."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


@dataclass(frozen=True)
class Preferences:
    """Pairs of answers read from files; a batch of B rows has B pairs.

    Each epoch visits every pair once, in a new random order. The reference policy is the model in `init`.

    Attributes:
        where: A glob of JSONL files; `**` descends into folders.
        held_out: Share of the pairs used for evaluation only, selected by a hash of the line.

    Raises:
        ValueError: A field is out of range.
    """

    where: str
    _: KW_ONLY
    held_out: ShareBelowOne = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    def pairs(self, lm: LM, row: int, split: DataSplit) -> list[Pair]:
        """Reads and encodes the pairs of one split.

        Args:
            lm: Model whose tokenizer encodes the pairs and whose layout decides how many positions they need.
            row: Positions T of a row.
            split: "train", or "test" for the held-out pairs.

        Returns:
            The pairs, in the order of the files.

        Raises:
            ValueError: A line is not a pair, or does not fit a row. The message names the file and the line.
        """
        found = list[Pair]()
        for path in find_paths(self.where):
            for place, record in read_json_lines(path, "preferences"):
                if side_of(json.dumps(record), self.held_out) == split:
                    found.append(_encode(lm, row, place, record))
        return found

    def batches(self, config: TrainConfig, lm: LM) -> PolicyBatches[PreferenceBatch]:
        """Implements `BatchSource`.

        Args:
            config: The recipe; its objective is `VRPO`.
            lm: The model that the run starts from; its parameters are the reference policy.

        Returns:
            An endless iterator of `PreferenceBatch`.

        Raises:
            ValueError: The objective is not `VRPO`, there is no model to start from, or the files do not fit.
        """
        if not isinstance(config.objective, VRPO):
            allowed = "rl.VRPO, for data that are rl.Preferences"
            raise refuse("objective", type(config.objective).__name__, allowed)
        evaluated = config.eval_every and config.eval_batches
        refuse_if(
            config,
            (not config.init, "init", "a model: it is the reference policy, and training starts from it"),
            (evaluated and not self.held_out, "eval_every", "0 where held_out of rl.Preferences is 0"),
        )
        pairs = self.pairs(lm, config.row, "train")
        if not pairs:
            raise refuse("preferences", self.where, "files with at least one pair to train on")
        reference, lm = copy_params(lm.params), dataclasses.replace(lm, params={})
        return PolicyBatches(functools.partial(_draw, config, config.objective, lm, reference, pairs))

    def evaluator(self, config: TrainConfig, lm: LM) -> Callable[[Params], Mapping[str, float]]:
        """Implements `BatchSource`.

        Args:
            config: The recipe: number of pairs, and seed of the masks.
            lm: The model.

        Returns:
            A function of the parameters. `accuracy` is the share of held-out pairs whose chosen answer has the larger
            ELBO, `gap` the mean difference in nats.
        """
        return functools.partial(_preferred, self, config, lm)


def _encode(lm: LM, row: int, place: str, record: Mapping[str, object]) -> Pair:
    prompt: Any = record.get("messages", record.get("prompt"))
    if ("messages" in record) == ("prompt" in record):
        allowed = "either prompt or messages, with chosen and rejected"
        raise refuse(f"{place}: keys", ", ".join(record), allowed)
    if "prompt" in record:
        read_string(f"{place}: prompt", prompt)
    answers = [read_string(f"{place}: {name}", record.get(name)) for name in ("chosen", "rejected")]
    if answers[0] == answers[1]:
        raise refuse(f"{place}: rejected", answers[1], "another text than chosen")
    tok = lm.tokenizer
    end = end_of_answer(tok) if "messages" in record else tok.eos
    try:
        [before], _ = inputs.encode_prompts(lm, [prompt])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    pair = Pair(list(before.ids), *([*tok.encode(answer), end] for answer in answers))
    # Checked for every line before training starts, not when the pair is first drawn.
    for answer in pair[1:]:
        ids = np.zeros(len(pair.prompt) + len(answer), np.int32)
        needs = len(lm.model.layout(ids, len(pair.prompt), all_clean=False).tokens)
        if needs > row:
            raise refuse("row", row, f"{needs} positions or more, for {place}")
    return pair


def _lay_out(lm: LM, pairs: list[Pair], row: int, width: int) -> AnswerBatch:
    """Lays out pairs as arrays of one shape: leaves [B, 2, ...], `width` tokens per answer, `row` positions."""
    # 2 B rows: the chosen and the rejected answer of a pair are neighbours, so that a reshape splits them again.
    prompts = [pair.prompt for pair in pairs for _ in range(2)]
    found = pad_answers(answer_batch(lm, prompts, [x for pair in pairs for x in pair[1:]]), row)
    # Padding up to the longest answer of all files: every batch has the same shapes, and the update compiles once.
    more = [(0, 0), (0, width - found.slots.shape[1])]
    found = found._replace(
        slots=np.pad(found.slots, more, constant_values=row),
        order=np.pad(found.order, more, constant_values=-1),
    )
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, 2, *x.shape[1:]), found)


def _draw(
    config: TrainConfig,
    objective: VRPO,
    lm: LM,
    reference: Params,
    pairs: list[Pair],
    number: int,
    params: Params,
) -> list[PreferenceBatch]:
    """Makes batch `number`, with the reference policy's ELBO of each answer."""
    del params  # the answers come from files, not from the policy
    # Pair i of the endless sequence is number i mod N of epoch i // N, in the order of that epoch.
    chosen = list[Pair]()
    for i in range(number * config.batch, (number + 1) * config.batch):
        epoch, place = divmod(i, len(pairs))
        chosen.append(pairs[_order(config.seed, epoch, len(pairs))[place]])
    answers = _lay_out(lm, chosen, config.row, _width(pairs))
    # The update splits the batch into A microbatches of rows i, i + A, i + 2A, ... and draws masks for each one from
    # the seed of its rows. The reference must see the same masks, so it is evaluated on the same microbatches.
    seed, bounds = np.zeros(config.batch, np.uint32), np.zeros((config.batch, 2), np.float32)
    for i in range(config.accumulate):
        part = slice(i, None, config.accumulate)
        seed[part] = seed_of(config.seed, 14, number, i)
        own = jax.tree.map(lambda x, part=part: x[part], answers)
        bounds[part] = _bounds(objective, lm, own, seed[part], reference)
    return [PreferenceBatch(answers, seed, bounds)]


@functools.lru_cache(2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, 15, epoch)).permutation(count)


def _width(pairs: list[Pair]) -> int:
    return max(len(answer) for pair in pairs for answer in pair[1:])


@functools.partial(jax.jit, static_argnums=0)
def _bounds(objective: VRPO, lm: LM, answers: AnswerBatch, seed: Any, params: Params) -> jax.Array:
    return objective.bounds(lm, params, answers, seed)


def _preferred(source: Preferences, config: TrainConfig, lm: LM, params: Params) -> Mapping[str, float]:
    assert isinstance(config.objective, VRPO)
    pairs = source.pairs(lm, config.row, "test")[: config.eval_batches * config.batch]
    if not pairs:
        raise refuse("held_out", source.held_out, f"a share that holds some pairs of {source.where!r} out")
    seed, gaps = np.full(config.batch, seed_of(config.seed, 16), np.uint32), list[np.ndarray]()
    for first in range(0, len(pairs), config.batch):
        some = pairs[first : first + config.batch]
        filled = some + some[-1:] * (config.batch - len(some))  # one shape compiles once
        answers = _lay_out(lm, filled, config.row, _width(pairs))
        bounds = np.asarray(_bounds(config.objective, lm, answers, seed, params))
        gaps.append((bounds[:, 0] - bounds[:, 1])[: len(some)])
    gap = np.concatenate(gaps)
    return {"accuracy": float((gap > 0).mean()), "gap": float(gap.mean())}
