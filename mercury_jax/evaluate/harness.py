"""Our models in lm-evaluation-harness, whose tasks and prompts the published tables of LLaDA and Dream use.

    python -m mercury_jax.evaluate.harness run --model mercury_jax --model_args pretrained=FOLDER --tasks gsm8k

Everything behind the module's name is the harness's own command line. Log-likelihoods are those of `mj.score`, a lower
bound for diffusion models; generation is `mj.sample`. Needs the extra `lm-eval`; no torch.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mercury_jax import hub
from mercury_jax.config import Plan, nearest, refuse
from mercury_jax.decode import presets, rules, sample as sampling, score as scoring

try:
    import lm_eval.models  # noqa: F401  registers the harness's own models, to which ours is added
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM as HarnessModel
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError(
        "mercury_jax.evaluate.harness needs lm-evaluation-harness: pip install lm_eval"
    ) from error

CONVERSATION = "mercury_jax conversation: "  # begins a prompt that the harness made of a conversation
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
logger = logging.getLogger("mercury_jax")


class Generation(NamedTuple):
    """How the harness wants one answer.

    Attributes:
        stop: Texts at which it ends.
        max_tokens: Its maximum number of tokens.
        temperature: 0 without sampling; None: the rule's own.
    """

    stop: list[str]
    max_tokens: int
    temperature: float | None


@register_model("mercury_jax")
class MercuryModel(HarnessModel):
    """A model of mercury_jax as the harness calls it.

    Args:
        preset: A function of `mj.presets` by name, such as "dream"; its parameters are further arguments, as in the
            authors' scripts: `preset=dream,max_new_tokens=256,steps=256,temperature=0.1,top_p=0.9,alg=entropy`. Its
            number of tokens and temperature win over those of the task. Not with rule, block, effort or max_gen_toks.
        guidance: Weight of classifier-free guidance, for answers and log-likelihoods: `mj.score` with `guidance`,
            `mj.sample` with `negative="masked"` (LLaDA's `cfg`).
        check_greedy: Decode each continuation to tell whether it is the greedy one, as LAMBADA asks. Otherwise this is
            reported as False.
        **parameters: Parameters of the rule, such as `p=0.9`, or of the preset.
    """

    def __init__(
        self,
        pretrained: str = "nano",
        *,
        dtype: str | None = None,
        quantise: str | None = None,
        kv: str | None = None,
        adapter: str | None = None,
        ignore_config: str | Sequence[str] = (),
        batch_size: int | str | None = 16,
        rule: str = "",
        steps: int = 0,
        block: int = 0,
        effort: str = "",
        preset: str = "",
        guidance: float = 0.0,
        max_gen_toks: int | None = None,
        samples: int = 32,
        check_greedy: bool = False,
        seed: int = 0,
        device: str | None = None,
        max_batch_size: int | None = None,
        **parameters: Any,
    ):
        super().__init__()
        del device, max_batch_size
        if not str(batch_size or 1).isdigit() or int(batch_size or 1) < 1:
            raise refuse("batch_size", batch_size, "a whole number from 1 on")
        if max_gen_toks is not None and (not isinstance(max_gen_toks, int) or max_gen_toks < 1):
            raise refuse("max_gen_toks", max_gen_toks, "a whole number from 1 on")
        if isinstance(guidance, bool) or not isinstance(guidance, int | float) or not math.isfinite(guidance):
            raise refuse("guidance", guidance, "a finite number")
        settings = {"rule": rule, "block": block, "effort": effort, "max_gen_toks": max_gen_toks}
        if preset:
            for name, value in settings.items():
                if value:
                    raise refuse(name, value, f"nothing beside preset={preset}, which sets it")
            script = _preset(preset, parameters | ({"steps": steps} if steps else {}))
            self.how = {"temperature": None, **script}  # its own, also where the task names one
        else:
            self.how = _by_rule(rule, parameters) | {
                "plan": Plan(steps=steps or None, block=block or None),
                "effort": effort or None,
            }
        self.guidance = guidance
        if guidance:
            if "guidance" in self.how:
                raise refuse("guidance", guidance, f"0 beside the guidance of preset={preset}")
            self.how |= {"guidance": guidance, "negative": "masked"}
        self.batch, self.seed, self.samples = int(batch_size or 1), seed, samples
        self.max_gen_toks, self.check_greedy = max_gen_toks or 256, check_greedy
        keys = ignore_config.split("+") if isinstance(ignore_config, str) else ignore_config
        how: Any = {"dtype": dtype, "quantise": quantise, "kv": kv, "adapter": adapter}
        self.lm = hub.load(pretrained, ignore_config=keys, **how)

    # --- conversations: the harness passes a text, so the messages travel in it

    @property
    def tokenizer_name(self) -> str:
        """Name of the chat template, under which the harness caches requests."""
        return self.lm.name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a conversation as one text, which `generate_until` and `loglikelihood` read again."""
        if not add_generation_prompt and chat_history[-1]["role"] != "assistant":
            raise refuse("add_generation_prompt", False, "True where the last message is not the assistant's")
        return CONVERSATION + json.dumps(chat_history)

    def _ids(self, context: str) -> list[int]:
        """The ids of a prompt."""
        tokenizer = self.lm.tokenizer
        if not context.startswith(CONVERSATION):
            return [*tokenizer.begin, *tokenizer.encode(context)]
        messages = json.loads(context.removeprefix(CONVERSATION))
        return tokenizer.render(messages, continue_final_message=messages[-1]["role"] == "assistant")

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a prompt and its answer. Spaces at the end of the prompt belong to the answer's first token."""
        if context.startswith(CONVERSATION):
            return self._ids(context), self.lm.tokenizer.encode(continuation)
        bare = context.rstrip(" ")
        continuation = context[len(bare) :] + continuation
        whole, prompt = self._ids(bare + continuation), self._ids(bare)
        if whole[: len(prompt)] == prompt and len(whole) > len(prompt):
            return prompt, whole[len(prompt) :]
        return prompt, self.lm.tokenizer.encode(continuation)  # a token would reach over the border

    # --- the three requests of the harness

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers prompts.

        Args:
            requests: With `args` (prompt, settings); of the settings `until`, the number of tokens, `do_sample` and
                `temperature` are read, others are refused.
        """
        wanted = [self._generation(request.args[1]) for request in requests]
        found = [""] * len(requests)
        for rows in self._batches([len(request.args[0]) for request in requests], disable_tqdm):
            hows = [wanted[i] for i in rows]
            heat = [0.0 if how.temperature is None else how.temperature for how in hows]
            prompts = [self._prompt(requests[i].args[0]) for i in rows]
            asked = {
                "max_tokens": [how.max_tokens for how in hows],
                "temperature": None if all(how.temperature is None for how in hows) else heat,
            }
            out = sampling.sample(
                self.lm, prompts, stop=[how.stop for how in hows], seed=[self.seed + i for i in rows],
                **asked | self.how,
            )  # fmt: skip
            for i, text in zip(rows, out.texts, strict=True):
                found[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return found

    def _prompt(self, context: str) -> Any:
        """A prompt as `mj.sample` takes it: a conversation, or ids."""
        if context.startswith(CONVERSATION):
            messages = json.loads(context.removeprefix(CONVERSATION))
            if messages[-1]["role"] != "assistant":
                return messages
        return self._ids(context)

    def _generation(self, settings: dict[str, Any]) -> Generation:
        """The settings of one answer, checked."""
        read = {"until", "do_sample", "temperature", *LENGTHS}
        for name in settings:
            if name not in read:
                raise refuse("generation_kwargs", name, ", ".join(sorted(read)))
        until = settings.get("until") or []
        stop = [until] if isinstance(until, str) else list(until)
        most = next((settings[name] for name in LENGTHS if name in settings), self.max_gen_toks)
        greedy = not settings.get("do_sample", False)
        temperature = None if greedy else settings.get("temperature")
        return Generation([text for text in stop if text], int(most), temperature)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Scores answers by `mj.score`."""
        if not self.check_greedy:
            logger.info("check_greedy is False: no answer is reported as the greedy one")
        pairs = [self._pair(*request.args) for request in requests]
        scores = self._scores(pairs, disable_tqdm)
        greedy = self._greedy(pairs) if self.check_greedy else [False] * len(pairs)
        found = list(zip(scores, greedy, strict=True))
        for request, one in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, one)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts. A text longer than the context is scored in parts, each behind the part before it."""
        half = self.lm.model.config.context // 2 - len(self.lm.tokenizer.begin)
        pairs, owner = [], []
        for i, request in enumerate(requests):
            ids = self.lm.tokenizer.encode(request.args[0])
            parts = [ids[at : at + half] for at in range(0, len(ids), half)]
            for before, part in zip([[], *parts], parts):
                pairs.append(([*self.lm.tokenizer.begin, *before], part))
                owner.append(i)
        found = [0.0] * len(requests)
        for i, nats in zip(owner, self._scores(pairs, disable_tqdm), strict=True):
            found[i] += nats
        return found

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]], quiet: bool) -> list[float]:
        """log p of each answer behind its prompt, in nats. All answers draw their canvases from the same seed."""
        found = [0.0] * len(pairs)
        for rows in self._batches([len(prompt) + len(answer) for prompt, answer in pairs], quiet):
            for i in rows:
                prompt, answer = pairs[i]
                score = scoring.score(
                    self.lm,
                    prompt or "",
                    answer,
                    samples=self.samples,
                    seed=self.seed,
                    guidance=self.guidance,
                )
                found[i] = float(score.log_p)
        return found

    def _greedy(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[bool]:
        """Whether one token per step at temperature 0 gives each answer."""
        found = [False] * len(pairs)
        for rows in self._batches([len(prompt) for prompt, _ in pairs], True):
            how = {
                name: self.how[name]
                for name in ("sampler", "plan", "guidance", "negative")
                if name in self.how
            }
            lengths = [len(pairs[i][1]) for i in rows]
            out = sampling.sample(
                self.lm, [pairs[i][0] for i in rows], max_tokens=lengths, temperature=0.0, **how
            )
            for i, tokens in zip(rows, out.tokens, strict=True):
                found[i] = tokens.tolist() == list(pairs[i][1])
        return found

    def _batches(self, lengths: Sequence[int], quiet: bool) -> list[list[int]]:
        """Indices in batches of similar lengths, with a progress bar."""
        from tqdm import tqdm

        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        batches = [order[at : at + self.batch] for at in range(0, len(order), self.batch)]
        return list(batches) if quiet else tqdm(batches, desc="mercury_jax")  # type: ignore[return-value]


def _by_rule(rule: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The sampler of a rule and its parameters, as an argument of `mj.sample`."""
    if rule and rule not in rules.ALL:
        raise refuse("rule", rule, nearest(rule, list(rules.ALL)))
    known = list(rules.ALL[rule].params) if rule else []
    for name in parameters:
        if name not in known:
            allowed = nearest(name, known) if known else "no further arguments without rule= or preset="
            raise refuse(f"argument of {rule or 'mercury_jax'}", name, allowed)
    return {"sampler": rules.ALL[rule](**parameters) if rule else None}


def _preset(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `mj.sample` that a preset makes of its authors' ones."""
    known = [key for key, value in vars(presets).items() if inspect.isfunction(value) and key[0] != "_"]
    known = [key for key in known if getattr(presets, key).__module__ == presets.__name__]
    if name not in known:
        raise refuse("preset", name, nearest(name, known))
    make = getattr(presets, name)
    for key in parameters:
        if key not in inspect.signature(make).parameters:
            raise refuse(f"argument of {name}", key, nearest(key, list(inspect.signature(make).parameters)))
    return make(**parameters)


def main() -> None:
    """Runs the harness's command line, with `mercury_jax` among its models."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
