"""The Responses API: items, events, stored responses, and what is refused."""

import itertools
import json

import numpy as np
import pytest

from mercury_jax.serve.response_store import ResponseStore, StoredResponse
from tests.serve.api_client import CHAT, TEXT, client_of, valid
from tests.serve.dialects.reading import (
    ASK,
    CALL,
    RESPONSES,
    THINKING,
    TOOLS,
    answer_ids,
    engine_of,
    output_text,
    post,
    stream,
)
from tests.serve.scripted_engine import ScriptedEngine, snapshot, text_snapshots
from tests.serve.test_responses import with_logprobs

USER = {"role": "user", "content": "347+585="}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def made_call(call_id, **more):
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": '{"a": 1}', **more}


def output_of(id, output="2"):
    return {"type": "function_call_output", "call_id": id, "output": output}


def prompt_of(nano, path, body):
    """The prompt that a body makes."""
    engine = engine_of(nano, text=TEXT)
    answer = client_of(engine).post(path, json={"model": "nano", **body})
    assert answer.status_code == 200, answer.text
    return engine.tickets[-1].request.prompt


def test_events_come_in_order_and_are_numbered(nano):
    parts = {"thinking": "carry one", "text": TEXT, "calls": (CALL,)}
    events = stream(
        client_of(engine_of(nano, **parts)), RESPONSES, tools=TOOLS[RESPONSES], **THINKING[RESPONSES]
    )
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [
        kind.removeprefix("response.") for kind, _ in itertools.groupby(event["type"] for event in events)
    ]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    response = events[-1]["response"]
    for event in events:
        if "item_id" in event:  # an event names the item at its place
            assert response["output"][event["output_index"]]["id"] == event["item_id"]
    ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert ended == response["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("status") for item in added] == [None, "in_progress", "in_progress"]


def test_a_response_repeats_the_request(nano):
    asked = {
        "instructions": "Add.", "metadata": {"a": "b"}, "max_output_tokens": 9, "temperature": 0.5, "store": False,
        "tools": [ADD], "tool_choice": {"type": "function", "name": "add"}, "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "concise"}, "truncation": "disabled", "background": False,
    }  # fmt: skip
    calls = client_of(engine_of(nano, thinking="carry", calls=(CALL,)))
    said = post(calls, RESPONSES, **asked)
    for name in asked.keys() - {"tools", "reasoning"}:
        assert said[name] == asked[name], name
    assert said["reasoning"]["effort"] == "low" and said["tools"][0]["name"] == "add"
    plain = post(calls, RESPONSES)
    assert (plain["metadata"], plain["tools"], plain["tool_choice"]) == ({}, [], "auto")
    assert plain["text"] == {"format": {"type": "text"}} and plain["store"] is True


def test_items_make_the_prompt_of_a_chat(nano):
    """Thinking is not read, and a call joins the assistant's message before it."""
    items = [
        {"role": "developer", "content": "Be short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "347+585="}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "One moment.", "annotations": []}]},
        made_call("c1", id="fc_1", status="completed"),
        made_call("c2"),
        output_of("c1"),
        output_of("c2", [{"type": "input_text", "text": "3"}]),
    ]  # fmt: skip
    call = lambda id: {"id": id, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "system", "content": "Be short."},
        USER,
        {"role": "assistant", "content": "One moment.", "tool_calls": [call("c1"), call("c2")]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
    ]
    function = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    mine = prompt_of(nano, RESPONSES, {"instructions": "Add.", "input": items, "tools": [ADD]})
    assert mine == prompt_of(nano, CHAT, {"messages": messages, "tools": [function]})


@pytest.mark.parametrize(
    "choice, job",
    [("none", False), ("auto", True), ("required", True), ({"type": "function", "name": "add"}, True),
     ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}, True)],
)  # fmt: skip
def test_a_tool_choice_decides_about_the_grammar(nano, choice, job):
    engine = engine_of(nano, calls=(CALL,)) if job else engine_of(nano, text=TEXT)
    post(client_of(engine), RESPONSES, tools=[ADD], tool_choice=choice)
    assert (engine.tickets[-1].request.grammar is not None) == job


