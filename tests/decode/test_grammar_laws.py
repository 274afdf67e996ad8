"""Laws of grammars, without a model: whatever is proposed, what comes out obeys, and fits the budget."""

import importlib
import ipaddress
import json
import time
from collections import Counter
from datetime import date

import numpy as np
import pytest

from mercury_jax.decode.grammar import (
    CallsOr,
    Choice,
    FreeOr,
    JSONObject,
    JSONSchema,
    Regex,
    ToolCalls,
    compile,
)
from mercury_jax.decode.grammar.search import EndSearch
from tests.decode.grammar_corpus import cases, judged
from tests.decode.grammar_many import allowed, fault, generate, nano_tokenizer
from tests.decode.grammar_schemas import SCHEMAS, TEXT, record

TOK = nano_tokenizer()
walking = importlib.import_module("mercury_jax.decode.grammar.grammar")
OPEN, CLOSE = TOK.special.tool_call, TOK.special.end_tool_call
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
    },
}
NOW = {"name": "now"}


def grammar(spec):
    return compile(TOK, spec if not isinstance(spec, dict | bool) else JSONSchema(spec))


def driven(spec, text, budget=200, sure=True):
    """(walker, steps) of a model that proposes this text, given as ids or as a text, and goes on where it stands."""
    wanted = TOK.encode(text) if isinstance(text, str) else list(text)
    walker = grammar(spec).walk(budget)
    steps = [walker.advance()]
    while not steps[-1].ended and len(walker.written) < len(wanted):
        rest = wanted[len(walker.written) :]
        steps.append(walker.advance(rest, [sure] * len(rest)))
    return walker, steps


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_model_that_draws_uniformly_validates_in_every_budget(name):
    made, rng = grammar(SCHEMAS[name]), np.random.default_rng(7)
    for spare in (0, 1, 8, 150):
        run = generate(made, made.shortest + spare, rng, TOK.vocab_size)
        assert len(run.tokens) <= made.shortest + spare
        assert fault(SCHEMAS[name], TOK.decode(run.tokens)) is None


@pytest.mark.parametrize("name", ["person", "linked list", "constant"])
def test_one_token_less_than_the_shortest_answer_is_refused(name):
    made = grammar(SCHEMAS[name])
    with pytest.raises(
        ValueError, match=f"{made.shortest} tokens or more; max_tokens leaves {made.shortest - 1}"
    ):
        made.walk(made.shortest - 1)


def exhaustive(made, most):
    """The fewest tokens of an answer, by trying all of them; a state is what is written, not how it is spelt."""
    layer = {b"": made.tokens.deep_copy()}
    for count in range(most + 1):
        if any(matcher.is_accepting() for matcher in layer.values()):
            return count
        after = {}
        for text, matcher in layer.items():
            for i in allowed(np.frombuffer(matcher.compute_bitmask(), np.uint32)):
                if (key := text + (TOK.pieces[i] or b"<%d>" % i)) not in after:
                    after[key] = matcher.deep_copy()
                    after[key].try_consume_tokens([int(i)])
        layer = after
    raise AssertionError(f"none of {most} tokens")


@pytest.mark.parametrize(
    "spec",
    [
        {"enum": ["extraordinary", "nothing at all", "no way"]},
        {"const": {"a": [1, 2], "b": None}},
        record(kind={"enum": ["long kind", "short"]}, on={"type": "boolean"}),
        {"anyOf": [record(x={"const": 1}, y={"const": 2}), record(other={"const": "z"})]},
        Choice(["return x", "return value", "pass  # for now"]),
        Regex("(ab|cd){2,3}-[01]{4}"),
        ToolCalls([NOW, {"name": "clock_time"}], OPEN, CLOSE),
        {"type": "array", "items": {"enum": [True, None]}, "minItems": 3, "maxItems": 3},
    ],
    ids=str,
)
def test_the_shortest_answer_is_the_shortest(spec):
    made = grammar(spec)
    assert made.shortest == exhaustive(made, made.shortest + 1)


