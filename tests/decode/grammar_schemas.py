"""Schemas as applications send them, by name; every one of them can be generated."""

from typing import Any

TEXT, WHOLE, NUMBER, FLAG = ({"type": t} for t in ("string", "integer", "number", "boolean"))


def record(required: Any = None, **properties: Any) -> dict[str, Any]:
    """A closed object; all properties are required unless some are named."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def many(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


ADDRESS = record(street=TEXT, city=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"})
NODE = record(["value"], value=WHOLE, left={"$ref": "#/$defs/node"}, right={"$ref": "#/$defs/node"})

SCHEMAS: dict[str, Any] = {
    "person": record(
        name=TEXT,
        age={"type": "integer", "minimum": 0, "maximum": 150},
        email={"type": "string", "format": "email"},
    ),
    "address inside": record(name=TEXT, address=ADDRESS),
    "optional fields": record(["id"], id=WHOLE, nick=TEXT, tags=many(TEXT), score=NUMBER),
    "sentiment": record(
        label={"enum": ["positive", "negative", "neutral"]},
        confidence={"type": "number", "minimum": 0, "maximum": 1},
    ),
    "classification": {"enum": ["spam", "ham", "unsure"]},
    "mixed enum": {"enum": [1, "one", None, 1.5, {"a": [1]}, ["x"]]},
    "constant": {"const": {"version": 2, "kind": "ping"}},
    "math steps": record(steps=many(record(explanation=TEXT, output=TEXT), minItems=1), final_answer=TEXT),
    "calendar event": record(name=TEXT, date={"type": "string", "format": "date"}, participants=many(TEXT)),
    "timestamped": record(at={"type": "string", "format": "date-time"}, ok=FLAG),
    "uuid and address": record(
        id={"type": "string", "format": "uuid"}, ip={"type": "string", "format": "ipv4"}
    ),
    "link": record(url={"type": "string", "format": "uri"}, title={"type": "string", "maxLength": 40}),
    "invoice": record(
        number={"type": "string", "pattern": "^INV-[0-9]{4,8}$"},
        lines=many(
            record(
                item=TEXT,
                count={"type": "integer", "minimum": 1},
                price={"type": "number", "exclusiveMinimum": 0},
            ),
            minItems=1,
            maxItems=5,
        ),
        paid=FLAG,
    ),
    "binary tree": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "linked list": {
        "$defs": {"cell": record(head=WHOLE, tail={"anyOf": [{"$ref": "#/$defs/cell"}, {"type": "null"}]})},
        "$ref": "#/$defs/cell",
    },
    "user interface": {
        "$defs": {
            "view": record(
                type={"enum": ["div", "button", "field"]},
                label=TEXT,
                children=many({"$ref": "#/$defs/view"}),
                attributes=many(record(name=TEXT, value=TEXT)),
            )
        },
        "$ref": "#/$defs/view",
    },
    "any of types": record(value={"anyOf": [TEXT, NUMBER, {"type": "null"}]}),
    "nullable by list": record(note={"type": ["string", "null"]}, size={"type": ["integer", "null"]}),
    "tagged union": {
        "anyOf": [
            record(kind={"const": "circle"}, radius={"type": "number", "minimum": 0}),
            record(kind={"const": "box"}, width=NUMBER, height=NUMBER),
        ]
    },
    "one of by constant": {
        "oneOf": [record(op={"const": "add"}, by=WHOLE), record(op={"const": "name"}, to=TEXT)]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
            {"type": "object", "properties": {"b": WHOLE}, "required": ["b"]},
        ]
    },
    "map of numbers": {"type": "object", "additionalProperties": NUMBER},
    "map with a key": {"type": "object", "additionalProperties": WHOLE, "minProperties": 1},
    "open object": {"type": "object", "properties": {"id": WHOLE, "a\nb": WHOLE}, "required": ["id"]},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x-[a-z]+$": TEXT, "^n[0-9]$": WHOLE},
        "additionalProperties": False,
    },
    "pair": {"type": "array", "prefixItems": [TEXT, NUMBER], "items": False, "minItems": 2},
    "pair of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [TEXT, WHOLE],
        "additionalItems": False,
        "minItems": 2,
    },
    "matrix": many(many(NUMBER, minItems=2, maxItems=2), minItems=2, maxItems=2),
    "bounded list": many({"type": "integer", "minimum": -5, "maximum": 5}, minItems=3, maxItems=6),
    "contains a word": {"type": "string", "pattern": "error"},
    "file name": record(path={"type": "string", "pattern": "^[a-z_/]+\\.(py|json|md)$"}),
    "short text": {"type": "string", "minLength": 3, "maxLength": 8},
    "long text": record(essay={"type": "string", "minLength": 60}),
    "telephone": record(phone={"type": "string", "pattern": "^\\+?[0-9]{1,3}( [0-9]{2,4}){2,3}$"}),
    "multiples": record(
        even={"type": "integer", "multipleOf": 2}, half={"type": "number", "multipleOf": 0.5}
    ),
    "open bounds": record(
        p={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        n={"type": "integer", "exclusiveMinimum": 3},
    ),
    "any value": True,
    "any object": {"type": "object"},
    "names outside ASCII": record(größe=NUMBER, 名前={"enum": ["élan", "naïve", "日本"]}),
    "escapes": record(**{'say "hi"': {"const": 'a\\b"c\n'}, "tab\there": FLAG}),
    "flight search": record(
        ["from", "to", "date"],
        **{
            "from": {"type": "string", "pattern": "^[A-Z]{3}$"},
            "to": {"type": "string", "pattern": "^[A-Z]{3}$"},
        },
        date={"type": "string", "format": "date"},
        cabin={"enum": ["economy", "business"]},
        adults={"type": "integer", "minimum": 1, "maximum": 9},
    ),
    "settings": record(
        ["mode"],
        mode={"enum": ["fast", "safe"]},
        limits=record(["cpu"], cpu={"type": "number", "minimum": 0.5}, memory=WHOLE),
        hooks=many({"anyOf": [TEXT, record(run=TEXT, when={"enum": ["before", "after"]})]}, maxItems=4),
    ),
}