def test_log_probabilities_are_those_of_a_chat(nano):
    engine = ScriptedEngine(nano, with_logprobs([snapshot(nano.tokenizer.encode("932"), finish="stop")]))
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    chat = client_of(engine).post(
        CHAT, json={"model": "nano", "messages": [USER], "logprobs": True, "top_logprobs": 1}
    )
    wanted = chat.json()["choices"][0]["logprobs"]["content"]
    [item] = post(client_of(engine), RESPONSES, **more)["output"]
    assert item["content"][0]["logprobs"] == wanted != []
    done = [
        e for e in stream(client_of(engine), RESPONSES, **more) if e["type"] == "response.output_text.done"
    ]
    assert done[0]["logprobs"] == wanted


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_goes_on_as_if_its_items_were_sent(nano, streamed):
    engine = engine_of(nano, thinking="carry", text="One moment.", calls=(CALL,))
    client = client_of(engine)
    begun = {"tools": [ADD], "instructions": "Only for the first."}
    first = (
        stream(client, RESPONSES, **begun)[-1]["response"] if streamed else post(client, RESPONSES, **begun)
    )
    call = first["output"][-1]
    more = [output_of(call["call_id"], "932"), {"role": "user", "content": "Sure?"}]
    second = post(client, RESPONSES, input=more, tools=[ADD], previous_response_id=first["id"])
    chained = engine.tickets[-1].request.prompt
    post(client, RESPONSES, input=[USER, *first["output"], *more], tools=[ADD])
    assert engine.tickets[-1].request.prompt == chained
    # A third turn has the items of both, without their thinking.
    end = {"role": "user", "content": "Thanks"}
    answered = output_of(second["output"][-1]["call_id"], "1")
    post(client, RESPONSES, input=[answered, end], tools=[ADD], previous_response_id=second["id"])
    chained = engine.tickets[-1].request.prompt
    whole = [USER, *first["output"], *more, *second["output"], answered, end]
    listed = client.get(f"{RESPONSES}/{second['id']}/input_items?order=asc").json()["data"]
    kinds = ["message", "message", "function_call", "function_call_output", "message"]
    assert [item["type"] for item in listed] == kinds
    post(client, RESPONSES, input=whole, tools=[ADD])
    assert engine.tickets[-1].request.prompt == chained


