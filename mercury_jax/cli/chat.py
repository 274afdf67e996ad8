"""`mercury chat`: a conversation with a model in the terminal, or line by line from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Decoding, Flag, Group, Loading, OptionalFloat, OptionalInt, option
from mercury_jax.config import refuse
from mercury_jax.viz import readable, terminal

if TYPE_CHECKING:
    from mercury_jax.types import LM

Messages = list[dict[str, str]]

EMBEDDED = "nano"  # name of the model in the package
KNOWS = "It knows sums of up to three digits (347+585=) and 4x4 Sudokus (four lines, 0 for a blank)."
MAX_TOKENS = 256  # of an answer, where the context leaves as many
AGAIN = "/new begins again, /undo forgets the last answer"
SEVERAL = "A message of several lines: paste it, or start with --escapes and type \\n for each line break."
COMMANDS = f"""/new            forget the conversation
/system TEXT    begin a new one with this system prompt; without TEXT with none
/undo           forget the last question and its answer
/help           these commands
/quit           leave, as Ctrl-D does; Ctrl-C stops an answer
{SEVERAL}"""


@dataclass(frozen=True, kw_only=True)
class ChatCommand:
    """Talk to a model: each line is a message. The model sees the whole conversation; the embedded one each line alone.

    examples:
      mercury chat                                the embedded model: sums, 4x4 Sudokus
      mercury chat --model GSAI-ML/LLaDA-8B-Instruct --quantise int8
      mercury chat --system "Answer in one word." --effort low
      printf '347+585=\\n120+345=\\n' | mercury chat      an answer to each line

    A terminal shows every denoising step. Lines that begin with / are commands:
    /new, /system TEXT, /undo, /help, /quit. Ctrl-C stops an answer, Ctrl-D leaves.
    Several lines that are pasted into a terminal at once are one message.
    """

    system: Annotated[str | None, option("TEXT")] = None
    """System prompt, the first message of the conversation."""
    max_tokens: OptionalInt = None
    """Most tokens of an answer, not counting its thinking. Default: 256, or what the model's context leaves."""
    temperature: OptionalFloat = None
    """Sampling temperature; 0 takes the most likely token. Default: the rule's."""
    effort: Annotated[str | None, option("NAME")] = None
    """instant, low, medium or high: denoising steps, thresholds and the token budget for thinking."""
    escapes: arguments.Escapes = False
    r"""Read \n, \t and \\ as Python does in the lines, such as a Sudoku of four rows, in /system and in --system.
    Without it a line is taken as it is."""
    single: Flag = False
    """Each line is a conversation of its own. Always so with the embedded model, which was trained on single
    questions."""
    no_live: Flag = False
    """Print an answer only when it is complete."""
    json: Flag = False
    """Print one JSON object for each answer."""
    decoding: Annotated[Decoding, Group] = field(default_factory=Decoding)
    loading: Annotated[Loading, Group] = field(default_factory=Loading)


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args, parameters = arguments.read_with_rule(ChatCommand, argv, "mercury chat")
    from mercury_jax.decode import inputs  # loads JAX, which the help does without

    arguments.check_request(args.decoding.seed, args.temperature, args.effort)
    if args.max_tokens is not None and not 1 <= args.max_tokens <= inputs.MAX_TOKENS:
        raise refuse("--max-tokens", args.max_tokens, f"1..{inputs.MAX_TOKENS}")
    how: dict[str, Any] = dict(
        temperature=args.temperature, effort=args.effort, seed=args.decoding.seed,
        plan=args.decoding.plan(), sampler=args.decoding.sampler(parameters),
    )  # fmt: skip
    system = args.system
    if system is not None and system != "-":  # which is a text here: standard input has the messages
        system = arguments.read_text("--system", system, args.escapes)
    person = show.terminal(sys.stdin) and show.terminal()
    lm = args.loading.load()
    # Raises where the model has no chat template, before anybody has typed a line.
    lm.tokenizer.render([{"role": "user", "content": "x"}], thinking=False)
    single = args.single or lm.name == EMBEDDED
    if person:
        show.say(
            f"{lm.name}, {lm.parameters / 1e6:,.1f}M parameters. /help lists the commands; Ctrl-D leaves."
        )
    if person and lm.name == EMBEDDED:
        show.say(KNOWS)
    if person and single:
        show.say("Each question is a conversation of its own.")
    messages = _opened(system)
    for line in _lines(person):
        text = arguments.unescape(line) if args.escapes else line
        if line.startswith("/"):
            if line in ("/quit", "/exit"):
                break
            messages = _command(text, messages)
            continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            how["max_tokens"] = answer_budget(lm, asked, args.max_tokens, args.effort)
            reply = _answer(lm, asked, args, how, person)
        except KeyboardInterrupt:
            if not person:
                raise
            show.say("\nstopped; this question is not part of the conversation")
            continue
        except ValueError as error:  # most often a conversation that outgrew the context
            if not person:
                raise
            show.say(f"mercury: {error}")
            continue
        if not single:
            messages = [*asked, {"role": "assistant", "content": reply}]
    return 0


