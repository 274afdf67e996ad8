"""The Messages API: blocks, events, counts, errors, and what is refused."""

import itertools
from typing import Any

import pytest

from mercury_jax.decode.defaults import EFFORTS
from tests.serve.api_client import CHAT, TEXT, client_of, valid
from tests.serve.dialects.reading import (
    ASK,
    CALL,
    MESSAGES,
    THINKING,
    TOOLS,
    answer_ids,
    block_text,
    engine_of,
    final,
    post,
    stream,
)
from tests.serve.scripted_engine import ScriptedEngine, text_snapshots

COUNT = f"{MESSAGES}/count_tokens"
USER = {"role": "user", "content": "347+585="}
ADD = {"name": "add", "input_schema": {"type": "object"}}
USED = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "2"}


def text_block(text, **more):
    return {"type": "text", "text": text, **more}


CONVERSATION = {
    "system": [text_block("Add.", cache_control={"type": "ephemeral"}), text_block("Be short.")],
    "messages": [
        USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "carry", "signature": "s"}, {"type": "redacted_thinking", "data": "d"},
            text_block("One moment."), USED, {**USED, "id": "t2"}]},
        {"role": "user", "content": [
            RESULT, {**RESULT, "tool_use_id": "t2", "content": [text_block("no")], "is_error": True},
            text_block("Sure?"), text_block("Think.")]},
    ],
    "tools": [ADD],
}  # fmt: skip


def prompt_of(nano, path, body):
    """The prompt that a body makes."""
    engine = engine_of(nano, text=TEXT)
    answer = client_of(engine).post(path, json={"model": "nano", "max_tokens": 32, **body})
    assert answer.status_code == 200, answer.text
    return engine.tickets[-1].request.prompt


