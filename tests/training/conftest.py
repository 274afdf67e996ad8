"""Small corpora on the disk. JAX is imported inside: tests/conftest.py chooses its platform first."""

import json

import pytest


@pytest.fixture
def many(tmp_path):
    """90 documents of 1 to 90 tokens as JSONL, in the notation of `Runs`."""
    lines = [json.dumps({"text": f"{name} {name + 1}"}) for name in range(90)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines) + "\n\n")
    return str(tmp_path / "*.jsonl")


@pytest.fixture
def mixed(tmp_path):
    """Running text, conversations and problems."""
    from mercury_jax.training import data
    from tests.training.tiny_data import conversation

    (tmp_path / "a.txt").write_text("".join(chr(97 + i * i % 26) for i in range(4000)))
    (tmp_path / "b.txt").write_text("short")
    (tmp_path / "c.jsonl").write_text("\n".join(conversation(f"q{i}", "a" * i) for i in range(30)))
    text, chat = data.text(f"{tmp_path}/*.txt"), data.chat(f"{tmp_path}/c.jsonl")
    return data.mixture((text, 0.5), (chat, 0.2), (data.generated("add3"), 0.3))
