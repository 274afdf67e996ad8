"""What an engine takes is known before it is compiled: it fits the device, or is refused with the numbers."""

import dataclasses
import re

import jax
import pytest

from mercury_jax.cli import main, serve
from mercury_jax.serve.engine import memory
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.types import Settings
from tests.tiny import tiny

LONG = 1 << 18


def long():
    """A model whose context is 262,144 tokens, as DiffusionGemma's is."""
    lm = tiny()
    config = dataclasses.replace(lm.model.config, context=LONG)
    return dataclasses.replace(lm, model=lm.model._replace(config=config))


def settings(gib, **more):
    return Settings(memory=int(gib * 2**30), **more)


def test_what_is_told_is_what_the_slots_take():
    """Of the largest shape and, beside it, of the one before a move."""
    engine = Engine(tiny(), Settings(slots=3, context=128, programs="one", rules=("confidence",)))
    engine.start()
    slots = engine._slots
    assert slots is not None
    held = [leaf for name, leaf in slots.state._asdict().items() if name != "cache"]
    bytes_of = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    told = memory.need(engine.lm, engine.settings)
    assert told.cache == bytes_of(slots.state.cache)
    assert told.rest == pytest.approx(bytes_of(held) + engine.settings.prefix_bytes, rel=0.01)
    assert told.weights == bytes_of(engine.lm.params)
    engine.stop()


def test_what_is_chosen_fits_and_nothing_larger_would():
    lm, asked = long(), Settings(prefix_bytes=0)
    whole = memory.need(lm, asked).total
    assert memory.fitted(lm, dataclasses.replace(asked, memory=whole), True, True).context == LONG
    for share, slots, context in (
        (0.6, 8, LONG // 2),
        (0.16, 8, LONG // 8),
        (0.09, 4, LONG // 8),
        (0.04, 2, LONG // 8),
    ):
        limit = int(share * whole)
        held = dataclasses.replace(asked, memory=limit)
        chosen = memory.fitted(lm, held, True, True)
        assert (chosen.slots, chosen.context) == (slots, context), share
        assert memory.need(lm, chosen).total <= limit
        longer = dataclasses.replace(chosen, context=2 * context)
        assert memory.need(lm, longer).total > limit


def test_what_the_user_named_is_kept_or_refused_with_the_numbers():
    lm = long()
    assert memory.fitted(lm, settings(0.5, slots=2), slots=False, context=True).slots == 2
    assert memory.fitted(lm, settings(1, context=LONG // 4), slots=True, context=False).context == LONG // 4
    numbers = r"'[0-9.]+ GiB \(keys and values [0-9.]+ GiB, .*allowed: up to 1.00 GiB"
    words = f"memory for 8 slots of 262144 tokens is {numbers}"
    with pytest.raises(ValueError, match=words):
        memory.fitted(lm, settings(1), slots=False, context=False)
    with pytest.raises(ValueError, match=words):
        Engine(lm, settings(1))
    with pytest.raises(ValueError, match="memory for 8 slots"):
        memory.fitted(lm, Settings(memory=1000), slots=True, context=True)


def test_what_is_free_on_the_device_counts_where_no_memory_is_named(monkeypatch):
    monkeypatch.setattr(memory, "room", lambda devices: 2**30)
    assert memory.free(tiny(), Settings()) == int(2**30 * memory.SHARE)
    with pytest.raises(ValueError, match="memory for 8 slots of 262144 tokens"):
        Engine(long(), Settings())
    monkeypatch.setattr(memory, "room", lambda devices: None)  # a backend that does not tell
    memory.check(long(), Settings())


def test_mercury_serve_fits_the_device_or_refuses_with_the_numbers(monkeypatch, capsys):
    """On a device of one GiB, where 8 slots of the whole context take 1.37."""
    monkeypatch.setattr("mercury_jax.hub.memory._host", lambda: 2**30)
    monkeypatch.setattr(serve.show, "load", lambda *args, **more: long())
    engines = []
    monkeypatch.setattr(
        "mercury_jax.serve.api.server.Server.run", lambda self, sockets: engines.append(self.engine)
    )
    assert main(["serve", "--port", "0"]) == 0
    [engine] = engines
    assert engine.settings.slots == 8 and 0 < engine.context < LONG
    assert f"8 slots of {engine.context} tokens: " in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--slots", "8", "--context", str(LONG)]) == 2
    told = capsys.readouterr().err
    assert re.search(r"memory for 8 slots of 262144 tokens is '[0-9.]+ GiB .*allowed: up to 0.90 GiB", told)


def test_the_command_line_refuses_what_it_cannot_hold(monkeypatch, capsys):
    monkeypatch.setattr(serve.show, "load", lambda *a, **k: long())
    words = ["--port", "0", "--memory", "0.5", "--slots", "8", "--context", str(LONG)]
    with pytest.raises(ValueError, match=re.escape("memory for 8 slots of 262144 tokens")):
        serve.run(words)
    for bad in (["--memory", "0"], ["--context", "0"], ["--block", "0"]):
        with pytest.raises(ValueError, match="allowed"):
            serve.run(["--port", "0", *bad])
