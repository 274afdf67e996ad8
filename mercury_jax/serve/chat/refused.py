"""What the chat layer says to a request that it cannot take."""

from __future__ import annotations


class Refused(Exception):
    """A request's fault. param: the field, as in `messages[2].content`; message: what it is, and what is allowed."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param, self.message = param, message