LONG = "a_required_name_that_is_much_longer_than_the_reference"
REF = {"$ref": "#"}
RECURSIVE = {
    "itself first": record([LONG, "at"], child=REF, **{LONG: TEXT}, at={"type": "string", "format": "date-time"}),
    "a map of itself first": record(
        ["v"], k={"type": "object", "additionalProperties": REF, "minProperties": 1}, v=TEXT
    ),
    "one another": {
        "$defs": {
            "a": record(["n", "m"], b={"$ref": "#/$defs/b"}, n=TEXT, m={"const": "x" * 40}),
            "b": record(["m"], a={"$ref": "#/$defs/a"}, m={"type": "string", "minLength": 30}),
        },
        "$ref": "#/$defs/b",
    },
    "the recursive option first": {
        "$defs": {"e": {"anyOf": [record(op=TEXT, of={"$ref": "#/$defs/e"}), record(value={"const": "v" * 50})]}},
        "$ref": "#/$defs/e",
    },
    "a list of itself": record(["kids", "name"], kids={"type": "array", "items": REF}, name={"const": "n" * 60}),
    "all of itself": {
        "$defs": {"n": {"allOf": [{"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}},
                                  {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}]}},
        "$ref": "#/$defs/n",
    },
    "a chain of references": {
        "$defs": {f"d{i}": record(d={"$ref": f"#/$defs/d{i + 1}"}) for i in range(120)} | {"d120": {"type": "null"}},
        "$ref": "#/$defs/d0",
    },
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", RECURSIVE)
def test_a_recursive_schema_has_its_shortest_answer_in_whatever_order_it_is_written(name):
    made, rng, depths = grammar(RECURSIVE[name]), np.random.default_rng(2), set()
    for spare in (0, 2, 30, 150, 150, 150):
        text = TOK.decode(generate(made, made.shortest + spare, rng, TOK.vocab_size).tokens)
        assert fault(RECURSIVE[name], text) is None
        depths.add(text.count("{"))
    plan = TOK.decode(list(made.plan))
    assert plan.count("{") == min(depths) == (120 if "chain" in name else 1)
    # Also in the middle: an answer that goes one level down is not forced back.
    if name in ("itself first", "a map of itself first"):
        inner = '{"child":{' if name == "itself first" else '{"k":{"z":{'
        walker, _ = driven(RECURSIVE[name], inner, budget=made.shortest * 5)
        assert TOK.decode(walker.written).replace(" ", "").startswith(inner) and not walker.overruled


@pytest.mark.parametrize(
    ("names", "closed"),
    [
        ({"type": "string"}, False),
        ({"type": "string", "enum": ["red", "blue"]}, True),
        ({"$ref": "#/$defs/colour"}, True),
        ({"pattern": "^(red|blue)$"}, True),
        ({"anyOf": [{"const": "red"}, {"type": "string", "pattern": "^blue$"}]}, True),
        ({"minLength": 3, "maxLength": 4}, False),
    ],
    ids=str,
)
def test_names_of_properties_obey_their_schema(names, closed):
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"},
              "$defs": {"colour": {"enum": ["red", "blue"]}}}  # fmt: skip
    made = grammar(schema)
    assert made.completes(TOK.encode('{"red":1}')) and made.completes(TOK.encode("{}"))
    assert made.completes(TOK.encode('{"pink":1}')) != closed and not made.completes(TOK.encode('{"red":""}'))


@pytest.mark.parametrize(
    "name", ["password", "path", "binary", "int32", "ipvanynetwork", "ipv4network", "made up"]
)
def test_a_format_without_a_pattern_is_an_annotation(name):
    made = grammar({"type": "string", "format": name})
    if name.startswith("ip"):
        ipaddress.ip_network(json.loads(TOK.decode(list(made.plan))))
        for text, fits in (("10.0.0.0/8", True), ("10.1.0.0/8", False), ("word", False)):
            assert made.completes(TOK.encode(f'"{text}"')) == (fits and name == "ipv4network")
    else:
        assert made.completes(TOK.encode('"any text"'))


@pytest.mark.long
def test_schemas_in_the_style_of_published_ones_are_answered_or_refused_at_their_place():
    """A sample; `python -m tests.decode.grammar_corpus` takes all."""
    rng, tally = np.random.default_rng(0), Counter()
    wrong = [line for case in cases(24, seed=3) for line in judged(case, rng, 2, tally)]
    assert wrong == [] and tally["refused"] == 1 and tally["answers"] + tally["gave_up"] == 46


def test_a_bit_is_set_for_what_may_come_next_and_for_nothing_else():
    schema = record(name={"type": "string", "maxLength": 4}, n={"type": "integer", "minimum": 7})
    walker = grammar(schema).walk(60)
    walker.advance()
    for text in ("", '"ab', '"ab", "n":', '"ab", "n": 12'):
        walker, _ = driven(schema, '{"name":' + text, 60, sure=True)
        may = set(allowed(walker.bits()).tolist())
        copies = [walker._tokens.deep_copy() for _ in range(TOK.vocab_size)]
        assert may == {i for i, copy in enumerate(copies) if copy.try_consume_tokens([i]) == 1}


def test_what_is_forced_needs_no_model():
    step = grammar({"const": {"version": 2}}).walk(40).advance()
    # One choice is left: whether a space stands behind the colon.
    assert all(step.forced) and TOK.decode(step.commit) == '{"version":' and not step.ended
    step = grammar(Choice(["only this"])).walk(40).advance()
    assert step.ended and all(step.forced) and TOK.decode(step.commit) == "only this"


def test_a_good_proposal_is_taken_at_once_and_an_unsure_one_token_by_token():
    text = '{"name": "Ada", "age": 36, "email": "ada@example.org"}'
    quick, steps = driven(SCHEMAS["person"], text)
    slow, many = driven(SCHEMAS["person"], text, sure=False)
    assert TOK.decode(quick.written) == TOK.decode(slow.written) == text
    assert quick.ended and slow.ended and not quick.cut
    # Where the grammar spells something in other tokens than the model, the rest waits for another look.
    assert 2 * len(steps) < len(many)


def test_what_does_not_fit_is_left_and_said_so():
    walker = grammar(SCHEMAS["person"]).walk(60)
    walker.advance()
    step = walker.advance([*TOK.encode(' "A"'), *TOK.encode("!!")], [True] * 8)
    assert step.clear and TOK.decode(walker.written).startswith('{"name": "A"')
    assert "!!" not in TOK.decode(walker.written)


def test_a_budget_that_runs_out_is_closed_by_the_plan():
    made = grammar(record(essay={"type": "string"}, ok={"type": "boolean"}))
    walker = made.walk(made.shortest + 10)
    step, word = walker.advance(), TOK.encode("value")[0]
    step = walker.advance(TOK.encode('"')[-1:], [True])
    while not step.ended:
        step = walker.advance([word], [True])
    said = json.loads(TOK.decode(walker.written))
    assert len(walker.written) <= walker.budget and walker.overruled > 0
    assert "value" in said["essay"] and isinstance(said["ok"], bool)


def test_an_answer_ends_where_the_model_says_or_the_budget_does():
    walker, steps = driven({"type": "integer"}, [*TOK.encode("42"), TOK.eos])
    assert steps[-1].ended and not walker.cut and TOK.decode(walker.written) == "42"
    walker, steps = driven({"type": "integer"}, "4242424242", budget=4)
    assert steps[-1].ended and walker.cut and TOK.decode(walker.written) == "4242"
    # In the middle of an answer the end of text is no legal proposal.
    walker, _ = driven({"type": "string"}, '"ab', budget=30)
    assert TOK.eos not in allowed(walker.bits()) and TOK.eos not in walker.advance([TOK.eos], [True]).commit


def test_a_matcher_that_gives_up_is_replaced_and_the_answer_still_ends():
    walker, _ = driven(SCHEMAS["person"], '{"name": "Ada", "age": 3', 60)
    walker._tokens.consume_token(OPEN)  # not legal: it never recovers from that
    assert walker._tokens.is_error()
    (first,) = allowed(walker.bits())
    assert [first] == walker.plan[:1]
    walker._tokens.consume_token(OPEN)
    while not walker.ended:
        walker.advance([first], [True])
    assert fault(SCHEMAS["person"], TOK.decode(walker.written)) is None


def test_a_matcher_that_gives_up_behind_a_complete_answer_leaves_the_end():
    walker = grammar({"type": "integer"}).walk(9)
    digit = walker.plan
    walker.advance(digit, [True])
    walker._tokens.consume_token(OPEN)
    assert walker._tokens.is_error() and walker.plan == [] and not walker.ended
    assert allowed(walker.bits()).tolist() == [TOK.eos]
    assert walker.advance([TOK.eos], [True]).ended and walker.written == digit


def exists(kind, text):
    """Whether the calendar has this date, or the clock this time of day."""
    try:
        return bool(kind.fromisoformat(text))
    except ValueError:
        return False


def test_dates_are_those_of_the_calendar():
    made = grammar({"type": "string", "format": "date"})
    years = (0, 1, 4, 99, 100, 400, 1000, 1900, 2000, 2023, 2024, 2100, 9996, 9999)
    dates = [
        f"{y:04}-{m:02}-{d:02}"
        for y in years
        for m in (0, 1, 2, 4, 12, 13)
        for d in (0, 1, 28, 29, 30, 31, 32)
    ]
    for text in dates:
        assert made.completes(TOK.encode(f'"{text}"')) == exists(date, text), text


def test_a_minute_has_sixty_seconds_and_t_and_z_are_capitals():
    for kind, before in (("time", ""), ("date-time", "2016-12-31T")):
        made = grammar({"type": "string", "format": kind})
        for text in ("23:59:59Z", "00:00:00.5Z", "12:30:09+02:00", "23:59:60Z", "12:30:60Z", "24:00:00Z"):
            wanted = "60" not in text and not text.startswith("24")
            assert made.completes(TOK.encode(f'"{before}{text}"')) == wanted, text
            small = f"{before}{text}".lower()
            assert not made.completes(TOK.encode(f'"{small}"')) or small == before + text, small


def test_calls_are_written_between_their_marks():
    spec = ToolCalls([WEATHER, NOW], OPEN, CLOSE, at_most=2)
    first = [OPEN, *TOK.encode('{"name": "weather", "arguments": {"city": "Rome"}}'), CLOSE]
    walker, _ = driven(spec, [*first, OPEN, *TOK.encode('{"name":"now","arguments":{}}'), CLOSE])
    assert walker.ended and TOK.decode(walker.written).startswith('{"name": "weather"')
    assert walker.written.count(OPEN) == walker.written.count(CLOSE) == 2
    rng = np.random.default_rng(3)
    for _ in range(20):
        run = generate(grammar(spec), grammar(spec).shortest + int(rng.integers(0, 40)), rng, TOK.vocab_size)
        calls = "".join("[" if i == OPEN else "]," if i == CLOSE else TOK.decode([i]) for i in run.tokens)
        for call in json.loads(f"[{calls[:-1]}]"):
            assert call[0]["name"] == "now" or call[0]["arguments"]["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("marks", [(OPEN, CLOSE), ("<call>\n", "\n</call>"), (["<call>", OPEN], CLOSE)])
def test_a_free_answer_may_call(marks):
    spec = FreeOr(ToolCalls([NOW], *marks, at_most=1))
    flat = lambda mark: [i for part in (mark if isinstance(mark, list) else [mark]) for i in _ids(part)]
    walker, _ = driven(spec, [*TOK.encode("It is noon."), TOK.eos])
    assert walker.ended and TOK.decode(walker.written) == "It is noon."
    body = TOK.encode('{"name": "now", "arguments": {}}')
    walker, _ = driven(spec, [*TOK.encode("One moment. "), *flat(marks[0]), *body, *flat(marks[1])])
    assert walker.ended and '"name": "now"' in TOK.decode(walker.written)
    # Behind the mark there is no way but a call.
    walker, _ = driven(spec, [*TOK.encode("So: "), *flat(marks[0]), *TOK.encode("no call")])
    assert '{"name":' in TOK.decode(walker.written) and "no call" not in TOK.decode(walker.written)
    # A free text that the budget cuts off is complete, and cut.
    walker, _ = driven(spec, "word " * 40, budget=9)
    assert walker.ended and walker.cut and len(walker.written) == 9


@pytest.mark.parametrize("open", [OPEN, "<<call>", ["<", OPEN], ["", "é>", OPEN]])
def test_tokens_of_free_text_lead_back_to_free_text(open):
    """In any number and order they are committed as they are, nothing is forced, and the next mask is the same."""
    rng, made = np.random.default_rng(1), grammar(FreeOr(ToolCalls([NOW], open, CLOSE)))
    states = set()
    for _ in range(60):
        one, two = made.walk(200), made.walk(200)
        while not (one.ended or len(one.written) > 40):
            allowed = np.flatnonzero(np.unpackbits(one.bits().view(np.uint8), bitorder="little"))
            free, tokens = one.free(), [int(i) for i in rng.choice(allowed, 1)]
            if rng.random() < 0.1:  # parts of what opens a call, or a part of a character
                tokens = [
                    int(i) for i in rng.permutation([*TOK.encode("x<<")[1:], *TOK.encode("\U0001f600é")])
                ][:1]
            states.add(free is None)
            if free is not None and rng.random() < 0.7:
                before = one.bits()
                ids = np.flatnonzero(np.unpackbits(free.view(np.uint8), bitorder="little"))
                tokens = [int(i) for i in rng.choice(ids, 1 + int(rng.integers(4)))]
                one.follow(tokens)
                step = two.advance(tokens, [True] * len(tokens))
                assert (step.commit, any(step.forced), step.clear) == (tokens, False, False)
                assert one.free() is not None and np.array_equal(one.free(), free)
                assert np.array_equal(one.bits(), before) and np.array_equal(two.bits(), before)
            else:
                assert one.advance(tokens, [True]) == two.advance(tokens, [True])
            assert one.written == two.written and one.plan == two.plan
    assert states == {True, False}
    walker, _ = driven(FreeOr(ToolCalls([NOW], OPEN, CLOSE)), [*TOK.encode("So: "), OPEN])
    assert walker.free() is None  # calls do not end in free text


def test_a_free_answer_shows_something_or_calls():
    made = grammar(FreeOr(ToolCalls([NOW], OPEN, CLOSE)))
    call = [OPEN, *TOK.encode('{"name": "now", "arguments": {}}'), CLOSE]
    for ids, complete in (([], False), (TOK.encode(" \n"), False), (TOK.encode("\n a b"), True), (call, True),
                          ([*TOK.encode("\n"), *call], True), ([*TOK.encode("So: "), *call], True)):  # fmt: skip
        assert made.completes(ids) == complete, ids


def test_an_answer_is_calls_or_a_value_and_never_a_mixture():
    made = grammar(CallsOr(ToolCalls([NOW], OPEN, CLOSE), JSONSchema(record(n={"type": "integer"}))))
    value, call = TOK.encode('{"n": 5}'), [OPEN, *TOK.encode('{"name": "now", "arguments": {}}'), CLOSE]
    for ids, complete in ((value, True), (call, True), ([*call, *call], True), ([*value, *call], False),
                          ([*call, *value], False), (TOK.encode("text"), False), ([], False)):  # fmt: skip
        assert made.completes(ids) == complete, ids
    rng = np.random.default_rng(5)
    for _ in range(20):
        said = generate(made, made.shortest + int(rng.integers(0, 30)), rng, TOK.vocab_size).tokens
        assert (OPEN in said) or isinstance(json.loads(TOK.decode(said))["n"], int)


def test_no_step_searches_longer_than_its_time_and_the_answer_still_obeys(monkeypatch):
    """Each state of a large grammar takes milliseconds, and the other rows of the batch wait for the search."""
    child = EndSearch._child

    def slow(*args, **named):
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        return child(*args, **named)

    schema = {"anyOf": [record(**{f"k{i}": {"type": "string", "pattern": f"^[a-z]{{{i},{i + 9}}}[0-9]$"}})
                        for i in range(9)]}  # fmt: skip
    made, rng = grammar(schema), np.random.default_rng(1)
    monkeypatch.setattr(EndSearch, "_child", slow)
    walker, steps = made.walk(60), []
    while not walker.ended:
        began, drawn = time.thread_time(), rng.choice(allowed(walker.bits()))
        walker.advance([int(drawn)], [True])
        steps.append(time.thread_time() - began)
    assert len(json.loads(TOK.decode(walker.written))) == 1
    assert max(steps) < walking.STEP_SECONDS + 0.05 and sum(steps) < walking.ANSWER_SECONDS + 1


def _ids(part):
    return [part] if isinstance(part, int) else TOK.encode(part)


def test_a_key_cannot_be_spelt_in_a_second_way():
    schema = {"type": "object", "properties": {"a\nb": {"type": "integer"}}, "required": ["a\nb"]}
    for text in ('{"a\\nb":1,"a\\u000ab":"x"}', '{"a\\nb":1,"a\\nb":2}'):
        walker, _ = driven(schema, text, budget=60)
        assert isinstance(json.loads(TOK.decode(walker.written))["a\nb"], int) if walker.ended else True
        assert "x" not in TOK.decode(walker.written) and "u000a" not in TOK.decode(walker.written)


def test_a_fraction_close_to_an_open_bound_is_not_rounded_onto_it():
    schema = record(p={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1})
    for number in ("0." + "0" * 40, "0." + "9" * 40):
        walker, _ = driven(schema, f'{{"p":{number}', budget=90)
        while not walker.ended:
            walker.advance([TOK.encode("9")[-1]], [True])
        assert 0 < json.loads(TOK.decode(walker.written))["p"] < 1


def test_any_object_and_whole_patterns():
    rng = np.random.default_rng(0)
    assert isinstance(
        json.loads(TOK.decode(generate(grammar(JSONObject()), 40, rng, TOK.vocab_size).tokens)), dict
    )
    walker, _ = driven(Regex("[a-c]{2}x|[0-9]+"), "ab")
    assert not walker.ended and walker.plan == TOK.encode("x")[-1:]
