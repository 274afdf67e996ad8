"""Schemas in the style of published collections, and what becomes of each: `python -m tests.decode.grammar_corpus`.

320 schemas in the styles of JSONSchemaBench (GitHub, function calls, Kubernetes, news, events) and Zod, recursive ones,
and ones with keywords that a grammar lacks; 34 tools. Of every schema the maker knows whether it is accepted, or the
place that an error must name. A model that draws uniformly answers under each, in several budgets, and jsonschema
judges the answers. Prints one JSON line. --schemas: a folder of folders of schemas, such as `data` of JSONSchemaBench,
of which as many are taken instead of our own, the same number from each folder. --suite: the folder `tests` of the
JSON-Schema-Test-Suite, whose instances are judged as well.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.decode.grammar import GrammarError, JSONSchema, ToolCalls, compile
from tests.decode.grammar_many import GaveUp, Unjudged, fault, generate, nano_tokenizer

TOK = nano_tokenizer()
WORDS = [
    "id",
    "name",
    "kind",
    "status",
    "owner",
    "labels",
    "spec",
    "items",
    "url",
    "created",
    "size",
    "tags",
    "email",
    "path",
    "config",
    "rules",
    "level",
    "count",
]
FORMATS = [
    "date-time",
    "date",
    "time",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "password",
    "binary",
    "path",
    "int32",
    "color",
    "ipv4network",
]
NAMED = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "null"}},
}
CHOICE = {"if": {"properties": {"b": {"const": "x"}}, "required": ["b"]}, "then": {"required": ["a"]}}
# What llguidance lacks: rewritten, or checked at the end.
KEYWORDS: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"type": "array", "items": {"enum": WORDS[:3]}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"type": ["integer", "string"]}, "contains": {"type": "string"}},
    {"type": "array", "contains": {"const": "x"}, "minContains": 2, "maxContains": 3, "items": {"type": "string"}},
    {"type": ["string", "null", "integer"], "not": {"type": "null"}}, {"not": {"enum": ["a", 1, None]}},
    {**NAMED, "not": {"required": ["a", "b"]}}, {**NAMED, "dependentRequired": {"a": ["b"]}}, {**NAMED, **CHOICE},
    {**NAMED, **CHOICE, "else": {"required": ["c"]}}, {**NAMED, "dependencies": {"b": {"required": ["c"]}}},
    {**NAMED, "dependentSchemas": {"a": {"properties": {"b": {"minLength": 2}}}}},
    {**NAMED, "unevaluatedProperties": False}, {**NAMED, "minProperties": 1, "additionalProperties": False},
    {**NAMED, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"oneOf": [{"type": "string", "maxLength": 4}, {"type": "string", "minLength": 2}]},
    {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 9},
    {"type": "string", "pattern": "^(?!ab)[a-z]{3}$"},
    {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{4,8}$"},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 3}},
     "additionalProperties": False},
]  # fmt: skip
# What is guaranteed neither way, and the keyword that the error names.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"$dynamicRef": "#node"}, ".$dynamicRef"), ({"$ref": "https://example.org/a.json"}, ".$ref"),
    ({"type": "string", "pattern": "(a)\\1"}, ".pattern"), ({"type": "string", "pattern": "a(?=b)"}, ".pattern"),
    ({"type": "array", "minItems": 10**6}, ".minItems"), ({"type": "text"}, ".type"),
]  # fmt: skip


UNKNOWN = "?"


class Case(NamedTuple):
    """A schema; `place`: what its refusal names, None where it must be accepted, UNKNOWN where it may be either."""

    name: str
    schema: dict[str, Any]
    place: str | None = None


def leaf(pick: random.Random) -> dict[str, Any]:
    return pick.choice(
        [
            {"type": "string"},
            {"type": "string", "maxLength": pick.randint(1, 40), "description": "A text"},
            {"type": "string", "format": pick.choice(FORMATS)},
            {
                "type": "string",
                "pattern": pick.choice(["^[a-z]+$", "^v[0-9]+\\.[0-9]+$", "[0-9]{3}", "^(a|b)-x*$"]),
            },
            {"enum": pick.sample(WORDS, 3)},
            {"const": pick.choice(WORDS)},
            {"type": "integer", "minimum": pick.randint(-5, 5)},
            {"type": "number", "minimum": 0, "exclusiveMaximum": pick.randint(1, 1000)},
            {"type": "boolean", "default": False},
            {"type": ["string", "null"], "maxLength": 12},
            {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[0-9]+%$"}]},
        ]
    )


def anything(pick: random.Random, depth: int) -> dict[str, Any]:
    """A value of any kind: objects and lists down to a depth."""
    if depth <= 0 or pick.random() < 0.4:
        return leaf(pick)
    if pick.random() < 0.3:
        return {
            "type": "array",
            "items": anything(pick, depth - 1),
            "minItems": pick.randint(0, 2),
            "maxItems": 4,
        }
    if pick.random() < 0.2:
        return {"type": "object", "additionalProperties": anything(pick, depth - 1)}
    return an_object(pick, depth - 1)


def an_object(pick: random.Random, depth: int) -> dict[str, Any]:
    names = pick.sample(WORDS, pick.randint(1, 5))
    made = {"type": "object", "properties": {name: anything(pick, depth) for name in names}}
    if pick.random() < 0.7:
        made["required"] = pick.sample(names, pick.randint(1, len(names)))
    if pick.random() < 0.6:
        made["additionalProperties"] = False
    return made


def github(pick: random.Random) -> dict[str, Any]:
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Config", **an_object(pick, 3)}


def functions(pick: random.Random) -> dict[str, Any]:
    names = pick.sample(WORDS, pick.randint(1, 6))
    properties = {name: {**leaf(pick), "description": f"The {name}"} for name in names}
    return {"type": "object", "properties": properties, "required": names[: pick.randint(0, len(names))]}


def kubernetes(pick: random.Random) -> dict[str, Any]:
    kinds = {f"io.k8s.{word}": an_object(pick, 1) for word in pick.sample(WORDS, 3)}
    refs = {
        word: {"$ref": f"#/definitions/{kind}", "description": "A part"}
        for word, kind in zip(WORDS, kinds, strict=False)
    }
    port = {"oneOf": [{"type": "integer"}, {"type": "string"}]}
    labels = {"type": ["object", "null"], "additionalProperties": {"type": ["string", "null"]}}
    return {"definitions": kinds, "type": "object", "properties": {**refs, "port": port, "labels": labels},
            "required": pick.sample([*refs, "port"], 2),
            "x-kubernetes-group-version-kind": [{"kind": "Pod"}]}  # fmt: skip


def news(pick: random.Random) -> dict[str, Any]:
    part = lambda kind: {"type": "object", "properties": {"type": {"enum": [kind]}, "content": leaf(pick)},
                         "required": ["type"]}  # fmt: skip
    parts = {"type": "array", "items": {"oneOf": [part("text"), part("image"), part("list")]}}
    return {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object",
            "properties": {"_id": {"type": "string"}, "parts": parts, **an_object(pick, 1)["properties"]},
            "required": ["_id", "parts"], "additionalProperties": pick.random() < 0.5}  # fmt: skip


def events(pick: random.Random) -> dict[str, Any]:
    names = pick.sample(WORDS, 4)
    bounds = {"type": ["integer", "null"], "minimum": 0, "maximum": 2147483647}
    texts = {name: {"type": ["string", "null"], "maxLength": pick.randint(1, 255)} for name in names}
    return {"self": {"vendor": "com.example", "version": "1-0-0"}, "type": "object",
            "properties": {**texts, "at": {"type": "string", "format": "date-time"}, "n": bounds},
            "required": pick.sample(names, 2), "additionalProperties": False, "dependencies": {}}  # fmt: skip


def zod(pick: random.Random) -> dict[str, Any]:
    names = pick.choice([{"type": "string"}, {"type": "string", "enum": pick.sample(WORDS, 3)},
                         {"type": "string", "pattern": "^[a-z]{2,5}$"}, {"$ref": "#/$defs/names"},
                         {"type": "string", "minLength": 2, "maxLength": 6},
                         {"anyOf": [{"const": "any"}, {"type": "string", "pattern": "^x-[a-z]+$"}]}])  # fmt: skip
    values = anything(pick, 1)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
            "$defs": {"names": {"enum": pick.sample(WORDS, 2), "type": "string"}},
            "properties": {"record": {"type": "object", "propertyNames": names, "additionalProperties": values}},
            "required": ["record"], "additionalProperties": False}  # fmt: skip


def recursive(pick: random.Random) -> dict[str, Any]:
    itself = {"$ref": "#/$defs/node"}
    child = pick.choice([
        itself, {"type": "array", "items": itself}, {"anyOf": [itself, {"type": "null"}]},
        {"type": "object", "additionalProperties": itself}, {"allOf": [itself]},
        {"type": "object", "properties": {"inner": itself}, "required": ["inner"]},
    ])  # fmt: skip
    names = pick.sample(WORDS, 3)
    node = {"type": "object", "properties": {"child": child, **{name: leaf(pick) for name in names}},
            "required": names[: pick.randint(1, 3)], "additionalProperties": False}  # fmt: skip
    end = {
        "type": "object",
        "properties": {"end": leaf(pick)},
        "required": ["end"],
        "additionalProperties": False,
    }
    whole: dict[str, Any] = (
        node if pick.random() < 0.6 else {"anyOf": [{**node, "required": ["child", *names]}, end]}
    )
    return {"$defs": {"node": whole}, **itself}


def holding(pick: random.Random, inner: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A function's parameters with a schema somewhere inside, and its place."""
    schema = functions(pick)
    name = pick.choice(list(schema["properties"]))
    ways = {
        "": inner,
        ".items": {"type": "array", "items": inner, "maxItems": 3},
        ".anyOf[1]": {"anyOf": [{"type": "null"}, inner]},
    }
    way = pick.choice(list(ways))
    schema["properties"][name] = ways[way]
    return schema, f"schema.properties.{name}{way}"


