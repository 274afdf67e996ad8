"""argparse that speaks as the library does: the field, the value, what is allowed, the nearest name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from mercury_jax.config import nearest, refuse

Late = Callable[["Parser"], None]


class Parser(argparse.ArgumentParser):
    """A command's options. Bad ones raise ValueError; `app.main` prints it and exits with 2."""

    def __init__(self, command: str, about: str, more: str = "") -> None:
        super().__init__(
            prog=f"mercury {command}",
            description=about,
            epilog=more,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): (is .*; allowed)", r"\1 \2", message)
        raise ValueError(f"{message.removeprefix('argument ')}\n`{self.prog} --help` explains")

    def read(self, argv: Sequence[str], late: Late | None = None) -> argparse.Namespace:
        """Parse; an unknown option is refused with the nearest one.

        late: adds options that need JAX to be known; left out where only help is wanted.
        """
        if late is not None and not {"-h", "--help"} & set(argv):
            late(self)
        args, rest = self.parse_known_args(list(argv))
        options = [o for a in self._actions for o in a.option_strings if o.startswith("--")]
        for word in rest:
            if word.startswith("-") and word != "--":
                allowed = nearest(word.split("=")[0], options)
                allowed = allowed if len(allowed) < 200 else f"those that `{self.prog} --help` lists"
                raise refuse("option", word.split("=")[0], allowed)
        if rest:
            raise refuse("argument", rest[0], f"no more words; `{self.prog} --help` shows the order")
        return args


def whole(text: str) -> int:
    """An option's value as an int; its range is for the library to check."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; allowed: a whole number") from None


def number(text: str) -> float:
    """An option's value as a float."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; allowed: a number") from None
