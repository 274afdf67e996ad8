"""The fields of every endpoint: one table each, which validates requests and writes the OpenAPI document.

Names, ranges and defaults follow the vendor's document; where that knows less than OpenAI's, OpenAI's are
accepted as well.

A field that stands in no table is ignored, as the vendor does: clients send bookkeeping of their own (`user`, `store`,
`nextEdit`, `metadata`) and hints to other servers. Not those that promise what the answer holds (CONSTRAINTS): without
them the client would read an answer that obeys nothing for one that does, so they are refused by name.
"""

from __future__ import annotations

from mercury_jax.decode.defaults import EFFORTS
from mercury_jax.serve.api.fields import (
    ALTERNATIVES,
    BIAS,
    CHOICES,
    CHOSEN,
    EXTRA,
    FORMAT,
    LENGTH,
    MAX_TOKENS,
    MESSAGES_FIELD,
    MIN_P,
    MODEL,
    ONE_MESSAGE,
    REPETITION,
    SEED,
    STOP,
    STREAM,
    STREAM_OPTIONS,
    TOOL,
    TOOLS,
    TOP_P,
    N,
    penalties,
    temperature,
)
from mercury_jax.serve.api.kinds import (
    REQUIRED,
    Choice,
    Either,
    Field,
    Flag,
    Integer,
    Items,
    Only,
    Record,
    Text,
)

_FORMAT = "Use response_format of /v1/chat/completions, with type json_schema or json_object."
_SHAPED = "No grammar of this kind is offered; response_format of /v1/chat/completions takes a JSON Schema."
_TOKENS = "Use logit_bias and stop."
# Names that other servers (vLLM, SGLang, TGI, llama.cpp, older forms of OpenAI's API) have for a constraint.
CONSTRAINTS = {
    **dict.fromkeys(("guided_json", "json_schema", "structured_outputs", "structural_tag", "guided_decoding"), _FORMAT),
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"), _SHAPED),
    **dict.fromkeys(("regex", "ebnf", "grammar", "choice"), _SHAPED),
    **dict.fromkeys(("allowed_token_ids", "stop_token_ids", "bad_words", "bad_words_ids"), _TOKENS),
    "logits_processors": _TOKENS,
    "min_tokens": "The length of an answer has no lower bound.",
    "functions": "Use tools of /v1/chat/completions.",
    "function_call": "Use tool_choice of /v1/chat/completions.",
}  # fmt: skip
UNFORMATTED = CONSTRAINTS | {"response_format": _FORMAT}

CHAT = Record(
    (
        MODEL,
        MESSAGES_FIELD,
        Field("max_tokens", MAX_TOKENS, None, LENGTH + " Thinking has room of its own (default 16384)."),
        Field("max_completion_tokens", MAX_TOKENS, None, "The same under its other name, which wins."),
        temperature(None, " Left out, the decoding rule's own."),
        STOP,
        STREAM,
        STREAM_OPTIONS,
        Field("tools", Items(TOOL, most=TOOLS), None, "Functions that the model may call."),
        Field(
            "tool_choice",
            Either((Choice(("auto", "required", "none")), CHOSEN)),
            None,
            "Whether a tool is called: as the model likes, in any case, never, this one, or one of these.",
        ),
        Field("parallel_tool_calls", Flag(), True, "Whether one answer may hold several calls."),
        Field(
            "response_format", FORMAT, None, "What the answer obeys: nothing, any JSON object, or a schema."
        ),
        Field(
            "reasoning_effort",
            Choice(tuple(EFFORTS), {"none": "instant", "minimal": "instant", "xhigh": "high"}),
            None,
            "How much to think and how strictly to accept tokens; the answer keeps its own room.",
        ),
        Field("reasoning_summary", Flag(), False, "Report what was thought."),
        Field("reasoning_summary_wait", Flag(), False, "Accepted; a stream always waits for its summary."),
        Field("diffusing", Flag(), False, "With stream: each chunk holds the whole text as it stands."),
        Field("realtime", Flag(), False, "Answer at once: the effort instant, unless one is named."),
        TOP_P,
        Field(
            "top_k", Integer(-1, 1 << 20), -1, "Draw among so many of the likeliest tokens; -1 and 0: all."
        ),
        MIN_P,
        *penalties(0.0, 0.0),
        REPETITION,
        BIAS,
        Field("logprobs", Flag(), False, "Report the log-probabilities of the answer's tokens."),
        Field("top_logprobs", Integer(0, ALTERNATIVES), None, "With logprobs: so many alternatives a token."),
        N,
        SEED,
        EXTRA,
    ),
    CONSTRAINTS,
)

COMPLETIONS = Record(
    (
        MODEL,
        Field("prompt", Either((Text(), Items(Text(), 1, CHOICES))), REQUIRED, "The text to go on from."),
        Field("suffix", Text(), None, "The text behind the answer, which then fills the gap."),
        Field("max_tokens", MAX_TOKENS, 512, LENGTH),
        temperature(None, " Left out, the decoding rule's own."),
        STOP,
        STREAM,
        STREAM_OPTIONS,
        TOP_P,
        Field(
            "top_k", Integer(-1, 1 << 20), -1, "Draw among so many of the likeliest tokens; -1 and 0: all."
        ),
        MIN_P,
        *penalties(0.0, 0.0),
        REPETITION,
        BIAS,
        Field(
            "logprobs", Integer(0, ALTERNATIVES), None, "Report log-probabilities, with so many alternatives."
        ),
        Field("echo", Only(False), False, "Not offered: a prompt has no log-probabilities here."),
        Field("best_of", Only(1), 1, "Not offered: every answer that is written is returned."),
        N,
        SEED,
        EXTRA,
    ),
    UNFORMATTED,
)

FIM = Record(
    (
        MODEL,
        Field("prompt", Text(), REQUIRED, "The text before the gap."),
        Field("suffix", Text(), "", "The text behind the gap."),
        Field("max_tokens", MAX_TOKENS, 512, LENGTH),
        TOP_P,
        Field(
            "top_k",
            Integer(-1, 1000, without=(0,)),
            -1,
            "Draw among so many of the likeliest tokens; -1: all, 0 is refused.",
        ),
        *penalties(0.0, 1.5),
        REPETITION,
        STOP._replace(default=["\n\n", "\n \n"]),
        STREAM,
        STREAM_OPTIONS,
        SEED,
        EXTRA,
    ),
    UNFORMATTED,
)

EDIT = Record(
    (
        MODEL,
        ONE_MESSAGE,
        Field("max_tokens", MAX_TOKENS, 1024, LENGTH),
        temperature(0.2),
        TOP_P,
        *penalties(0.0, 1.0),
        STREAM,
        STREAM_OPTIONS,
        SEED,
        EXTRA,
    ),
    UNFORMATTED,
)

APPLY = Record(
    (
        MODEL,
        ONE_MESSAGE,
        Field("max_tokens", MAX_TOKENS, 8192, LENGTH),
        temperature(0.0),
        TOP_P,
        *penalties(0.0, 0.0),
        STREAM,
        STREAM_OPTIONS,
        SEED,
        EXTRA,
    ),
    UNFORMATTED,
)
