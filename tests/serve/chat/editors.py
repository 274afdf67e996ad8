"""What editors make of a reply: their rules, written anew from what they are known to do."""


def zed(reply: str) -> str | None:
    """Zed's rule: exactly these two are stripped, and a lone None is no prediction."""
    reply = reply.removeprefix("```\n").removesuffix("\n```")
    return None if reply == "None" else reply


def kilo(reply: str) -> str | None:
    """Kilo's rule: from the line behind the first fence to the last fence, without echoed tags."""
    first = reply.find("```")
    begin = reply.find("\n", first + 3)
    end = reply.rfind("```")
    if first < 0 or begin < 0 or end <= begin:
        return None
    body = reply[begin + 1 : end].removesuffix("\n")
    return body.removeprefix("<|code_to_edit|>").removesuffix("<|/code_to_edit|>")


def kilo_text(choice: dict) -> str:
    """Kilo's rule for what a chunk of a completion adds: a text, or a delta's content."""
    return choice.get("text") or choice.get("delta", {}).get("content") or ""