def extended(pick: random.Random) -> dict[str, Any]:
    return holding(pick, pick.choice(KEYWORDS))[0]


STYLES = (github, functions, kubernetes, news, events, zod, recursive, extended)


def cases(count: int, seed: int = 0) -> list[Case]:
    """As many schemas, a sixteenth of which must be refused."""
    pick = random.Random(seed)
    made = []
    for i in range(count):
        style = STYLES[i % 8]
        if i % 16 == 14:
            inner, keyword = pick.choice(REFUSED)
            schema, place = holding(pick, inner)
            made.append(Case(f"refused {i}", schema, place + keyword))
        else:
            made.append(Case(f"{style.__name__} {i}", style(pick)))
    return made


def stored(folder: Path, count: int, seed: int) -> list[Case]:
    """As many published schemas, the same number from each folder; whether they are accepted is not known."""
    pick, found = random.Random(seed), list[Case]()
    folders = sorted({path.parent for path in folder.glob("*/*.json")})
    for one in folders:
        for path in pick.sample(sorted(one.glob("*.json")), count // len(folders)):
            found.append(Case(f"{one.name}/{path.stem}", json.loads(path.read_text()), UNKNOWN))
    return found


def tools(count: int, seed: int = 1) -> list[Case]:
    pick = random.Random(seed)
    return [Case(f"tool {i}", (functions, recursive, zod, extended)[i % 4](pick)) for i in range(count)]


def judged(case: Case, rng: np.random.Generator, answers: int, tally: Counter[str]) -> list[str]:
    """What is wrong with a case: its refusal, that it was not refused, or an answer that does not validate."""
    try:
        made = compile(TOK, JSONSchema(case.schema))
    except GrammarError as error:
        tally["refused"] += 1
        named = case.place is not None and str(error).startswith((f"{case.place} ", f"{case.place}:"))
        if case.place == UNKNOWN:
            print(f"{case.name}: {str(error)[:200]}", file=sys.stderr)
        return [] if named or case.place == UNKNOWN else [f"{case.name}: {error}"]
    if case.place not in (None, UNKNOWN):
        return [f"{case.name}: accepted with {case.place}"]
    tally["checked"] += made.fault is not None
    wrong = []
    for spare in (0, 2, 10, 40, 120, 250)[:answers]:
        try:
            run = generate(made, made.shortest + spare, rng, TOK.vocab_size)
        except GaveUp:
            tally["gave_up"] += 1
            continue
        tally["answers"] += 1
        tally["again"] += run.attempts - 1
        tally["tokens"] += len(run.tokens)
        problem = fault(case.schema, TOK.decode(run.tokens))
        wrong += [] if problem is None else [f"{case.name}: {problem}"]
    return wrong


def called(offered: list[Case], rng: np.random.Generator, answers: int, tally: Counter[str]) -> list[str]:
    """What is wrong with the calls of some tools that are offered together."""
    marks = TOK.special
    listed = [{"name": f"f{i}", "parameters": case.schema} for i, case in enumerate(offered)]
    spec = ToolCalls(listed, marks.tool_call, marks.end_tool_call, at_most=2)
    made, wrong = compile(TOK, spec), []
    for _ in range(answers):
        try:
            run = generate(made, made.shortest + int(rng.integers(300)), rng, TOK.vocab_size)
        except GaveUp:
            tally["gave_up"] += 1
            continue
        pieces = [b"\0" if i == marks.tool_call else TOK.pieces[i] for i in run.tokens]
        for call in b"".join(pieces).decode().split("\0")[1:]:
            tally["calls"] += 1
            name = json.loads(call)["name"]
            # The text itself: a number that Python reads as infinite is JSON.
            problem = fault(offered[int(name[1:])].schema, call.split('"arguments":', 1)[1].strip()[:-1])
            wrong += [] if problem is None else [f"{name}: {problem}"]
    return wrong


def of_the_suite(folder: Path, tally: Counter[str]) -> list[str]:
    """What is wrong in the JSON-Schema-Test-Suite: an invalid instance that is written, a refusal that is false."""
    wrong = []
    for path in sorted(folder.glob("draft2020-12/*.json")):
        for group in json.loads(path.read_text()):
            try:
                made = compile(TOK, JSONSchema(group["schema"]))
            except GrammarError as error:
                tally["suite refused"] += 1
                false = "nothing satisfies" in str(error) and any(test["valid"] for test in group["tests"])
                wrong += [f"{path.stem}: {group['description']}: {error}"] if false else []
                continue
            for test in group["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False)
                done = made.completes(TOK.encode(text))
                tally["suite instances"] += 1
                tally["suite valid and not written"] += test["valid"] and not done
                if done and not test["valid"]:
                    wrong.append(f"{path.stem}: {group['description']}: {test['description']}: {text}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=320)
    parser.add_argument("--answers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--schemas", type=Path)
    args = parser.parse_args()
    rng, tally, wrong = np.random.default_rng(args.seed), Counter(), []
    began = time.process_time()
    schemas = stored(args.schemas, args.count, args.seed) if args.schemas else cases(args.count, args.seed)
    for case in schemas:
        try:
            wrong += judged(case, rng, args.answers, tally)
        except Unjudged as error:
            tally["unjudged"] += 1
            wrong += [] if case.place == UNKNOWN else [f"{case.name}: {error}"]
    offered = tools(34, args.seed + 1)
    for i in range(0, 34, 6):
        wrong += called(offered[i : i + 6], rng, 4 * args.answers, tally)
    of_suite = of_the_suite(args.suite, tally) if args.suite else []
    row = {"schemas": len(schemas), "tools": 34, "wrong": len(wrong), "suite_wrong": len(of_suite), **tally}
    print(json.dumps(row | {"seed": args.seed, "cpu_seconds": round(time.process_time() - began, 1)}))
    for line in (*wrong, *of_suite):
        print("WRONG", line[:300], file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
