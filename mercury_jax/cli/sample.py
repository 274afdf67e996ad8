"""`mercury sample`: continue texts, or answer messages, with one answer to each or several."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from mercury_jax import install
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import (
    Decoding,
    Escapes,
    Flag,
    Group,
    Int,
    Loading,
    OptionalFloat,
    OptionalInt,
    Positional,
    Processing,
    Repeated,
    option,
)
from mercury_jax.tokenizer import has_chat_template
from mercury_jax.viz import readable, terminal

if TYPE_CHECKING:
    from mercury_jax.decode.sample import Output
    from mercury_jax.types import LM


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Continue each PROMPT, or answer it.

    examples:
      mercury sample "def fibonacci(n):"
      mercury sample "347+585=" --chat            answer a user's message
      mercury sample "def f(x):" --rule threshold --p 0.6
                                                  accept more tokens per step
      mercury sample "def f(x):" --rule ancestral --steps 64 --top-p 0.9
      mercury sample "347+585=" --chat --effort low      think before answering
      mercury sample "def f(x):" --n 4 --temperature 1 -e --stop "\\n\\n"
                                                  four answers of one paragraph
      mercury sample "347+585=" --chat --html steps.html     every step, to share
      cat prompt.txt | mercury sample - --json

    A terminal shows the canvas after every step. In a pipe only the text is
    printed, with a blank line between two, and the figures go to standard error.
    The seconds of a first call are mostly compilation: --warm leaves it out.
    """

    prompt: Annotated[Positional[tuple[str, ...]], option("PROMPT")] = ()
    """A text; - reads standard input."""
    chat: Flag = False
    """Send each prompt as a user's message."""
    max_tokens: Int = 64
    """Most tokens to emit."""
    n: Int = 1
    """Answers to each prompt; answer j of prompt i uses seed + i N + j. They differ where --temperature is above 0."""
    stop: Annotated[Repeated[tuple[str, ...]], option("TEXT")] = ()
    """End an answer before this text; repeatable."""
    bad_words: Annotated[Repeated[tuple[str, ...]], option("TEXT")] = ()
    """A text that no answer may hold, in whatever tokens; repeatable. Not with --stop."""
    escapes: Escapes = False
    r"""Read \n, \t and \\ as Python does in PROMPT (standard input, too), --stop, --bad-words and --negative."""
    temperature: OptionalFloat = None
    """Sampling temperature; 0 takes the most likely token. Default: the rule's."""
    effort: Annotated[str | None, option("NAME")] = None
    """instant, low, medium or high: denoising steps, thresholds and the token budget for thinking."""
    logprobs: OptionalInt = None
    """With --json: the log-probability of each token, and of N alternatives."""
    no_live: Flag = False
    """Print the text only when it is complete."""
    warm: Flag = False
    """Decode once before, so that compilation is not timed."""
    json: Flag = False
    """Print one JSON object for each prompt."""
    html: Annotated[str | None, option("FILE")] = None
    """Write a page that shows the answer after every step, to open in a browser."""
    gif: Annotated[str | None, option("FILE")] = None
    """Write the same as an animated picture. Needs matplotlib."""
    decoding: Annotated[Decoding, Group] = field(default_factory=Decoding)
    processing: Annotated[Processing, Group] = field(default_factory=Processing)
    loading: Annotated[Loading, Group] = field(default_factory=Loading)


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args, parameters = arguments.read_with_rule(Sample, argv, "mercury sample")
    texts = [arguments.read_text("PROMPT", word, args.escapes) for word in args.prompt]
    sampler, processors = args.decoding.sampler(parameters), args.processing.processors()
    _check(args, texts)
    how: dict[str, Any] = dict(
        max_tokens=args.max_tokens, plan=args.decoding.plan(), temperature=args.temperature, effort=args.effort,
        logit_bias=args.processing.logit_bias(),
    )  # fmt: skip
    # A lone "-" is a text here: only the prompt is read from standard input.
    text = lambda name, word: word if word == "-" else arguments.read_text(name, word, args.escapes)
    stop = [text("--stop", word) for word in args.stop]
    bad_words = [text("--bad-words", word) for word in args.bad_words]
    negative = args.processing.negative
    negative = None if negative is None else text("--negative", negative)
    lm = args.loading.load()
    how["sampler"] = arguments.add_processors(sampler, processors, lm)
    if sampler is None and processors:  # the model's own sampler with more processors keeps its own plan
        from mercury_jax.decode.defaults import default_plan

        how["plan"] = default_plan(lm, args.decoding.plan())
    prompts: list[Any] = [[{"role": "user", "content": t}] for t in texts] if args.chat else texts
    # The live view draws one answer after the other, as its canvas stands: no guidance, and nothing is cut.
    plain = args.processing.guidance is None and not (stop or bad_words) and args.n == 1
    shared = args.html is not None or args.gif is not None
    if show.terminal() and plain and not (args.no_live or args.json or shared):
        _watch(lm, args, texts, prompts, how)
    else:
        guided = dict(
            guidance=args.processing.guidance, negative=negative, logprobs=args.logprobs, n=args.n,
            stop=stop or None, history=shared, bad_words=bad_words or None,
        )  # fmt: skip
        out = _timed(lm, prompts, args.decoding.seed, args.warm, how | guided)
        _print(out, texts, args)
        if shared:
            for path in (args.html, args.gif):
                if path is not None:
                    show.say(str(out.save(path, prompt=texts[0])))
    if not (args.chat or args.json) and show.terminal(sys.stderr) and has_chat_template(lm.tokenizer):
        show.say("the text was continued; --chat asks the model a question")
    return 0


