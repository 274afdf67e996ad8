"""Messages: every form of OpenAI's clients becomes plain, anything else is refused by the name of its field."""

import json
import random
import socket

import pytest

from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.serve.chat.messages import opens_thinking, render_prompt
from mercury_jax.serve.errors import ApiError
from mercury_jax.tokenizer import SPECIAL, Tokenizer
from tests.hub.tiny_tokenizers import byte_level
from tests.serve.api_client import check_messages, check_tools, plain_conversation
from tests.serve.chat import answers
from tests.serve.chat.checkpoint_tokenizers import HERMES, hermes, with_tokens, without_tools
from tests.tiny import tokenizer

TOOL = {"function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
USER = {"role": "user", "content": "hi"}


def test_messages_become_plain():
    given = [
        {"role": "developer", "content": "be kind", "name": "me", "unknown": {}},
        {"role": "user",
         "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache": 1}]},
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "assistant", "content": "\0 ok", "tool_calls": None, "refusal": None},
        {"role": "assistant", "content": "", "tool_calls": []},
        {**ASKED,
         "tool_calls": [{**CALL, "index": 0}, {"id": "b", "function": {"name": "go", "arguments": ""}}]},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
    ]  # fmt: skip
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    go = {"id": "b", "type": "function", "function": {"name": "go", "arguments": {}}}
    assert check_messages(given) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb"},
        {"role": "user", "content": ""},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "\0 ok"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [call, go]},
        {"role": "tool", "content": "1", "tool_call_id": "a", "name": "add"},
    ]


def test_a_refusal_is_content():
    part = {"type": "refusal", "refusal": "I will not."}
    made = check_messages([
        {"role": "assistant", "content": [part]},
        {"role": "assistant", "content": [{"type": "text", "text": "Well."}, part]},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": "Yes.", "refusal": "No."},
    ])  # fmt: skip
    assert [message["content"] for message in made] == ["I will not.", "Well.\nI will not.", "No.", "Yes."]
    with pytest.raises(ApiError, match="allowed: image_url, text") as raised:
        check_messages([{"role": "user", "content": [part]}])
    assert raised.value.param == "messages[0].content[0].type"


def test_results_come_in_the_order_of_their_calls():
    calls = {**ASKED, "tool_calls": [{**CALL, "id": id} for id in "abc"]}
    result = lambda id: {"role": "tool", "content": f"of {id}", "tool_call_id": id}
    said = check_messages(
        [calls, result("c"), result("a"), USER, result("b"), calls, result("b"), result("a")]
    )
    assert [m["content"] for m in said] == [None, "of a", "of c", "hi", "of b", None, "of a", "of b"]


def test_function_calls_of_the_older_form_become_tool_calls():
    older = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}
    said = check_messages([older, {"role": "function", "name": "add", "content": "3"}])
    assert said[0]["tool_calls"][0]["id"] == said[1]["tool_call_id"]
    alone = check_messages(
        [{"role": "function", "name": "add", "content": "3"}, {"role": "function", "content": "4"}]
    )
    assert alone == [{"role": "tool", "content": "3", "name": "add"}, {"role": "tool", "content": "4"}]