def test_events_come_in_order(nano):
    parts = {"thinking": "carry one", "text": TEXT, "calls": (CALL,)}
    events = stream(
        client_of(engine_of(nano, **parts)), MESSAGES, tools=TOOLS[MESSAGES], **THINKING[MESSAGES]
    )
    named = [
        event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"]
        for event in events
    ]
    assert [kind for kind, _ in itertools.groupby(named)] == [
        "message_start", "ping",
        "content_block_start", "thinking_delta", "signature_delta", "content_block_stop",
        "content_block_start", "text_delta", "content_block_stop",
        "content_block_start", "input_json_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    begun = events[0]["message"]
    assert begun["content"] == [] and begun["stop_reason"] is None and begun["usage"]["output_tokens"] == 0
    assert begun["usage"]["input_tokens"] == events[-2]["usage"]["input_tokens"] > 0
    assert 0 < events[-2]["usage"]["output_tokens_details"]["thinking_tokens"]
    assert next(e for e in events if e["type"] == "content_block_start")["content_block"]["signature"] == ""


def test_thinking_may_be_omitted(nano):
    client = client_of(engine_of(nano, thinking="carry one", text=TEXT))
    shown = post(client, MESSAGES, thinking={"type": "adaptive"})["content"][0]
    hidden = {"thinking": {"type": "adaptive", "display": "omitted"}}
    for message in (post(client, MESSAGES, **hidden), final(stream(client, MESSAGES, **hidden), MESSAGES)):
        assert message["content"][0] == {**shown, "thinking": ""} and shown["signature"] != ""


def test_blocks_make_the_prompt_of_a_chat(nano):
    call = lambda id: {"id": id, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = {
        "messages": [
            {"role": "system", "content": "Add.\nBe short."},
            USER,
            {"role": "assistant", "content": "One moment.", "tool_calls": [call("t1"), call("t2")]},
            {"role": "tool", "tool_call_id": "t1", "content": "2"},
            {"role": "tool", "tool_call_id": "t2", "content": "Error:\nno"},
            {"role": "user", "content": "Sure?\nThink."},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    }
    assert prompt_of(nano, MESSAGES, CONVERSATION) == prompt_of(nano, CHAT, chat)
    system = {"system": "Add.", "messages": [USER, {"role": "system", "content": "Be short."}, USER]}
    chat = {"messages": [{"role": "system", "content": "Add."}, *system["messages"]]}
    assert prompt_of(nano, MESSAGES, system) == prompt_of(nano, CHAT, chat)


def test_the_assistants_last_message_is_continued(nano):
    begun = {"role": "assistant", "content": "It is"}
    chat = {"messages": [USER, {**begun, "prefix": True}]}
    assert prompt_of(nano, MESSAGES, {"messages": [USER, begun]}) == prompt_of(nano, CHAT, chat)


@pytest.mark.parametrize("more", [{}, {"thinking": {"type": "enabled", "budget_tokens": 200}}, CONVERSATION,
                                  {"thinking": {"type": "disabled"}}, {"tool_choice": {"type": "none"}, **CONVERSATION},
                                  {"output_config": {"effort": "low"}}])  # fmt: skip
def test_the_count_is_the_usage_of_the_call(nano, more):
    engine = engine_of(nano, thinking="carry", text=TEXT)
    client, body = client_of(engine), {**ASK[MESSAGES], **more}
    counted = client.post(COUNT, json={name: value for name, value in body.items() if name != "max_tokens"})
    assert counted.status_code == 200 and engine.tickets == []
    usage = post(client, MESSAGES, **more)["usage"]
    assert valid("TokenCount", counted.json())["input_tokens"] == usage["input_tokens"]
    assert usage["input_tokens"] == len(engine.tickets[-1].request.prompt)
    assert client.post(COUNT, json=body).json() == counted.json()  # as for the body of the call itself


def test_stop_reasons(nano):
    text = client_of(engine_of(nano, text="347+585 is 932.\nYes"))
    stopped = {"stop_sequences": ["nothing", "\nY"]}
    for message in (post(text, MESSAGES, **stopped), final(stream(text, MESSAGES, **stopped), MESSAGES)):
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "\nY")
        assert block_text(message) == "347+585 is 932."
    assert post(text, MESSAGES)["stop_reason"] == "end_turn"
    calls = client_of(engine_of(nano, calls=(CALL,)))
    message = post(calls, MESSAGES, tools=[ADD], stop_sequences=["347"])  # not searched in arguments
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize(
    "more, effort",
    [({}, None), ({"thinking": {"type": "disabled"}}, "instant"), ({"thinking": {"type": "adaptive"}}, None),
     ({"thinking": {"type": "enabled", "budget_tokens": 1}}, "low"),
     ({"thinking": {"type": "enabled", "budget_tokens": 511}}, "low"),
     ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "medium"),
     ({"thinking": {"type": "enabled", "budget_tokens": 32000}}, "high"),
     ({"output_config": {"effort": "medium"}}, "medium"), ({"output_config": {"effort": "max"}}, "high"),
     ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
     ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "instant")],
)  # fmt: skip
def test_thinking_is_an_effort_of_a_chat(nano, more, effort):
    assert list(EFFORTS) == ["instant", "low", "medium", "high"]
    engine = engine_of(nano, thinking="carry", text=TEXT)
    client = client_of(engine)
    post(client, MESSAGES, **more)
    client.post(
        CHAT, json={"model": "nano", "max_tokens": 64, "messages": [USER], "reasoning_effort": effort}
    )
    mine, chat = (ticket.request for ticket in engine.tickets)
    assert (mine.p, mine.steps, mine.thinking, mine.prompt) == (
        chat.p,
        chat.steps,
        chat.thinking,
        chat.prompt,
    )


@pytest.mark.parametrize(
    "choice, most", [("auto", None), ("any", None), ("tool", None), ("any", 1), ("none", 0)]
)
def test_a_tool_choice_decides_about_the_grammar(nano, choice, most):
    parts = {"text": TEXT} if choice in ("auto", "none") else {"calls": (CALL,)}
    engine = engine_of(nano, **parts)
    named = {"type": choice, **({"name": "add"} if choice == "tool" else {})}
    named |= {"disable_parallel_tool_use": True} if most == 1 else {}
    post(client_of(engine), MESSAGES, tools=[ADD], tool_choice=named)
    grammar, encode = engine.tickets[-1].request.grammar, nano.tokenizer.encode
    assert (grammar is None) == (choice == "none")
    if choice == "any":
        two = answer_ids(nano, calls=(CALL, CALL))
        assert grammar.completes(answer_ids(nano, calls=(CALL,))) and not grammar.completes(encode("text"))
        assert grammar.completes(two) == (most is None)


