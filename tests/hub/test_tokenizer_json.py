"""Our own tokenizer, written for other libraries: the same ids for every text and conversation."""

import random

import pytest
from tokenizers import Tokenizer as Library

from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.hub.tokenizer_files import own_files
from mercury_jax.tokenizer import SPECIAL, Tokenizer
from tests.test_tokenizer import NASTY, TEXTS, _random_text


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return Tokenizer.train(TEXTS, 370)


def test_every_text_has_the_same_ids_there(tok: Tokenizer):
    files = own_files(tok)
    theirs, rng = HFTokenizer.of(files), random.Random(0)
    plain = Library.from_str(files["tokenizer.json"].decode())
    for text in [*NASTY, *TEXTS[:5], *(_random_text(rng) for _ in range(300))]:
        ids = tok.encode(text)
        assert theirs.encode(text) == ids and theirs.decode(ids) == text
        if "<|" not in text:  # others take a special token from anyone
            assert plain.encode(text).ids == ids
    assert theirs.pieces == tok.pieces
    assert plain.token_to_id("<|think|>") == SPECIAL.think


def test_conversations_are_written_alike(tok: Tokenizer):
    theirs = HFTokenizer.of(own_files(tok))
    chat = [
        {"role": role, "content": f"def {role} <|eos|>"} for role in ("system", "user", "assistant", "tool")
    ]
    for thinking in (False, True):
        assert theirs.render(chat, thinking=thinking) == tok.render(chat, thinking=thinking)
        assert theirs.follow(chat, thinking=thinking) == tok.follow(chat, thinking=thinking)
    assert theirs.example("a", "b", "c") == tok.example("a", "b", "c")
    names = ("mask", "pad", "eos", "ends", "end_turn", "thinking", "fim", "begin", "vocab_size")
    assert [getattr(theirs, n) for n in names] == [getattr(tok, n) for n in names]
