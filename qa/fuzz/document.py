"""Our document as schemathesis is given it: it says in schemas what ours says in words, and forbids nothing more."""

import copy

# An edit and an apply mark parts of a text: no text that chance makes would do so, or reach a model.
MARKED = {
    "EditCompletionsRequest": r"<\|current_file_content\|>[\s\S]{2,60}<\|code_to_edit\|>[\s\S]{0,20}<\|/code_to_edit\|>"
    r"[\s\S]{0,9}<\|/current_file_content\|>",
    "ApplyCompletionsRequest": r"<\|original_code\|>[\s\S]{1,90}<\|/original_code\|>\s{0,2}"
    r"<\|update_snippet\|>[\s\S]{1,90}<\|/update_snippet\|>",
}


def steered(document):
    for item in document["paths"].values():
        content = item.get("post", {"responses": {"200": {}}})["responses"]["200"].get("content", {})
        if "text/event-stream" in content:
            content["text/event-stream"]["schema"] = event(content["text/event-stream"]["schema"])
    schemas = document["components"]["schemas"]
    for name, pattern in MARKED.items():
        # Both requests refer to the same schema of a message; each gets its own, since the patterns differ.
        messages = schemas[name]["properties"]["messages"]
        message = messages["items"] = copy.deepcopy(schemas[messages["items"]["$ref"].rpartition("/")[2]])
        text = next(kind for kind in message["properties"]["content"]["anyOf"] if kind["type"] == "string")
        text["pattern"] = f"^{pattern}$"
    return document


def event(chunk):
    """An event apart from its data, as schemathesis reads them: the data is a chunk, an error, or the end."""
    data = {"anyOf": [chunk, {"$ref": "#/components/schemas/Error"}]}
    told = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    last = {"properties": {"data": {"const": "[DONE]"}}}
    return {"type": "object", "required": ["data"], "if": last, "else": {"properties": {"data": told}}}
