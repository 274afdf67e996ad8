"""The memory of an engine is known before it compiles: it fits the device, or is refused with the sizes."""

import dataclasses
import re

import jax
import pytest

from mercury_jax.cli import main, serve
from mercury_jax.serve.engine import memory
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import EngineConfig
from tests.tiny import tiny

LONG = 1 << 18


def long():
    """A model with the context of DiffusionGemma, 262,144 tokens."""
    lm = tiny()
    config = dataclasses.replace(lm.model.config, context=LONG)
    return dataclasses.replace(lm, model=lm.model._replace(config=config))


def config(gib, **more):
    return EngineConfig(memory=int(gib * 2**30), **more)


@pytest.mark.long
def test_the_predicted_memory_is_what_the_slots_take():
    """With a single bucket, so that no second state is counted."""
    engine = Engine(tiny(), EngineConfig(slots=3, context=128, programs="one", rules=("confidence",)))
    engine.start()
    slots = engine._slots
    assert slots is not None
    held = [leaf for name, leaf in slots.state._asdict().items() if name != "cache"]
    bytes_of = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    needed = memory.engine_memory(engine.lm, engine.config)
    assert needed.cache == bytes_of(slots.state.cache)
    assert needed.other == pytest.approx(bytes_of(held) + engine.config.prefix_bytes, rel=0.01)
    assert needed.weights == bytes_of(engine.lm.params)
    engine.stop()


def test_the_fitted_config_is_the_largest_that_fits():
    lm, asked = long(), EngineConfig(prefix_bytes=0)
    whole = memory.engine_memory(lm, asked).total
    assert (
        memory.fit_config(lm, dataclasses.replace(asked, memory=whole), slots=True, context=True).context
        == LONG
    )
    for share, slots, context in (
        (0.6, 8, LONG // 2),
        (0.16, 8, LONG // 8),
        (0.09, 4, LONG // 8),
        (0.04, 2, LONG // 8),
    ):
        limit = int(share * whole)
        held = dataclasses.replace(asked, memory=limit)
        chosen = memory.fit_config(lm, held, slots=True, context=True)
        assert (chosen.slots, chosen.context) == (slots, context), share
        assert memory.engine_memory(lm, chosen).total <= limit
        longer = dataclasses.replace(chosen, context=2 * context)
        assert memory.engine_memory(lm, longer).total > limit


@pytest.mark.long
def test_slots_or_context_given_by_the_user_are_kept_or_refused():
    lm = long()
    assert memory.fit_config(lm, config(0.5, slots=2), slots=False, context=True).slots == 2
    assert memory.fit_config(lm, config(1, context=LONG // 4), slots=True, context=False).context == LONG // 4
    numbers = r"'[0-9.]+ GiB \(keys and values [0-9.]+ GiB, .*allowed: up to 1.00 GiB"
    words = f"memory for 8 slots of 262144 tokens is {numbers}"
    with pytest.raises(ValueError, match=words):
        memory.fit_config(lm, config(1), slots=False, context=False)
    with pytest.raises(ValueError, match=words):
        Engine(lm, config(1))
    with pytest.raises(ValueError, match="memory for 8 slots"):
        memory.fit_config(lm, EngineConfig(memory=1000), slots=True, context=True)


def test_the_default_limit_is_the_free_memory_of_the_device(monkeypatch):
    monkeypatch.setattr(memory.params, "free_memory", lambda devices: 2**30)
    assert memory.free_memory(tiny(), EngineConfig()) == int(2**30 * memory.SHARE)
    with pytest.raises(ValueError, match="memory for 8 slots of 262144 tokens"):
        Engine(long(), EngineConfig())
    monkeypatch.setattr(
        memory.params, "free_memory", lambda devices: None
    )  # a backend that does not report its memory
    memory.check_memory(long(), EngineConfig())


def test_mercury_serve_fits_the_device_or_refuses_with_the_sizes(monkeypatch, capsys):
    """On a device of one GiB, where 8 slots of the whole context take 1.37."""
    monkeypatch.setattr("mercury_jax.hub.params._host_memory", lambda: 2**30)
    monkeypatch.setattr(serve.show, "load", lambda *args, **more: long())
    engines = []
    monkeypatch.setattr(
        "mercury_jax.serve.server.Server.run", lambda self, sockets: engines.extend(self.engines)
    )
    assert main(["serve", "--port", "0"]) == 0
    [engine] = engines
    assert engine.config.slots == 8 and 0 < engine.context < LONG
    assert f"8 slots of {engine.context} tokens: " in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--slots", "8", "--context", str(LONG)]) == 2
    error = capsys.readouterr().err
    assert re.search(r"memory for 8 slots of 262144 tokens is '[0-9.]+ GiB .*allowed: up to 0.90 GiB", error)


def test_the_command_line_refuses_an_engine_that_does_not_fit(monkeypatch, capsys):
    monkeypatch.setattr(serve.show, "load", lambda *a, **k: long())
    words = ["--port", "0", "--memory", "0.5", "--slots", "8", "--context", str(LONG)]
    with pytest.raises(ValueError, match=re.escape("memory for 8 slots of 262144 tokens")):
        serve.run(words)
    for bad in (["--memory", "0"], ["--context", "0"], ["--block", "0"]):
        with pytest.raises(ValueError, match="allowed"):
            serve.run(["--port", "0", *bad])