def bad(message: dict, param: str, words: str):
    return pytest.param([USER, message], param, words, id=param)


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "a list of 0 entries; allowed: a list of 1 to 2048"),
        ("hi", "messages", "a list"),
        ([USER] * 5000, "messages", "a list of 5000 entries; allowed: a list of 1 to 2048"),
        bad("hi", "messages[1]", "an object"),  # pyright: ignore[reportArgumentType]
        bad({"role": "boss", "content": ""}, "messages[1].role", "'boss'; allowed: .*system"),
        bad({"role": ["user"], "content": ""}, "messages[1].role", "allowed: .*system"),
        bad({"role": "user", "content": 3}, "messages[1].content", "3; allowed: a string, or a list"),
        bad({"role": "user", "content": ["a"]}, "messages[1].content[0]", "an object"),
        bad({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
            "messages[1].content[0].type", "'image_url'; allowed: text"),
        bad({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "text is missing; allowed"),
        bad({"role": "user", "content": [{"type": "text", "text": ""}] * 2000}, "messages[1].content", "1024"),
        bad({"role": "tool", "content": "1"}, "messages[1].tool_call_id", "id is missing; allowed: a string"),
        bad({"role": "tool", "content": "1", "tool_call_id": "z"}, "messages[1].tool_call_id", "'z'; allowed: the id"),
        bad({**ASKED, "tool_calls": {}}, "messages[1].tool_calls", "a list"),
        bad({**ASKED, "tool_calls": [CALL] * 300}, "messages[1].tool_calls", "0 to 128"),
        bad({**ASKED, "tool_calls": [CALL, CALL]}, "messages[1].tool_calls", "'a'; allowed: ids that differ"),
        bad({**ASKED, "tool_calls": [{**CALL, "id": ""}]}, "messages[1].tool_calls[0].id", "a string of 1 to 256"),
        bad({**ASKED, "tool_calls": [{**CALL, "type": "x"}]}, "messages[1].tool_calls[0].type", "function"),
        bad({**ASKED, "tool_calls": [{**CALL, "function": {"name": "a b"}}]},
            "messages[1].tool_calls[0].function.name", "of the form"),
        bad({"role": "function", "name": "a b"}, "messages[1].name", "of the form"),
    ],
)  # fmt: skip
def test_an_invalid_message_is_refused_by_field(messages, param: str, words: str):
    with pytest.raises(ApiError, match=words) as raised:
        check_messages(messages)
    assert raised.value.status == 400
    assert raised.value.param == param and raised.value.message.startswith(param)


@pytest.mark.parametrize(
    "arguments",
    ["[1]", "x", "{", "3", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000, '{"a":' * 50 + "1" + "}" * 50,
     '{"a": ' + "9" * 5000 + "}", '{"a": 1e999}', '{"a": 1', "null", "<|end_tool_call|>"],
)  # fmt: skip
def test_malformed_arguments_stay_the_text_that_the_model_wrote(arguments):
    """A conversation goes on after them, whatever the template of the model expects."""
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "a", "content": "malformed"}
    messages, tools = [USER, {**ASKED, "tool_calls": [call]}, result], [{**TOOL, "type": "function"}]
    plain = check_messages(messages)
    assert plain[1]["tool_calls"][0]["function"]["arguments"] == arguments
    older = {"role": "assistant", "content": None, "function_call": call["function"]}
    assert check_messages([older])[0]["tool_calls"][0]["function"]["arguments"] == arguments
    by_name = HERMES.replace("{{- call.function.arguments | tojson }}",
                             "{%- for k, v in call.function.arguments.items() %}{{- k ~ v }}{%- endfor %}")  # fmt: skip
    shown = [
        tokenizer(),
        hermes("special"),
        without_tools(),
        HFTokenizer.of(with_tokens(byte_level(normal=False), by_name)),
    ]
    for tok in shown:
        prompt = render_prompt(answers.lm_of(tok), plain, tools)
        text = tok.decode(prompt)
        assert arguments in text or json.dumps(arguments, ensure_ascii=False) in text
        assert not isinstance(tok, Tokenizer) or prompt.count(SPECIAL.end_tool_call) == 1


@pytest.mark.parametrize(
    "body, words",
    [
        ("{{ messages[0].content + none }}", "messages cannot be rendered by the model's chat template"),
        ("{{ missing.field }}", "messages cannot be rendered"),
        ("{{ raise_exception('only users speak') }}", "the chat template refuses them: only users speak"),
    ],
)  # fmt: skip
def test_a_template_that_fails_shows_no_python(body, words):
    lm = answers.lm_of(
        HFTokenizer.of(with_tokens(byte_level(normal=False), "{%- if tools %}{% endif %}" + body))
    )
    with pytest.raises(ApiError, match=words) as raised:
        render_prompt(lm, [USER])
    assert raised.value.param == "messages" and "NoneType" not in raised.value.message


