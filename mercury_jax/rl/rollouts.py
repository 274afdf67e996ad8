"""Data that a model samples: answers to the problems of tasks, with rewards, as batches of one shape.

`Rollouts` samples with the current parameters (reinforcement learning), `Trajectories` with the parameters of a teacher
(distillation). Both implement `BatchSource`, so a recipe uses them as `data`. Problems, prompts and seeds depend on the
step only, so a resumed run samples what an uninterrupted one would have sampled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.config import AtLeast, Plan, PositiveFloat, PositiveInt, check_fields, refuse, refuse_if
from mercury_jax.decode.inputs import Reward
from mercury_jax.decode.rollout import AnswerBatch, Rollout, pad_answers, rollout
from mercury_jax.decode.sample import sample
from mercury_jax.rl.distill import FewSteps
from mercury_jax.rl.grpo import GRPO, PolicyBatch
from mercury_jax.tasks import TASKS, Problem, Split, draw, find
from mercury_jax.training.recipe import TrainConfig
from mercury_jax.types import LM, Params

AnyBatch = TypeVar("AnyBatch")
Keep = Callable[[Problem], bool]


def problems_of(
    tasks: Sequence[str], only: Keep | None, seed: Sequence[int], count: int, split: Split
) -> list[tuple[str, Problem]]:
    """Draws problems from several tasks, one task after the other.

    Args:
        tasks: Names of the tasks.
        only: only(problem) -> whether to keep the problem; None keeps all.
        seed: Equal seeds give equal problems.
        count: Number of problems.
        split: Which side of each task to draw from.

    Returns:
        `count` pairs (name of the task, problem).

    Raises:
        ValueError: `only` keeps none of a thousand problems.
    """
    rng, found = np.random.default_rng(tuple(seed)), list[tuple[str, Problem]]()
    for name in (tasks[i % len(tasks)] for i in range(count)):
        drawn = (draw(TASKS[name], rng, split) for _ in range(1000))
        problem = next((p for p in drawn if only is None or only(p)), None)
        if problem is None:
            allowed = f"a function that keeps some problems of {name}; it kept none of 1,000"
            raise refuse("only", only, allowed)
        found.append((name, problem))
    return found


def chats(problems: Sequence[tuple[str, Problem]]) -> list[list[dict[str, str]]]:
    """Formats problems as conversations of one user turn.

    Args:
        problems: Pairs (name of the task, problem), from `problems_of`.

    Returns:
        One list of messages per problem.
    """
    return [[{"role": "user", "content": problem.input}] for _, problem in problems]


def task_reward(problems: Sequence[tuple[str, Problem]]) -> Reward:
    """Makes a reward function of the tasks' own checks: 1 for a correct answer, else 0.

    Args:
        problems: P pairs (name of the task, problem).

    Returns:
        reward(prompts, texts) -> rewards [N]. The N texts are N / P consecutive answers to each problem.
    """

    def reward(prompts: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
        each = len(texts) // len(problems)
        told = [problems[i // each] for i in range(len(texts))]
        return np.array([float(TASKS[name].check(p.input, text)) for (name, p), text in zip(told, texts)])

    return reward


@dataclass(frozen=True, kw_only=True)
class TaskAnswers:
    """Sampled answers to problems with checkable solutions: what `Rollouts` and `Trajectories` have in common.

    Attributes:
        tasks: Names of tasks, used in turn; `mercury info` lists them.
        only: only(problem) -> whether to keep the problem; None keeps all.
        sampler: A rule or `Sampler`; None: the model's default.
        plan: Block size and denoising steps; None: the model's default.
        max_tokens: Largest number of tokens of an answer.

    Raises:
        ValueError: A field is out of range.
    """

    tasks: tuple[str, ...]
    only: Keep | None = None
    sampler: Any = None
    plan: Plan | None = None
    max_tokens: PositiveInt = 64

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.tasks:
            raise refuse("tasks", self.tasks, "at least one of " + ", ".join(sorted(TASKS)))
        for name in self.tasks:
            find(name)

    def evaluator(self, config: TrainConfig, lm: LM) -> Callable[[Params], Mapping[str, float]]:
        """Implements `BatchSource`.

        Args:
            config: The recipe: seed and number of problems.
            lm: The model.

        Returns:
            A function of the parameters. It decodes validation problems greedily with the same rule and plan;
            `accuracy` is the share of correct answers, `forwards` the mean number of forward passes per answer.
        """

        def evaluate(params: Params) -> Mapping[str, float]:
            count = config.eval_batches * config.batch
            problems = problems_of(self.tasks, self.only, (config.seed, 13), count, "validation")
            out = sample(
                dataclasses.replace(lm, params=params), chats(problems), max_tokens=self.max_tokens,
                temperature=0.0, sampler=self.sampler, plan=self.plan,
            )  # fmt: skip
            right = np.asarray(task_reward(problems)(chats(problems), out.texts))
            return {"accuracy": float(right.mean()), "forwards": float(np.mean(out.forwards))}

        return evaluate


@dataclass(frozen=True, kw_only=True)
class Rollouts(TaskAnswers):
    """Answers sampled by the model under training; the data of `GRPO`.

    A batch of B rows has B / n problems with n answers each. The advantage of an answer is its reward minus the mean
    reward of its group, divided by the group's standard deviation if `scale` is set (arXiv 2402.03300, section 4.1.2).

    Attributes:
        n: Answers per problem, the size of a group. The rule must sample tokens: a group of equal answers has no
            gradient, which the metric `informative` of `GRPO` shows.
        temperature: Sampling temperature of the tokens.
        updates: Optimizer updates on the same answers (GRPO's mu).
        scale: Divide advantages by the standard deviation of their group (GRPO), or not (Dr. GRPO, arXiv 2503.20783).
        reward: reward(prompts, texts) -> one number per text; None: 1 where the task's check accepts the text, else 0.

    Raises:
        ValueError: A field is out of range.
    """

    n: Annotated[int, AtLeast(2)] = 8
    temperature: PositiveFloat = 1.0
    updates: PositiveInt = 1
    scale: bool = True
    reward: Reward | None = None

    def batches(self, config: TrainConfig, lm: LM) -> PolicyBatches[PolicyBatch]:
        """Implements `BatchSource`.

        Args:
            config: The recipe; its objective is `GRPO`.
            lm: The model that the run starts from; with `kl` its parameters are the reference policy.

        Returns:
            An endless iterator of `PolicyBatch`.

        Raises:
            ValueError: The objective is not `GRPO`, or the recipe's batch, save_every, accumulate or init does not fit
                n, updates or kl.
        """
        objective = config.objective
        if not isinstance(objective, GRPO):
            raise refuse("objective", type(objective).__name__, "rl.GRPO, for data that are rl.Rollouts")
        shared = config.accumulate > 1 and (self.updates > 1 or objective.kl)
        refuse_if(
            config,
            (config.batch % self.n, "batch", f"a multiple of n = {self.n}"),
            # A checkpoint between two updates on the same answers would have to sample them again with the parameters
            # that the first update has already replaced.
            (config.save_every % self.updates, "save_every", f"a multiple of updates = {self.updates}"),
            (
                shared, "accumulate",
                "1 with several updates or a penalty: old log-probabilities are those of whole batches",
            ),
        )  # fmt: skip
        if objective.kl and not config.init:
            raise refuse("kl", objective.kl, "0 without `init`, the policy from which it keeps the model")
        reference, lm = copy_params(lm.params) if objective.kl else None, dataclasses.replace(lm, params={})
        make = functools.partial(self._draw, config, objective, lm, reference)
        return PolicyBatches(make, self.updates)

    def _draw(
        self, config: TrainConfig, objective: GRPO, lm: LM, reference: Params, number: int, params: Params
    ) -> list[PolicyBatch]:
        """Samples answers for draw `number`; returns one batch for each update on them, with masks of its own."""
        lm = dataclasses.replace(lm, params=params)
        problems = problems_of(
            self.tasks, self.only, (config.seed, 11, number), config.batch // self.n, "train"
        )
        # Answers [B] with their rewards; the same seed on a resume draws the same answers from the same parameters.
        drawn = rollout(
            lm, chats(problems), n=self.n, reward=self.reward or task_reward(problems), max_tokens=self.max_tokens,
            seed=seed_of(config.seed, number), sampler=self.sampler, plan=self.plan, temperature=self.temperature,
        )  # fmt: skip
        assert drawn.rewards is not None
        # [B / n, n]: the n answers to one problem are consecutive rows.
        grouped = drawn.rewards.reshape(-1, self.n)
        advantages = grouped - grouped.mean(1, keepdims=True)
        if self.scale:
            advantages /= grouped.std(1, keepdims=True) + 1e-4  # a group of equal rewards has deviation 0
        answers = _answers(lm, drawn, config.row)
        found = []
        for k in range(self.updates):
            # Old and reference log-probabilities are estimated here, before any update on these answers, under the
            # masks that update k will use. With one update the old policy is the current one and needs no estimate.
            seed = np.full(len(drawn.rewards), seed_of(config.seed, number, k), np.uint32)
            estimate = functools.partial(_log_probs, objective, lm, answers, seed)
            found.append(
                PolicyBatch(
                    answers, drawn.rewards.astype(np.float32), advantages.reshape(-1).astype(np.float32), seed,
                    estimate(params) if self.updates > 1 else None, estimate(reference) if objective.kl else None,
                )
            )  # fmt: skip
        return found


@dataclass(frozen=True, kw_only=True)
class Trajectories(TaskAnswers):
    """Answers of a teacher, with the pass that accepted each token; the data of `FewSteps`.

    The teacher is the model in `init`. It decodes greedily with `sampler` and `plan`.
    """

    def batches(self, config: TrainConfig, lm: LM) -> PolicyBatches[PolicyBatch]:
        """Implements `BatchSource`.

        Args:
            config: The recipe; its objective is `FewSteps`.
            lm: The model that the run starts from, which is the teacher.

        Returns:
            An endless iterator of `PolicyBatch` without advantages.

        Raises:
            ValueError: The objective is not `FewSteps`, or there is no model to start from.
        """
        if not isinstance(config.objective, FewSteps):
            allowed = "rl.FewSteps, for data that are rl.Trajectories"
            raise refuse("objective", type(config.objective).__name__, allowed)
        if not config.init:
            raise refuse("init", config.init, "a model: it is the teacher, and the student starts from it")
        teacher = dataclasses.replace(lm, params=copy_params(lm.params))
        return PolicyBatches(functools.partial(self._draw, config, teacher))

    def _draw(self, config: TrainConfig, lm: LM, number: int, params: Params) -> list[PolicyBatch]:
        del params  # the teacher keeps its own
        problems = problems_of(self.tasks, self.only, (config.seed, 12, number), config.batch, "train")
        drawn = rollout(
            lm, chats(problems), reward=task_reward(problems), max_tokens=self.max_tokens,
            seed=seed_of(config.seed, number), sampler=self.sampler, plan=self.plan, temperature=0.0,
        )  # fmt: skip
        assert drawn.rewards is not None
        # `FewSteps` reads neither advantages nor seed: it draws masks from the recorded order with the update's key.
        rewards, seed = drawn.rewards.astype(np.float32), np.zeros(config.batch, np.uint32)
        return [PolicyBatch(_answers(lm, drawn, config.row), rewards, np.zeros_like(rewards), seed)]


class PolicyBatches(Generic[AnyBatch]):
    """An endless iterator of batches that are made with the current parameters.

    Implements `loop.Batches` and `loop.PolicyData`. Batch i belongs to draw i // updates, and a draw is a function of
    its number and the parameters, so the state of the iterator is a single number.
    """

    def __init__(self, make: Callable[[int, Params], list[AnyBatch]], updates: int = 1) -> None:
        """Starts at the first batch.

        Args:
            make: make(number of the draw, current parameters) -> the batches of the draw.
            updates: Batches per draw.
        """
        self._make, self._updates = make, updates
        self._taken, self._ahead = 0, list[AnyBatch]()
        self._params: Params = None

    def observe(self, params: Params) -> None:
        """Implements `loop.PolicyData.observe`: holds the parameters until the next batch is made.

        Args:
            params: Current parameters. The update after this batch donates them.
        """
        self._params = params

    def __next__(self) -> AnyBatch:
        if not self._ahead:
            self._ahead = self._make(self._taken // self._updates, self._params)
            del self._ahead[: self._taken % self._updates]  # taken before the run was resumed
        # The update donates the parameters: a reference kept here would point at freed buffers.
        self._taken, self._params = self._taken + 1, None
        return self._ahead.pop(0)

    def get_state(self) -> dict[str, Any]:
        """Returns {"taken": number of batches taken}, ready for JSON."""
        return {"taken": self._taken}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state.

        Args:
            state: From `get_state`.
        """
        self._taken, self._ahead = state["taken"], []


def copy_params(params: Params) -> Params:
    """Copies parameters that must outlive the first update, which donates the ones it starts from.

    Args:
        params: Parameters of the model.

    Returns:
        The same values in new buffers.
    """
    return jax.tree.map(jnp.array, params)


def seed_of(*numbers: int) -> int:
    """Derives a seed in [0, 2**31) from integers, for example the run's seed and the number of a draw."""
    return int(np.random.default_rng(numbers).integers(2**31))


def _answers(lm: LM, drawn: Rollout, row: int) -> AnswerBatch:
    """Lays out answers in arrays whose shape does not depend on their lengths: rows of `row` positions."""
    return pad_answers(drawn.batch(lm), row)


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(objective: GRPO, lm: LM, answers: AnswerBatch, seed: Any, params: Params) -> jax.Array:
    return objective.log_probs(lm, params, answers, seed)