def test_errors_have_the_envelope_of_the_api(nano):
    engine = ScriptedEngine(nano, text_snapshots(nano, "932"), slots=1, queue=0)
    client = client_of(engine, keys=("a-long-key",), rate=5.0)
    key = {"x-api-key": "a-long-key", "anthropic-version": "2026-10-21", "anthropic-beta": "any-2026-01-01"}

    def kind(answer, status):
        error = valid("MessagesError", answer.json())
        assert answer.status_code == status and error["request_id"] == answer.headers["request-id"]
        return error["error"]["type"]

    ask = lambda body, headers=key, path=MESSAGES: client.post(path, json=body, headers=headers)
    body = ASK[MESSAGES]
    assert ask(body).status_code == 200
    assert (
        kind(ask(body, {}), 401) == kind(ask(body, {"x-api-key": "another"}), 401) == "authentication_error"
    )
    assert kind(ask(body, {**key, "host": "evil.example"}), 403) == "permission_error"
    assert kind(ask({**body, "model": "another"}), 404) == "not_found_error"
    assert kind(client.get(f"{MESSAGES}/nothing", headers=key), 404) == "not_found_error"
    assert kind(client.get(MESSAGES, headers=key), 405) == "invalid_request_error"
    assert kind(ask({**body, "max_tokens": 0}), 400) == "invalid_request_error"
    app: Any = client.app
    limit = app.state.models.services[0].limit
    limit.admitted = 1
    assert kind(ask(body), 429) == "rate_limit_error"
    limit.admitted = 0
    engine.ready = False
    assert kind(ask(body), 503) == "overloaded_error"
    limited = ask(body)
    assert kind(limited, 429) == "rate_limit_error" and limited.headers["retry-after"]
    # Other paths keep OpenAI's.
    assert "param" in client.post(CHAT, json=body, headers=key).json()["error"]


def test_a_thread_is_refused_with_the_code_that_clients_go_on_from(scripted_app):
    error = scripted_app.refuses({**ASK[MESSAGES], "thread": {"type": "create"}}, MESSAGES)
    assert error["details"] == {"error_code": "thread_unsupported_request"}


def said(*blocks, role="user"):
    return {"messages": [{"role": role, "content": [*blocks]}]}


REFUSED = [
    ({"max_tokens": None}, "max_tokens is null"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages is null"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role is 'tool'"),
    (said({"type": "image", "source": {}}), "messages[0].content[0].type is 'image'; allowed: text, tool_result"),
    (said({"type": "document", "source": {}}), "messages[0].content[0].type is 'document'"),
    (said(USED), "messages[0].content[0].type is 'tool_use'"),
    (said({"type": "text"}), "messages[0].content[0].text is missing"),
    (said(RESULT), "messages[0].content[0].tool_use_id is 't1'"),
    (said({**RESULT, "content": [{"type": "image"}]}), "messages[0].content[0].content[0].type is 'image'"),
    ({"messages": [USER, {"role": "assistant", "content": [USED, USED]}]}, "messages[1].content[1].id is 't1'"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "messages[0].prefix is true"),
    ({"system": 5}, "system is 5"),
    ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is 'web_search_20250305'"),
    ({"tools": [{"name": "add"}]}, "tools[0].input_schema is missing"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name is 'a b'"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type is 'array'"),
    ({"tools": [ADD, ADD]}, "tools[1].name is 'add'"),
    ({"tools": [{"name": "a", "input_schema": {"type": "object", "required": 5}}]}, "tools[0].input_schema.required"),
    ({"tool_choice": "auto"}, "tool_choice is 'auto'"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type is 'required'"),
    ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": [ADD]}, "tool_choice is 'sub'"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
    ({"thinking": {"type": "often"}}, "thinking.type is 'often'"),
    ({"stop_sequences": "a"}, "stop_sequences is 'a'"),
    ({"stop": ["a"]}, "stop is a list of 1 entries"),
    ({"temperature": -1}, "temperature is -1"),
    ({"top_k": "5"}, "top_k is '5'"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format.schema"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
    ({"mcp_servers": [{"url": "a"}]}, "mcp_servers is a list of 1 entries"),
    ({"container": "c"}, "container is 'c'"),
    ({"n": 2}, "n is 2"),
    ({"tool_choise": "auto"}, "tool_choise is not a field; did you mean tool_choice?"),
]  # fmt: skip


@pytest.mark.parametrize("more, message", REFUSED)
def test_a_malformed_body_is_refused_by_the_name_of_its_field(scripted_app, more, message):
    error = scripted_app.refuses({**ASK[MESSAGES], **more}, MESSAGES)
    assert error["type"] == "invalid_request_error" and error["message"].startswith(message)
    scripted_app.serves()