def test_a_response_is_stored_listed_and_deleted(nano):
    client = client_of(engine_of(nano, text=TEXT))
    items = [USER, {"type": "reasoning", "id": "rs_1", "summary": []}, {"role": "assistant", "content": "932"},
             {"role": "user", "content": "Sure?", "id": "msg_mine"}]  # fmt: skip
    said = post(client, RESPONSES, input=items)
    at = f"{RESPONSES}/{said['id']}"
    assert client.get(at).json() == said
    listed = valid("ResponseItemList", client.get(f"{at}/input_items").json())
    assert [item["content"][0]["text"] for item in listed["data"]] == ["Sure?", "932", "347+585="]
    assert listed["first_id"] == "msg_mine" and listed["has_more"] is False
    pages, after = [], ""
    while True:
        page = client.get(f"{at}/input_items?order=asc&limit=1{after}").json()
        pages += page["data"]
        after = f"&after={page['last_id']}"
        if not page["has_more"]:
            break
    assert pages == listed["data"][::-1]
    for query in ("order=up", "limit=0", "limit=101", "limit=x", "after=nothing"):
        refused = client.get(f"{at}/input_items?{query}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == query.partition("=")[0]
    assert client.get(f"{at}?stream=true").json()["error"]["param"] == "stream"
    assert valid("DeletedResponse", client.delete(at).json())["id"] == said["id"]
    for answer in (client.get(at), client.delete(at), client.get(f"{at}/input_items")):
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "response_not_found"
    gone = client.post(RESPONSES, json={**ASK[RESPONSES], "previous_response_id": said["id"]})
    assert gone.status_code == 400 and gone.json()["error"]["param"] == "previous_response_id"
    assert gone.json()["error"]["code"] == "previous_response_not_found"


def test_nothing_is_kept_of_a_request_that_says_so_nor_of_a_failed_one(nano):
    client = client_of(engine_of(nano, text=TEXT))
    said = post(client, RESPONSES, store=False)
    assert client.get(f"{RESPONSES}/{said['id']}").status_code == 404
    failing = client_of(ScriptedEngine(nano, [snapshot([5], finish="error")]))
    failed = stream(failing, RESPONSES)[-1]["response"]
    assert failing.get(f"{RESPONSES}/{failed['id']}").status_code == 404


def test_a_key_finds_its_own_responses_only(nano):
    client = client_of(engine_of(nano, text=TEXT), keys=("first-key", "second-key"))
    first, second = ({"authorization": f"Bearer {name}-key"} for name in ("first", "second"))
    said = client.post(RESPONSES, json=ASK[RESPONSES], headers=first).json()
    at = f"{RESPONSES}/{said['id']}"
    for call in (client.get, client.delete):
        assert call(at, headers=second).status_code == 404
    body = {**ASK[RESPONSES], "previous_response_id": said["id"]}
    assert client.post(RESPONSES, json=body, headers=second).status_code == 400
    assert client.get(at, headers=first).json() == said
    assert client.post(RESPONSES, json=body, headers=first).status_code == 200


def test_the_store_drops_the_oldest_beyond_its_bounds():
    def kept(store, owner, ids):
        found = []
        for id in ids:
            try:
                found.append(store.get(owner, id).response["id"])
            except Exception:
                continue
        return found

    entry = lambda i, size=0: StoredResponse({"id": f"r{i}", "pad": "x" * size}, [])
    names = [f"r{i}" for i in range(9)]
    by_number = ResponseStore(1, max_responses=3)
    for i in range(9):
        by_number.put("a", entry(i))
    assert kept(by_number, "a", names) == ["r6", "r7", "r8"]
    by_number.delete("a", "r7")
    by_number.put("a", entry(9))
    assert kept(by_number, "a", [*names, "r9"]) == ["r6", "r8", "r9"]
    by_bytes = ResponseStore(2, max_bytes=2 * 1000)
    for owner in ("a", "b"):
        for i in range(9):
            by_bytes.put(owner, entry(i, 200))
    assert kept(by_bytes, "a", names) == kept(by_bytes, "b", names) == ["r5", "r6", "r7", "r8"]
    for i in range(4):
        by_bytes.delete("a", f"r{5 + i}")
    by_bytes.put("a", entry(0, 900))  # there is room again, and none for what is larger than all of it
    assert kept(by_bytes, "a", names) == ["r0"]
    by_bytes.put("a", entry(1, 1100))
    assert kept(by_bytes, "a", names) == []


REFUSED = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    ({"input": [USER, {"content": "a"}]}, "input[1].type"),
    ({"input": [{"type": "computer_call", "id": "a"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [USER, output_of("c9")]}, "input[1].call_id"),
    ({"input": [{"type": "reasoning"}, USER, {"type": "reasoning"}, output_of("c9")]}, "input[3].call_id"),
    ({"input": [made_call("c1"), made_call("c1")]}, "input[1].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c1", "name": "a b", "arguments": "{}"}]}, "input[0].name"),
    ({"input": "a" * 20000}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type"),
    ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type"),
    ({"tools": [ADD, {"type": "code_interpreter", "container": {}}]}, "tools[1].type"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type"),
    ({"tools": [{"type": "image_generation"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "add", "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
    ({"tools": [ADD, ADD]}, "tools[1].name"),
    ({"tools": [{**ADD, "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "pattern": r"(a)\1"}}}}]}, "tools[0].parameters"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 5}}}}, "text.format.schema"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": "1"}, "top_p"),
    ({"include": ["web_search_call.results"]}, "include[0]"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"truncation": "auto"}, "truncation"),
    ({"n": 2}, "n"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": {"id": "conv_1"}}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"messages": [USER]}, "messages"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"instruction": "Add."}, "instruction"),
]  # fmt: skip


@pytest.mark.parametrize("more, field", REFUSED)
def test_a_malformed_body_is_refused_by_the_name_of_its_field(scripted_app, more, field):
    error = scripted_app.refuses({**ASK[RESPONSES], **more}, RESPONSES)
    assert error["param"] == field and (
        field.partition(".")[0] in error["message"] or "context" in error["message"]
    )
    scripted_app.serves()


def test_a_long_answer_is_written_by_blocks(nano):
    """What a snapshot may still change is not sent."""
    ids = answer_ids(nano, text="one two three")
    guess = np.asarray(ids)[::-1]
    script = [snapshot(np.concatenate([ids[:n], guess[n:]]), final=n) for n in (0, 2, 4)]
    events = stream(
        client_of(ScriptedEngine(nano, [*script, snapshot(ids, finish="stop")], pause=0.002)), RESPONSES
    )
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text == "one two three" == output_text(events[-1]["response"])


def test_stored_json_has_the_limits_of_a_request(nano):
    """A value that a client may send can be stored and sent back."""
    client = client_of(ScriptedEngine(nano, text_snapshots(nano, "é日")))
    said = post(client, RESPONSES, input="é日\u2028", metadata={"k": "é"})
    assert json.loads(client.get(f"{RESPONSES}/{said['id']}").text) == said
    listed = client.get(f"{RESPONSES}/{said['id']}/input_items").json()
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "é日\u2028"}]
