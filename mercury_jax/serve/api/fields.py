"""Fields that several endpoints share, and the records inside of them: messages, tools, formats."""

from __future__ import annotations

from mercury_jax.serve.api.kinds import (
    REQUIRED,
    Anything,
    Choice,
    Either,
    Field,
    Flag,
    Integer,
    Items,
    Mapped,
    Number,
    Only,
    Record,
    Tagged,
    Text,
)
from mercury_jax.serve.chat.messages import FUNCTION_NAME

MOST_TOKENS = 1 << 20  # of an answer; what the context leaves is less, and larger wishes are cut to that
MESSAGES, TOOLS, CHOICES, ALTERNATIVES = 2048, 128, 16, 20
NAME = FUNCTION_NAME.pattern

MODEL = Field("model", Text(1, 256), REQUIRED, "The model, by its name or one of its aliases.")
MAX_TOKENS = Integer(1, MOST_TOKENS)
LENGTH = "Most tokens of the answer. More than the context leaves is cut to that."
STREAM = Field("stream", Flag(), False, "Send the answer as server-sent events while it is written.")
STREAM_OPTIONS = Field(
    "stream_options",
    Record((Field("include_usage", Flag(), False, "Send one more chunk, with the usage and no choices."),)),
    None,
    "How to stream; used where `stream` is true.",
)
TOP_P = Field("top_p", Number(0, 1), 1.0, "Draw among the likeliest tokens that make up this probability.")
STOPS = Items(Text(1, 256), most=32)
STOP = Field(
    "stop",
    Either((Text(0, 256), STOPS)),
    None,
    "Texts that end the answer and are no part of it; not applied where `response_format` is enforced.",
)
SEED = Field(
    "seed",
    Integer(-(1 << 63), (1 << 63) - 1),
    None,
    "The same seed gives the same text (default: a fresh one).",
)
REPETITION = Field(
    "repetition_penalty",
    Number(0, 1000, open=True),
    1.0,
    "Divides the logits of tokens that occurred; 1: none.",
)
MIN_P = Field("min_p", Number(0, 1), 0.0, "Draw among tokens at least so many times as likely as the best.")
BIAS = Field(
    "logit_bias",
    Mapped(r"(0|[1-9][0-9]{0,9})", Number(-100, 100), most=512),
    None,
    "What to add to the logits of tokens, by their ids.",
)
N = Field("n", Integer(1, CHOICES), 1, "How many answers to write; answer i draws from seed + i.")
EXTRA = Field("extra_body", Anything(), None, "Further fields of this table; those given outside of it win.")


def penalties(frequency: float, presence: float) -> tuple[Field, Field]:
    """The two additive penalties, whose defaults differ between the endpoints."""
    return (
        Field(
            "frequency_penalty", Number(-2, 2), frequency, "Subtracted for each time that a token was said."
        ),
        Field("presence_penalty", Number(-2, 2), presence, "Subtracted from tokens that were said."),
    )


def temperature(default: float | None, told: str = "") -> Field:
    return Field("temperature", Number(0, 2), default, "Of the drawn tokens; 0: always the likeliest." + told)


FUNCTION = Record(
    (
        Field("name", Text(1, 64, NAME), REQUIRED, "The function's name."),
        Field("arguments", Either((Text(), Anything())), "", "An object, or its JSON as a text."),
    )
)
CALL = Record(
    (
        Field("id", Text(1, 256), REQUIRED, "What the result refers to."),
        Field("type", Only("function"), "function", "Always function."),
        Field("function", FUNCTION, REQUIRED, "What was called."),
    )
)
PART = Tagged("type", {"text": Record((Field("text", Text(), REQUIRED, "What it says."),))})
CONTENT = Either((Text(), Items(PART, most=1024)))
SAID = Field("content", CONTENT, None, "A text, or a list of parts of type text.")
SPEAKER = Field("name", Text(0, 256), None, "The speaker's name.")
SPOKEN = Record((SAID, SPEAKER))
MESSAGE = Tagged(
    "role",
    {
        "system": SPOKEN,
        "developer": SPOKEN,  # counts as system
        "user": SPOKEN,
        "assistant": Record(
            (
                SAID,
                SPEAKER,
                Field("tool_calls", Items(CALL, most=TOOLS), None, "The calls of its turn."),
                Field("function_call", FUNCTION, None, "A call in the older form."),
            )
        ),
        "tool": Record((SAID, Field("tool_call_id", Text(1, 256), REQUIRED, "The earlier call it answers."))),
        "function": Record(
            (SAID, Field("name", Text(1, 64, NAME), None, "Of the function, in the older form."))
        ),
    },
)
MESSAGES_FIELD = Field("messages", Items(MESSAGE, 1, MESSAGES), REQUIRED, "The conversation so far.")
# Editors send the texts of files here, as one message.
ONE_MESSAGE = Field(
    "messages",
    Items(
        Record(
            (
                Field("role", Only("user"), REQUIRED, "Always user."),
                Field("content", CONTENT, REQUIRED, "The prompt with its tags."),
            )
        ),
        1,
        1,
    ),
    REQUIRED,
    "Exactly one message of the user.",
)

TOOL = Tagged(
    "type",
    {
        "function": Record(
            (
                Field(
                    "function",
                    Record(
                        (
                            Field("name", Text(1, 64, NAME), REQUIRED, "The function's name."),
                            Field("description", Text(), None, "What it does."),
                            Field("parameters", Anything(), None, "JSON Schema of its arguments."),
                            Field("strict", Flag(), False, "The schema is enforced either way."),
                        )
                    ),
                    REQUIRED,
                    "What may be called.",
                ),
            )
        )
    },
)
NAMED_ONE = Record(
    (
        Field(
            "function",
            Record((Field("name", Text(1, 64, NAME), REQUIRED, "One of the tools."),)),
            REQUIRED,
            "The function that must be called.",
        ),
    )
)
SOME = Record(
    (
        Field("mode", Choice(("auto", "required")), REQUIRED, "Whether one of them must be called."),
        Field(
            "tools",
            Items(Tagged("type", {"function": NAMED_ONE}), 1, TOOLS),
            REQUIRED,
            "Those of the tools that may be called.",
        ),
    )
)
CHOSEN = Tagged(
    "type",
    {
        "function": NAMED_ONE,
        "allowed_tools": Record((Field("allowed_tools", SOME, REQUIRED, "A choice among the tools."),)),
    },
)
FORMAT = Tagged(
    "type",
    {
        "text": Record(()),
        "json_object": Record(()),
        "json_schema": Record(
            (
                Field(
                    "json_schema",
                    Record(
                        (
                            Field("name", Text(1, 64, NAME), REQUIRED, "The format's name."),
                            Field("description", Text(), None, "What the format is for."),
                            Field("schema", Anything(), None, "The JSON Schema (none: any object)."),
                            Field("strict", Flag(), False, "The schema is enforced either way."),
                        )
                    ),
                    REQUIRED,
                    "The schema that the answer obeys.",
                ),
            )
        ),
    },
)