def _check(args: Sample, texts: list[str]) -> None:
    """Refuses what no model takes, before one is loaded."""
    from mercury_jax.decode.inputs import MAX_TOKENS

    arguments.require(
        (texts, "PROMPT", None, "a text, or - for standard input"),
        (all(texts), "PROMPT", "", "a text of at least one character"),
    )
    arguments.check_request(args.decoding.seed, args.temperature, args.effort, args.logprobs)
    shown = {"--html": (args.html, (".html", ".htm")), "--gif": (args.gif, (".gif",))}
    files = [(name, path, endings) for name, (path, endings) in shown.items() if path is not None]
    guidance, negative = args.processing.guidance, args.processing.negative
    arguments.require(
        (args.logprobs is None or args.json, "--logprobs", args.logprobs, "with --json"),
        (1 <= args.max_tokens <= MAX_TOKENS, "--max-tokens", args.max_tokens, f"1..{MAX_TOKENS}"),
        (1 <= args.n <= MAX_TOKENS, "--n", args.n, f"1..{MAX_TOKENS}"),
        *((len(texts) * args.n == 1, name, path, "with one prompt and --n 1") for name, path, _ in files),
        *(
            (path.lower().endswith(ends), name, path, f"a file that ends in {' or '.join(ends)}")
            for name, path, ends in files
        ),
        ("" not in args.stop, "--stop", "", "a text of at least one character"),
        ("" not in args.bad_words, "--bad-words", "", "a text of at least one character"),
        (not (args.bad_words and args.stop), "--bad-words", [*args.bad_words], "a call without --stop"),
        (guidance is None or math.isfinite(guidance), "--guidance", guidance, "a finite number"),
        (negative is None or guidance is not None, "--negative", negative, "a text beside --guidance X"),
    )
    for name, path, _ in files:
        show.check_writable(name, path)
    if args.gif is not None:
        install.check("--gif", "matplotlib", "plot")


def _timed(lm: LM, prompts: Any, seed: int, warm: bool, how: dict[str, Any]) -> Output:
    """Samples, after a first call that compiles where `warm` asks for it."""
    from mercury_jax.decode.sample import sample

    if warm:
        with show.progress(text="compiling"):
            sample(lm, prompts, seed=seed, **how)
    with show.progress(text="decoding"):
        return sample(lm, prompts, seed=seed, **how)


def _print(out: Output, texts: list[str], args: Sample) -> None:
    """The texts of a batch with blank lines between them, in a terminal under headers; or a JSON record of each."""
    several = len(out.texts) > 1
    for i, text in enumerate(out.texts):
        if args.json:
            show.emit(_record(out, i, args))
            continue
        if i:
            print()
        if several and show.terminal():
            answer = f", answer {i % out.n + 1}" if out.n > 1 else ""
            print(f"--- {readable(texts[i // out.n])!r}{answer}")
        print(readable(text) if show.terminal() else text)
        if args.chat and not text.strip():
            show.say(show.no_answer(out.thinking[i], out.finish[i]))
    if not args.temperature and out.n > 1 and all(len(set(group)) == 1 for group in out.groups):
        show.say(f"the {out.n} answers to a prompt are equal; --temperature 1 draws different ones")
    if not args.json:
        note = "" if args.warm else ", compilation included"
        show.say(show.figures(sum(out.lengths), int(out.forwards.sum()), out.seconds, note))


def _record(out: Output, i: int, args: Sample) -> dict[str, Any]:
    """One answer as JSON. `prompt` is the index of its prompt. `seconds` is of the whole call, which decoded `batch`
    answers; the rates are this answer's."""
    tokens, nfe = out.lengths[i], int(out.forwards[i])
    record = {
        "text": out.texts[i], "tokens": tokens, "forwards": nfe, "tokens_per_forward": tokens / max(nfe, 1),
        "seconds": out.seconds, "tokens_per_second": tokens / max(out.seconds, 1e-9), "finish": out.finish[i],
        "thinking": out.thinking[i], "prompt": i // out.n, "seed": args.decoding.seed + i, "batch": len(out.texts),
        "compilation_included": not args.warm,
    }  # fmt: skip
    if out.logprobs is not None:
        found = out.logprobs[i]
        record["logprobs"] = [
            {"id": token, "logprob": p, "top": list(zip(ids, top, strict=True))}
            for token, p, ids, top in zip(out.tokens[i], found.tokens, found.top_ids, found.top, strict=True)
        ]
    return record


def _watch(lm: LM, args: Sample, texts: list[str], prompts: list[Any], how: dict[str, Any]) -> None:
    """One prompt after the other in the live view."""
    from rich.console import Console

    from mercury_jax.decode.stream import stream

    console = Console(highlight=False)
    for i, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        before, seed = text + "\n" if args.chat else text, args.decoding.seed + i
        size = min(args.max_tokens, args.decoding.block or lm.model.config.block)
        last = terminal.follow(console, lm.tokenizer, before, size, stream(lm, prompt, seed=seed, **how))
        seconds = _timed(lm, prompt, seed, True, how).seconds if args.warm else None
        if args.chat and not last.text.strip():
            show.say(
                show.no_answer(last.thinking, "length" if len(last.tokens) >= args.max_tokens else "stop")
            )
        note = "" if args.warm else "; --warm measures the speed"
        console.print(show.figures(len(last.tokens), last.forwards, seconds, note), style="dim")