@pytest.mark.parametrize("arguments", [3, [1], True])
def test_arguments_are_a_text_or_an_object(arguments):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ApiError, match="an object") as raised:
        check_messages([{**ASKED, "tool_calls": [call]}])
    assert raised.value.param == "messages[0].tool_calls[0].function.arguments"


def test_tools_are_checked_and_made_plain():
    schema = {"type": "object", "properties": {"x": {"type": "number"}}}
    function = {"name": "a.b-C_1", "description": "adds", "parameters": schema, "strict": True, "other": 1}
    plain = {"name": "a.b-C_1", "description": "adds", "parameters": schema}
    assert check_tools([{"type": "function", "function": function}]) == [
        {"type": "function", "function": plain}
    ]
    least = [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}]
    assert check_tools(least) == [{"type": "function", "function": {"name": "f"}}]
    assert check_tools(None) == check_tools([]) == []
    assert check_tools(tool(parameters={}))[0]["function"]["parameters"] == {}


def tool(**function):
    return [{"type": "function", "function": {"name": "f", **function}}]


@pytest.mark.parametrize(
    ("tools", "param"),
    [({}, "tools"), (tool() * 300, "tools"), ([3], "tools[0]"), ([{"type": "web_search"}], "tools[0].type"),
     ([{"type": "function"}], "tools[0].function"), (tool(name="x" * 65), "tools[0].function.name"),
     (tool(name="a b"), "tools[0].function.name"), (tool(name="f\n"), "tools[0].function.name"),
     (tool() * 2, "tools[1].function.name"), (tool(description=3), "tools[0].function.description"),
     (tool(parameters=[]), "tools[0].function.parameters"),
     (tool(parameters={"type": "string"}), "tools[0].function.parameters.type"),
     (tool(parameters={"type": "object", "x": {"\ud800": 1}}), "tools[0].function.parameters"),
     (tool(parameters=json.loads('{"a":' * 60 + "1" + "}" * 60)), "tools[0].function.parameters")],
)  # fmt: skip
def test_an_invalid_tool_is_refused_by_field(tools, param: str):
    with pytest.raises(ApiError) as raised:
        check_tools(tools)
    assert raised.value.param == param


def test_any_json_becomes_plain_or_is_refused_and_nothing_is_fetched(monkeypatch):
    def never(*_args, **_kwargs):
        raise AssertionError("a socket")

    monkeypatch.setattr(socket, "socket", never)
    monkeypatch.setattr(socket, "create_connection", never)
    rng, lm = random.Random(0), answers.lm_of(tokenizer())
    base = [USER, ASKED, {"role": "tool", "content": "1", "tool_call_id": "a"}]
    read = lambda messages, tools: render_prompt(lm, *plain_conversation(messages, tools))
    plain, params = 0, set()
    for _ in range(1500):
        messages, tools = json.loads(json.dumps([base, tool(parameters={"type": "object"})]))
        _mutate(rng, rng.choice([messages, tools]))
        try:
            assert read(messages, tools)[-1] == SPECIAL.assistant
            plain += 1
        except ApiError as raised:
            params.add((raised.param or "").partition("[")[0])
    assert 200 < plain < 1300 and params == {"messages", "tools"}


def _mutate(rng: random.Random, value) -> None:
    """Replaces or deletes a random value."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(value[key], dict | list) or rng.random() < 0.2:
            break
        value = value[key]
    if rng.random() < 0.3:
        del value[key]
    else:
        odd = [
            None, True, 3, -1.5, "", "x", "http://localhost/x.png", "<|system|>", [], {}, [{}],
            {"type": "text"},
        ]  # fmt: skip
        value[key] = rng.choice(odd)


def test_a_prompt_is_rendered_by_the_template_and_may_open_thinking():
    tok: Tokenizer = tokenizer()
    lm, said, tools = answers.lm_of(tok), check_messages([USER, ASKED]), check_tools(tool())
    assert render_prompt(lm, said, tools) == tuple(tok.render(said, tools=tools))
    assert render_prompt(lm, said, []) == render_prompt(lm, said)
    assert opens_thinking(lm, render_prompt(lm, said, thinking=True)) and not opens_thinking(
        lm, render_prompt(lm, said)
    )
