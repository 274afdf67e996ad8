"""Several rules, or several stops, as one: a number says which of them a row follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from mercury_jax.config import refuse
from mercury_jax.decode.parts import Knob, Memory, Part
from mercury_jax.decode.ranges import Between, checked


class _Step(NamedTuple):
    """A tuple of functions, so that the same choice made twice compiles once."""

    steps: tuple[Callable[..., Any], ...]

    def __call__(self, *args: Any, which: Any, **knobs: Any) -> tuple[Any, Memory]:
        *seen, memory = args

        def branch(i: int) -> Callable[[Memory], tuple[Any, Memory]]:
            def run(memory: Memory) -> tuple[Any, Memory]:
                out, mine = self.steps[i](*seen, memory[i], **knobs[str(i)])
                return out, (*memory[:i], mine, *memory[i + 1 :])

            return run

        return jax.lax.switch(which, [branch(i) for i in range(len(self.steps))], memory)


class _Init(NamedTuple):
    inits: tuple[Callable[..., Memory], ...]

    def __call__(self, canvas: jax.Array, vocab: int) -> Memory:
        return tuple(init(canvas, vocab) for init in self.inits)


def one_of(parts: Sequence[Part], which: Knob = 0) -> Part:
    """The part number `which` of several rules, or of several stops; like every knob it may differ by row.

    Under `vmap` all of them run and one is taken, so this is for parts that are cheap beside a forward.
    Rules that insert or delete cannot be mixed with others. ValueError for none, for such a mix, and for a number
    that names none of them.
    """
    if isinstance(parts, Part) or not parts:
        raise refuse("one_of parts", parts, "a list of at least one rule, or stop")
    for i, part in enumerate(parts):
        if not isinstance(part, Part) or part.kind not in ("rule", "stop") or part.kind != parts[0].kind:
            raise refuse(f"one_of parts[{i}]", getattr(part, "name", part), "rules alone, or stops alone")
    which = checked("one_of(which=)", which, Between(0, len(parts) - 1, whole=True))
    if len(parts) > 1 and any(p.grows for p in parts):
        grows = [p.name for p in parts if p.grows]
        raise refuse("one_of parts", grows, "rules that keep the number of tokens")
    fits = tuple(kind for kind in parts[0].fits if all(kind in p.fits for p in parts))
    if not fits:
        raise refuse("one_of parts", [p.name for p in parts], "rules for the same kind of noise")
    return Part(
        step=_Step(tuple(p.step for p in parts)),
        init=_Init(tuple(p.init for p in parts)),
        knobs={"which": which} | {str(i): p.knobs for i, p in enumerate(parts)},
        name="one_of",
        temperature=parts[0].temperature,
        stop=parts[0].stop,
        fits=fits,
        blind=any(p.blind for p in parts),
        grows=any(p.grows for p in parts),
        whole=any(p.whole for p in parts),
        kind=parts[0].kind,
    )