def _opened(system: str | None) -> Messages:
    """The messages of a new conversation."""
    return [{"role": "system", "content": system}] if system else []


def answer_budget(lm: LM, messages: Messages, most: int | None, effort: str | None) -> int:
    """The most tokens of the next answer to the last of `messages`.

    Without a wish of the user (`most`): `MAX_TOKENS`, or what the context leaves; of that, half is left to the thinking
    where the effort has any. What does not fit is refused, and the message says how to forget the conversation, if the
    last message would fit without it.
    """
    from mercury_jax.decode.defaults import EFFORTS
    from mercury_jax.decode.inputs import encode_prompts

    context, thinks = lm.model.config.context, effort is not None and EFFORTS[effort].thinking > 0
    system = messages[: messages[0]["role"] == "system"]
    (whole, *_), _ = encode_prompts(lm, messages, thinking=thinks)
    (alone, *_), _ = encode_prompts(lm, [*system, messages[-1]], thinking=thinks)
    room = context - len(whole.ids)
    if room >= (most or 1):
        return most or min(MAX_TOKENS, (room + 1) // 2 if thinks else room)
    if room < 1:
        error = refuse(
            "conversation", f"{len(whole.ids)} tokens", f"fewer than the model's context of {context}"
        )
    else:
        error = refuse("--max-tokens", most, f"1..{room}: the model's context is {context} tokens")
    forgetting_helps = len(messages) > len(system) + 1 and context - len(alone.ids) >= (most or 1)
    raise ValueError(f"{error}\n{AGAIN}") if forgetting_helps else error


def _lines(person: bool) -> Iterator[str]:
    """Lines that are not empty, from a prompt or from a pipe, until the end of the input."""
    if not person:
        yield from filter(None, (line.strip("\r\n") for line in sys.stdin))
        return
    with contextlib.suppress(ImportError):
        import readline  # editing and history of lines; Windows has its own

        # Pasted line breaks are then part of the message, as `input` returns it.
        readline.parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves)")
            continue
        if line:
            yield line


def _command(line: str, messages: Messages) -> Messages:
    """Carries out a line that begins with /; returns the messages after it."""
    word, _, rest = line.partition(" ")
    if word == "/new":
        return [message for message in messages[:1] if message["role"] == "system"]
    if word == "/system":
        return _opened(rest.strip())
    if word == "/undo":
        return messages[:-2] if messages and messages[-1]["role"] == "assistant" else messages
    if word != "/help":
        show.say(f"{word} is no command:")
    show.say(COMMANDS)
    return messages


def _answer(lm: LM, messages: Messages, args: ChatCommand, how: dict[str, Any], person: bool) -> str:
    """Decodes and prints the next answer; returns its text without the thinking."""
    if person and not (args.no_live or args.json):
        from rich.console import Console

        from mercury_jax.decode.stream import stream

        console = Console(highlight=False)
        size = min(how["max_tokens"], args.decoding.block or lm.model.config.block)
        last = terminal.follow(console, lm.tokenizer, "", size, stream(lm, messages, **how))
        console.print(show.figures(len(last.tokens), last.forwards), style="dim")
        finish = "length" if len(last.tokens) >= how["max_tokens"] else "stop"
        _remark(
            lm,
            messages,
            last.text,
            last.thinking,
            finish,
            how["max_tokens"] < (args.max_tokens or MAX_TOKENS),
        )
        return last.text
    from mercury_jax.decode.sample import sample

    with show.progress(text="decoding; a first answer compiles"):
        out = sample(lm, messages, **how)
    if args.json:
        show.emit({
            "text": out.text, "thinking": out.thinking[0], "tokens": out.lengths[0], "forwards": int(out.forwards[0]),
            "seconds": out.seconds, "finish": out.finish[0], "messages": len(messages),
        })  # fmt: skip
    else:
        print(readable(out.text) if show.terminal() else out.text, flush=True)
        clamped = how["max_tokens"] < (args.max_tokens or MAX_TOKENS)
        _remark(lm, messages, out.text, out.thinking[0], out.finish[0], clamped)
    return out.text


def _remark(lm: LM, messages: Messages, text: str, thinking: str | None, finish: str, clamped: bool) -> None:
    """Tells a person that there is no answer, or that the context ended it."""
    if finish == "length" and clamped:
        forget = f"; {AGAIN}" if any(m["role"] == "assistant" for m in messages) else ""
        show.say(f"the answer ended at the model's context of {lm.model.config.context} tokens{forget}")
    elif not text.strip():
        show.say(show.no_answer(thinking, finish))
