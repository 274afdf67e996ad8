"""How editors read a reply, reimplemented from their known behaviour."""


def zed(reply: str) -> str | None:
    """Zed strips exactly these two edges, and takes a lone None for no prediction."""
    reply = reply.removeprefix("```\n").removesuffix("\n```")
    return None if reply == "None" else reply


def kilo(reply: str) -> str | None:
    """Kilo takes what stands between the first and the last fence, without repeated tags."""
    first = reply.find("```")
    begin = reply.find("\n", first + 3)
    end = reply.rfind("```")
    if first < 0 or begin < 0 or end <= begin:
        return None
    body = reply[begin + 1 : end].removesuffix("\n")
    return body.removeprefix("<|code_to_edit|>").removesuffix("<|/code_to_edit|>")


def kilo_text(choice: dict) -> str:
    """Kilo reads the text of a chunk, or the content of its delta."""
    return choice.get("text") or choice.get("delta", {}).get("content") or ""
