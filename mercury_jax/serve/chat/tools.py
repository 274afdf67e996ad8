"""The tools that a request offers, checked."""

from __future__ import annotations

from typing import Any

from mercury_jax.serve.chat import data

MOST_TOOLS = 256
MOST_DESCRIPTION = 65_536  # characters


def checked_tools(tools: Any) -> list[dict[str, Any]]:
    """`[{"type": "function", "function": {"name", "description", "parameters"}}]`; [] for null.

    What was not given is left out, and so is `strict`, which is no business of the model's. Refused naming the
    field that does not fit.
    """
    found = [] if tools is None else data.listed(tools, "tools", 0, MOST_TOOLS)
    made = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(found)]
    names: set[str] = set()
    for i, tool in enumerate(made):
        name = tool["function"]["name"]
        if name in names:
            raise data.refuse(f"tools[{i}].function.name", name, "a name that no other tool has")
        names.add(name)
    return made


def _tool(tool: Any, name: str) -> dict[str, Any]:
    tool = data.mapping(tool, name)
    if tool.get("type") not in (None, "function"):
        raise data.refuse(f"{name}.type", tool["type"], "function")
    function = data.mapping(tool.get("function"), f"{name}.function")
    made: dict[str, Any] = {"name": data.function_name(function.get("name"), f"{name}.function.name")}
    if function.get("description") is not None:
        told = f"{name}.function.description"
        made["description"] = data.text(function["description"], told, most=MOST_DESCRIPTION)
    if function.get("parameters") is not None:
        made["parameters"] = _parameters(function["parameters"], f"{name}.function.parameters")
    return {"type": "function", "function": made}


def _parameters(parameters: Any, name: str) -> dict[str, Any]:
    """A schema of objects: `type` is "object", or is not given."""
    data.mapping(parameters, name)
    if parameters.get("type", "object") != "object":
        raise data.refuse(f"{name}.type", parameters["type"], "object")
    return data.plain(dict(parameters), name)
