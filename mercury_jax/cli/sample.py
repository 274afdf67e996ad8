"""`mercury sample`: continue texts, or answer messages."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mercury_jax.cli import options, show
from mercury_jax.cli.parser import Parser, whole
from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.decode.sample import Output
    from mercury_jax.types import LM

MORE = """\
examples:
  mercury sample "def fibonacci(n):"
  mercury sample "347+585=" --chat                  as a user's message: the model answers it
  mercury sample "def f(x):" --rule threshold --p 0.6   accept more tokens a pass, less carefully
  mercury sample "def f(x):" --rule ancestral --steps 64 --top-p 0.9 --frequency 0.5
  mercury sample "347+585=" --chat --effort low     think first, within the room of that effort
  cat prompt.txt | mercury sample - --json

In a terminal you see the canvas after every pass. Piped, only the text is printed; figures go to
standard error. The seconds of a first call are mostly compilation: --warm leaves them out."""


def parser() -> Parser:
    p = Parser("sample", "Continue each PROMPT, or answer it.", MORE)
    p.add_argument("prompt", nargs="+", metavar="PROMPT", help="a text; - reads standard input")
    options.loaded(p)
    p.add_argument("--chat", action="store_true", help="wrap each prompt as a user's message")
    p.add_argument(
        "--max-tokens", type=whole, default=64, metavar="N", help="most tokens to emit (default 64)"
    )
    options.text(p)
    options.decoding(p, seed="prompt i draws from seed + i (default 0); same seed, same text")
    options.temperature(p)
    options.shaping(p)
    p.add_argument(
        "--effort",
        metavar="NAME",
        help="instant, low, medium or high: step budget, strictness and room for thinking",
    )
    p.add_argument(
        "--logprobs",
        type=whole,
        metavar="K",
        help="with --json: log-probability of each token, and K alternatives",
    )
    p.add_argument("--no-live", action="store_true", help="print the text only when it is done")
    p.add_argument("--warm", action="store_true", help="decode once before, so that no compilation is timed")
    options.machine(p)
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv, late=options.knobs)
    texts = [options.read(word, args.escapes) for word in args.prompt]
    if not args.escapes and any("\\n" in text for text in texts):
        show.say(r"the prompt holds a backslash and an n; --escapes reads \n as a line break")
    for text in texts:
        if not text:
            raise refuse("PROMPT", text, "a text of at least one character")
    chosen, more = options.sampler(args), options.shapers(args)
    _check(args)
    how: dict[str, Any] = dict(
        max_tokens=args.max_tokens, plan=options.plan(args), temperature=args.temperature, effort=args.effort,
        logit_bias=options.bias(args),
    )  # fmt: skip
    batch = dict(guidance=args.guidance, negative=args.negative, logprobs=args.logprobs)
    lm = show.load(args.model, **options.reading(args))
    how["sampler"] = options.shaped(chosen, more, lm)
    asked: list[Any] = [[{"role": "user", "content": t}] for t in texts] if args.chat else texts
    if show.lively(args) and args.guidance is None:
        _watch(lm, args, texts, asked, how)
    else:
        _print(lm, args, asked, how | batch)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse numbers that no model takes, before one is loaded."""
    from mercury_jax.decode.defaults import find_effort
    from mercury_jax.decode.inputs import MAX_TOKENS, check_logprobs

    options.check(args)
    find_effort(args.effort)
    check_logprobs(args.logprobs)
    if args.logprobs is not None and not args.json:
        raise refuse("--logprobs", args.logprobs, "with --json")
    if not 1 <= args.max_tokens <= MAX_TOKENS:
        raise refuse("--max-tokens", args.max_tokens, f"1..{MAX_TOKENS}")
    if args.guidance is not None and not math.isfinite(args.guidance):
        raise refuse("--guidance", args.guidance, "a finite number")
    if args.negative is not None and args.guidance is None:
        raise refuse("--negative", args.negative, "a text beside --guidance W")


def _print(lm: LM, args: argparse.Namespace, asked: list[Any], how: dict[str, Any]) -> None:
    """All prompts in one batch; their texts, or a record of each."""
    out = _timed(lm, asked, args.seed, args.warm, how)
    for i, text in enumerate(out.texts):
        if args.json:
            show.emit(_record(out, i, args))
        else:
            print(show.readable(text) if show.terminal() else text)
            if out.thinking[i] and not text.strip():
                show.say(
                    f"no answer follows the thinking ({out.finish[i]}): {out.thinking[i]!r}; --max-tokens gives room"
                )
    if not args.json:
        note = "" if args.warm else ", compilation included"
        show.say(show.figures(sum(out.lengths), int(out.forwards.sum()), out.seconds, note))


def _timed(lm: LM, asked: Any, seed: int, warm: bool, how: dict[str, Any]) -> Output:
    from mercury_jax.decode.sample import sample

    if warm:
        with show.waiting("compiling"):
            sample(lm, asked, seed=seed, **how)
    with show.waiting("decoding"):
        return sample(lm, asked, seed=seed, **how)


def _record(out: Output, i: int, args: argparse.Namespace) -> dict[str, Any]:
    """seconds: of the whole call, which decoded `batch` prompts together; the rates are this prompt's."""
    tokens, forwards = out.lengths[i], int(out.forwards[i])
    return {
        "text": out.texts[i],
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / max(forwards, 1),
        "seconds": out.seconds,
        "tokens_per_second": tokens / max(out.seconds, 1e-9),
        "finish": out.finish[i],
        "thinking": out.thinking[i],
        "seed": args.seed + i,
        "batch": len(out.texts),
        "compilation_included": not args.warm,
    } | ({} if out.logprobs is None else {"logprobs": _logprobs(out, i)})


def _logprobs(out: Output, i: int) -> list[dict[str, Any]]:
    assert out.logprobs is not None
    found = out.logprobs[i]
    return [
        {
            "id": int(t),
            "logprob": float(p),
            "top": [[int(a), float(b)] for a, b in zip(ids, top, strict=True)],
        }
        for t, p, ids, top in zip(out.tokens[i], found.tokens, found.top_ids, found.top, strict=True)
    ]


def _watch(lm: LM, args: argparse.Namespace, texts: list[str], asked: list[Any], how: dict[str, Any]) -> None:
    """One prompt after the other, live."""
    from rich.console import Console

    from mercury_jax.cli import live
    from mercury_jax.decode.stream import stream

    console = Console(highlight=False)
    for i, (text, prompt) in enumerate(zip(texts, asked, strict=True)):
        before = text + "\n" if args.chat else text
        room = min(args.max_tokens, args.block or lm.model.config.block)
        moments = stream(lm, prompt, seed=args.seed + i, **how)
        last = live.follow(console, lm.tokenizer, before, room, moments)
        seconds = _timed(lm, prompt, args.seed + i, True, how).seconds if args.warm else None
        note = "" if args.warm else "; --warm measures the speed"
        console.print(show.figures(len(last.tokens), last.forwards, seconds, note), style="dim")
