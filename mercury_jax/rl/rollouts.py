"""Data that the model decodes: answers to the problems of tasks, with rewards, as batches of one shape.

`Rollouts` draws with the parameters of the run (reinforcement learning), `Trajectories` with those of a teacher
(distillation). Both are `BatchSource`s: a recipe puts one in the place of documents. Problems, seeds and prompts are a
function of the step, so a resumed run draws what it would have drawn.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.config import Plan, at_least, refuse
from mercury_jax.decode.rollout import AnswerBatch, Reward, Rollout, pad_answers, rollout
from mercury_jax.decode.sample import sample
from mercury_jax.rl.distill import FewSteps
from mercury_jax.rl.grpo import GRPO, PolicyBatch
from mercury_jax.tasks import TASKS, Problem, Split, draw
from mercury_jax.train.recipe import TrainConfig
from mercury_jax.types import LM, Params

AnyBatch = TypeVar("AnyBatch")
Keep = Callable[[Problem], bool]


def problems_of(
    tasks: Sequence[str], only: Keep | None, seed: Sequence[int], count: int, split: Split
) -> list[tuple[str, Problem]]:
    """Draws problems of several tasks in turn.

    Args:
        tasks: Their names.
        only: Which problems to keep; None: all.
        seed: Equal seeds give equal problems.
        count: How many.
        split: The side of each task.

    Returns:
        (name of the task, problem).

    Raises:
        ValueError: `only` keeps none of a thousand problems.
    """
    rng, found = np.random.default_rng(tuple(seed)), list[tuple[str, Problem]]()
    for name in (tasks[i % len(tasks)] for i in range(count)):
        drawn = (draw(TASKS[name], rng, split) for _ in range(1000))
        problem = next((p for p in drawn if only is None or only(p)), None)
        if problem is None:
            raise refuse(
                "only", only, f"a function that keeps some problems of {name}; it kept none of 1,000"
            )
        found.append((name, problem))
    return found


def chats(problems: Sequence[tuple[str, Problem]]) -> list[list[dict[str, str]]]:
    """The problems as conversations of one user turn."""
    return [[{"role": "user", "content": problem.input}] for _, problem in problems]


def task_reward(problems: Sequence[tuple[str, Problem]]) -> Reward:
    """The reward of the tasks' own checks: 1 for a right answer, else 0. Row i answers problem i * P // rows."""

    def reward(prompts: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
        each = len(texts) // len(problems)
        told = [problems[i // each] for i in range(len(texts))]
        return np.array([float(TASKS[name].check(p.input, text)) for (name, p), text in zip(told, texts)])

    return reward


@dataclass(frozen=True, kw_only=True)
class TaskAnswers:
    """Answers that a model decodes to problems with checkable answers: what `Rollouts` and `Trajectories` share.

    Attributes:
        tasks: Names of tasks, in turn; see `mercury info`.
        only: only(problem) tells which problems to keep; None: all.
        sampler: A rule or `Sampler`; None: the model's own.
        plan: Block and steps; None: the model's own.
        max_tokens: Of an answer.

    Raises:
        ValueError: A field is out of range.
    """

    tasks: tuple[str, ...]
    only: Keep | None = None
    sampler: Any = None
    plan: Plan | None = None
    max_tokens: int = 64

    def __post_init__(self) -> None:
        if not self.tasks:
            raise refuse("tasks", self.tasks, "at least one of " + ", ".join(sorted(TASKS)))
        for name in self.tasks:
            if name not in TASKS:
                raise refuse("tasks", name, ", ".join(sorted(TASKS)))
        at_least(1, max_tokens=self.max_tokens)

    def evaluator(self, config: TrainConfig, lm: LM) -> Callable[[Params], Mapping[str, float]]:
        """Implements `BatchSource`.

        Args:
            config: The recipe: seed and number of problems.
            lm: The model.

        Returns:
            params -> accuracy on validation problems, the most probable tokens decoded by the same rule and plan, and
            forward passes of an answer.
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
    """Answers that the model under training draws to problems with checkable answers; the data of `GRPO`.

    A batch of B rows has B / n problems with n answers each. Their advantages are reward - mean of the group, divided
    by its standard deviation with `scale`.

    Attributes:
        n: Answers of each problem. The rule must draw tokens: where all answers of a group are equal it teaches
            nothing, and the metric `informative` of `GRPO` says so.
        temperature: Of drawn tokens.
        updates: Updates of the model on each draw (GRPO's mu).
        scale: Whether advantages are divided by the standard deviation of their group (GRPO) or not (Dr. GRPO, arXiv
            2503.20783).
        reward: reward(prompts, texts) -> one number per text; None: 1 where the task's check accepts the text, else 0.

    Raises:
        ValueError: A field is out of range.
    """

    n: int = 8
    temperature: float = 1.0
    updates: int = 1
    scale: bool = True
    reward: Reward | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(2, n=self.n)
        at_least(1, updates=self.updates)
        if not self.temperature > 0:
            raise refuse("temperature", self.temperature, "more than 0: equal answers have no advantage")

    def batches(self, config: TrainConfig, lm: LM) -> PolicyBatches[PolicyBatch]:
        """Implements `BatchSource`.

        Args:
            config: The recipe.
            lm: The model that the run starts from; with `kl` its parameters are the reference policy.

        Returns:
            The batches.

        Raises:
            ValueError: The objective is not `GRPO`, or the batch is no multiple of n.
        """
        objective = config.objective
        if not isinstance(objective, GRPO):
            raise refuse("objective", type(objective).__name__, "rl.GRPO, for data that are rl.Rollouts")
        if config.batch % self.n:
            raise refuse("batch", config.batch, f"a multiple of n = {self.n}")
        if config.save_every % self.updates:
            raise refuse("save_every", config.save_every, f"a multiple of updates = {self.updates}")
        if config.accumulate > 1 and (self.updates > 1 or objective.kl):
            allowed = "1 with several updates or a penalty: old log-probabilities are those of whole batches"
            raise refuse("accumulate", config.accumulate, allowed)
        if objective.kl and not config.init:
            raise refuse("kl", objective.kl, "0 without `init`, the policy from which it keeps the model")
        reference, lm = copy_params(lm.params) if objective.kl else None, dataclasses.replace(lm, params={})
        make = functools.partial(self._draw, config, objective, lm, reference)
        return PolicyBatches(make, self.updates)

    def _draw(
        self, config: TrainConfig, objective: GRPO, lm: LM, reference: Params, number: int, params: Params
    ) -> list[PolicyBatch]:
        """The batches of draw `number`: the same answers, under the masks of each update."""
        lm = dataclasses.replace(lm, params=params)
        problems = problems_of(
            self.tasks, self.only, (config.seed, 11, number), config.batch // self.n, "train"
        )
        drawn = rollout(
            lm, chats(problems), n=self.n, reward=self.reward or task_reward(problems), max_tokens=self.max_tokens,
            seed=seed_of(config.seed, number), sampler=self.sampler, plan=self.plan, temperature=self.temperature,
        )  # fmt: skip
        assert drawn.rewards is not None
        grouped = drawn.rewards.reshape(-1, self.n)
        advantages = grouped - grouped.mean(1, keepdims=True)
        if self.scale:
            advantages /= grouped.std(1, keepdims=True) + 1e-4
        answers = _answers(lm, drawn, config.row)
        found = []
        for k in range(self.updates):
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

    `sampler` and `plan` say how the teacher decodes.
    """

    def batches(self, config: TrainConfig, lm: LM) -> PolicyBatches[PolicyBatch]:
        """Implements `BatchSource`.

        Args:
            config: The recipe.
            lm: The model that the run starts from, which is the teacher.

        Returns:
            The batches.

        Raises:
            ValueError: The objective is not `FewSteps`, or there is no model to start from.
        """
        if not isinstance(config.objective, FewSteps):
            raise refuse(
                "objective", type(config.objective).__name__, "rl.FewSteps, for data that are rl.Trajectories"
            )
        if not config.init:
            raise refuse("init", config.init, "a model: it is the teacher, and the student starts from it")
        teacher = dataclasses.replace(lm, params=copy_params(lm.params))
        return PolicyBatches(functools.partial(self._draw, config, teacher))

    def _draw(self, config: TrainConfig, lm: LM, number: int, params: Params) -> list[PolicyBatch]:
        del params  # the teacher's stay
        problems = problems_of(self.tasks, self.only, (config.seed, 12, number), config.batch, "train")
        drawn = rollout(
            lm, chats(problems), reward=task_reward(problems), max_tokens=self.max_tokens,
            seed=seed_of(config.seed, number), sampler=self.sampler, plan=self.plan, temperature=0.0,
        )  # fmt: skip
        assert drawn.rewards is not None
        rewards, seed = drawn.rewards.astype(np.float32), np.zeros(config.batch, np.uint32)
        return [PolicyBatch(_answers(lm, drawn, config.row), rewards, np.zeros_like(rewards), seed)]


class PolicyBatches(Generic[AnyBatch]):
    """Batches without end that need the current parameters; implements `Batches`."""

    def __init__(self, make: Callable[[int, Params], list[AnyBatch]], updates: int = 1) -> None:
        """Starts at the first batch.

        Args:
            make: make(number, current parameters) -> the batches of one draw.
            updates: Batches of a draw.
        """
        self._make, self._updates = make, updates
        self._taken, self._ahead = 0, list[AnyBatch]()
        self._params: Params = None

    def observe(self, params: Params) -> None:
        """Receives the parameters before each batch; they are not kept beyond it."""
        self._params = params

    def __next__(self) -> AnyBatch:
        if not self._ahead:
            self._ahead = self._make(self._taken // self._updates, self._params)
            del self._ahead[: self._taken % self._updates]
        self._taken, self._params = self._taken + 1, None
        return self._ahead.pop(0)

    def get_state(self) -> dict[str, Any]:
        """How many batches were taken."""
        return {"taken": self._taken}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken."""
        self._taken, self._ahead = state["taken"], []


def copy_params(params: Params) -> Params:
    """A copy: the run's first update donates what it starts from."""
    return jax.tree.map(jnp.array, params)


def seed_of(*numbers: int) -> int:
    """A seed below 2**31 that is a function of the numbers."""
    return int(np.random.default_rng(numbers).integers(2**31))


def _answers(lm: LM, drawn: Rollout, row: int) -> AnswerBatch:
    """The answers in arrays of one shape, whatever their lengths: rows of `row` positions."""
    return pad_answers(drawn.batch(lm), row)


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(objective: GRPO, lm: LM, answers: AnswerBatch, seed: Any, params: Params) -> jax.Array:
    return objective.log_probs(lm, params, answers, seed)
