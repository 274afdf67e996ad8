"""A checkpoint's tokenizer: its own ids for ordinary text, and no control token from user text."""

import dataclasses
import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer

import mercury_jax as mj
from mercury_jax.decode.answer_text import decode_answer
from mercury_jax.decode.inputs import Prompt, encode_prompts
from mercury_jax.hub.tokenizer import HFTokenizer
from tests.hub.tiny_tokenizers import (
    BYTE_LEVEL,
    CONTROL,
    GEMMA,
    SPECIAL,
    TEMPLATES,
    byte_level,
    reference,
    sentencepiece,
)
from tests.tiny import tiny

CHATS = [
    [{"role": "user", "content": "  def value "}],
    [{"role": "system", "content": "Be the fox.\n"},
     {"role": "user", "content": "print 12 é🙂\n\n    <table> x"},
     {"role": "assistant", "content": " return\n"}, {"role": "user", "content": "fox e\u0301 <b>"}],
]  # fmt: skip
NASTY = [
    "", " ", "\n\n\n", "\u2581", "\0a\0", "\r\n", "👩‍👩‍👧", "1234567890", "<0x41>", "\ufdd0",
    "\ufdd0<|im_end|>", " " * 37,
]  # fmt: skip
FILES = {name: byte_level(name) for name in BYTE_LEVEL} | {
    f"turns, {form}": sentencepiece(form=form) for form in ("gemma", "llama", "metaspace")
}


@pytest.fixture(scope="module", params=FILES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tok(name: str) -> HFTokenizer:
    return HFTokenizer.of(FILES[name])


def theirs(files) -> Tokenizer:
    """The library's own tokenizer, which takes special tokens from anyone."""
    return Tokenizer.from_str(files["tokenizer.json"].decode())


def names_of(files) -> dict[str, str]:
    return json.loads(files["tokenizer_config.json"])


def random_text(rng: random.Random, pool: list[str]) -> str:
    wild = (chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(9))
    return "".join(rng.choice([*pool, *wild]) for _ in range(rng.randrange(40)))


def test_an_ordinary_conversation_has_the_ids_of_the_tokenizers_library(name: str, tok: HFTokenizer):
    for messages in CHATS:
        for prompt in (False, True):
            text = reference(
                TEMPLATES[name.partition(",")[0]],
                messages,
                add_generation_prompt=prompt,
                **names_of(FILES[name]),
            )
            ids = theirs(FILES[name]).encode(text, add_special_tokens=False).ids
            assert tok.render(messages, add_generation_prompt=prompt) == ids
            assert tok.decode(ids, skip_special=False) == theirs(FILES[name]).decode(
                ids, skip_special_tokens=False
            )


@pytest.mark.long
def test_no_message_content_is_encoded_as_a_control_token(name: str, tok: HFTokenizer):
    rng = random.Random(1)
    control = set(tok.tokens.control.values())
    words = [*SPECIAL, *CONTROL, *GEMMA]
    pool = [
        *words, *(w[: len(w) // 2] for w in words), *(w[len(w) // 2 :] for w in words), tok.tokens.mark, " ",
        "\n", "a",
    ]  # fmt: skip
    kept = lambda ids: [i for i in ids if i in control]
    for _ in range(60):
        chat = [dict(m, content=m["content"][:2] + random_text(rng, pool) + "z") for m in CHATS[1]]
        if name == "thinking":  # what it does with </think> changes its own tokens, as in the reference
            chat = [dict(m, content=m["content"].replace("</think>", "")) for m in chat]
        ids = tok.render(chat)
        assert kept(ids) == kept(tok.render(CHATS[1]))
        if name == "turns, gemma":  # nothing composes its text, so all of it comes back
            assert tok.decode(ids, False) == reference(
                TEMPLATES[name.partition(",")[0]], chat, add_generation_prompt=True, **names_of(FILES[name])
            )


def changed(files, change):
    data = json.loads(files["tokenizer.json"])
    change(data)
    return {**files, "tokenizer.json": json.dumps(data).encode()}


def bytes_added(special):
    """Every byte token as an added token, as some converters write them."""

    def change(data):
        vocab = data["model"]["vocab"]
        flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=special)
        data["added_tokens"] += [
            {"id": vocab[f"<0x{b:02X}>"], "content": f"<0x{b:02X}>", **flags} for b in range(256)
        ]

    return change


def stripped(data):
    """A normaliser that strips, and special tokens that are matched after it."""
    data["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "NFC"}],
    }
    for token in data["added_tokens"]:  # the library fails on a run of spaces of which nothing remains
        token["normalized"] = bool(token["content"].strip())


ODD = {
    "special byte tokens": (changed(sentencepiece(), bytes_added(True)), "turns"),
    "ordinary byte tokens": (changed(sentencepiece(), bytes_added(False)), "turns"),
    "byte tokens, llama": (changed(sentencepiece(form="llama"), bytes_added(True)), "turns"),
    "strip": (changed(byte_level(), stripped), "chatml"),
}


@pytest.mark.parametrize("name", [*ODD, *FILES])
def test_many_texts_have_the_ids_and_the_text_of_the_tokenizers_library(name: str):
    files = ODD[name][0] if name in ODD else FILES[name]
    tok, core, rng = HFTokenizer.of(files), theirs(files), random.Random(7)
    pool = [
        "\ufdd0", "\ufdd1", "a", " ", "  ", "\n", "é", "🙂", "user", "the quick", "\ufdd0 ", "\t", "<", "|>",
    ]  # fmt: skip
    for _ in range(300):
        text = random_text(rng, pool)
        want = core.encode(text, add_special_tokens=False).ids
        assert tok.encode(text) == want, repr(text)
        assert tok.decode(want, skip_special=False) == core.decode(want, skip_special_tokens=False)
        if "llama" not in name and "metaspace" not in name and name != "strip" and "NFC" not in text:
            hidden = {i for i in want if core.id_to_token(i) in GEMMA}
            assert hidden or b"".join(tok.pieces[i] for i in want).decode("utf-8", "replace") == core.decode(
                want, skip_special_tokens=False
            )


def test_a_token_of_which_the_normaliser_leaves_nothing_does_not_break_the_tokenizer():
    def all_late(data):
        stripped(data)
        for token in data["added_tokens"]:
            token["normalized"] = True

    tok = HFTokenizer.of(changed(byte_level(), all_late))
    assert tok.decode(tok.encode(" the é    quick\n\n🙂 ")).split() == ["the", "é", "quick", "🙂"]


@pytest.mark.parametrize("name", ODD)
def test_odd_tokenizers_render_as_the_library_and_let_no_text_forge_a_control_token(name: str):
    files, template = ODD[name]
    tok, core = HFTokenizer.of(files), theirs(files)
    for messages in CHATS:
        text = reference(TEMPLATES[template], messages, add_generation_prompt=True, **names_of(files))
        assert tok.render(messages) == core.encode(text, add_special_tokens=False).ids
    control, mark = set(tok.tokens.control.values()), tok.tokens.mark
    assert not any((core.id_to_token(i) or "").startswith("<0x") for i in control)
    kept = lambda ids: [i for i in ids if i in control]
    for token in tok.tokens.control:
        for forged in (
            token,
            mark + token,
            mark + mark + token,
            f"{mark} {token}",
            f"a{mark}\n{token}{mark}",
        ):
            assert not kept(tok.encode(forged)), repr(forged)
            chat = [dict(CHATS[0][0], content=forged)]
            assert kept(tok.render(chat)) == kept(tok.render([dict(CHATS[0][0], content="x")]))


def test_a_template_may_split_an_answer_at_a_control_token():
    tok = HFTokenizer.of(byte_level("thinking"))
    ids = tok.tokens.control
    chat = [*CHATS[0], {"role": "assistant", "content": "<think>\nfox <think>\n</think>\n\nthe </think>"}]
    text = tok.decode(tok.render(chat, add_generation_prompt=False), skip_special=False)
    assert text == reference(TEMPLATES["thinking"], chat)
    assert text.count("<think>") == tok.render(chat).count(ids["<think>"]) == 1
    chat[0]["content"] = "</think>"
    assert tok.render(chat).count(ids["</think>"]) == 1


def test_a_control_token_that_a_template_assembles_from_parts_is_refused():
    template = (
        b"{% for m in messages %}{{ ['<|im_', 'start|>'] | string | replace(\"', '\", '') }}{% endfor %}"
    )
    tok = HFTokenizer.of({**byte_level(), "chat_template.jinja": template})
    with pytest.raises(ValueError, match=r"puts '<\|im_start\|>' together"):
        tok.render(CHATS[0])


@pytest.mark.parametrize(
    "files", [byte_level(normal=False), sentencepiece()], ids=["byte_level", "sentencepiece"]
)
def test_every_text_round_trips_without_control_tokens(files):
    tok, library, rng = HFTokenizer.of(files), theirs(files), random.Random(0)
    control = set(tok.tokens.control.values())
    pool = [*" \n\t\u2581\0aé<|>", "return", "\n\n", "    ", "<table>", "日本", *SPECIAL, *GEMMA, *CONTROL]
    for text in [*NASTY, *(random_text(rng, pool) for _ in range(300))]:
        ids = tok.encode(text)
        assert control.isdisjoint(ids)
        shown = text if tok.decode(tok.encode("\u2581")) == "\u2581" else text.replace("\u2581", " ")
        assert tok.decode(ids) == tok.decode(ids, skip_special=False) == shown
        assert b"".join(tok.pieces[i] for i in ids).decode() == tok.decode(ids)
        if not any(word in text for word in tok.tokens.control):
            assert ids == library.encode(text, add_special_tokens=False).ids
    for word in ("\n\n", "<table>"):  # long, but ordinary
        assert tok.encode(word) == [library.token_to_id(word)]


def test_half_a_character_is_replaced_and_bad_input_is_refused():
    for files in (byte_level(), sentencepiece()):
        tok = HFTokenizer.of(files, vocab=500)
        assert tok.decode(tok.encode("a🙂")[:-1]).startswith("a\ufffd")
        assert tok.decode([499]) == ""  # the model's, and beyond the tokenizer's
        for bad in (-1, 500):
            with pytest.raises(ValueError, match=f"ids: {bad}; must be in 0..499"):
                tok.decode([bad])
        with pytest.raises(ValueError, match="lone surrogate"):
            tok.encode("a\ud800")
        with pytest.raises(ValueError, match="text: int"):
            tok.encode(3)


def test_an_example_splits_into_thinking_and_answer(tok: HFTokenizer):
    assert tok.thinking is not None
    for thinking in (None, "the fox"):
        prompt, response = tok.example("2+2?", "4 <|im_end|>", thinking)
        assert prompt == tok.render([{"role": "user", "content": "2+2?"}])
        assert response[-1] in (tok.eos, tok.end_turn)
        assert tok.split_answer([*response, *tok.encode("rest")]) == (thinking, "4 <|im_end|>")
        if thinking is not None:  # the prompt may have opened the thinking, and a sample may never close it
            opened = tok.render([{"role": "user", "content": "2+2?"}], thinking=True)
            assert tuple(opened[-len(tok.thinking.opening) :]) == tok.thinking.opening
            assert tok.split_answer(response[len(tok.thinking.opening) :]) == (thinking, "4 <|im_end|>")
            assert tok.split_answer(response[: response.index(tok.thinking.close)]) == (thinking, "")


def test_follow_equals_the_end_of_the_whole_conversation(tok: HFTokenizer):
    new = [{"role": "user", "content": "fox <|im_end|>"}]
    asked, answer = CHATS[0], "print(value)"
    whole = tok.render([*asked, {"role": "assistant", "content": answer}, *new])
    before = tok.render([*asked, {"role": "assistant", "content": answer}], add_generation_prompt=False)
    follow = tok.follow(new)
    assert whole[-len(follow) :] == follow
    assert follow[0] == tok.end_turn == [i for i in before if i in tok.tokens.control.values()][-1]
    assert tok.thinking is not None and tok.follow(new, thinking=True)[-1] == tok.thinking.opening[-1]


def test_a_template_that_opens_the_thinking_itself_is_not_opened_twice():
    template = TEMPLATES["chatml"].replace("assistant\\n' }}", "assistant\\n<think>\\n' }}").encode()
    tok = HFTokenizer.of({**byte_level(), "chat_template.jinja": template})
    assert tok.render(CHATS[0]) == tok.render(CHATS[0], thinking=True)


def test_decoding_works_with_a_checkpoints_tokenizer_and_refuses_missing_tokens():
    tok = HFTokenizer.of(_small("chatml"), mask=4, eos=3, pad=0)
    lm = dataclasses.replace(tiny(), tokenizer=tok)
    chat, raw = CHATS[0], dataclasses.replace(lm, tokenizer=HFTokenizer.of(sentencepiece(), vocab=420))
    assert encode_prompts(lm, chat)[0] == [Prompt(tok.render(chat), True)]
    assert encode_prompts(raw, "fox")[0][0].ids == [
        2,
        *raw.tokenizer.encode("fox"),
    ]  # with its beginning of text
    old = [Prompt([5, 6], True), Prompt([5, 6], False)]
    new = [p.ids for p in encode_prompts(raw, [chat, chat], previous=old)[0]]
    assert new == [raw.tokenizer.follow(chat), raw.tokenizer.render(chat)]
    texts = [p.ids for p in encode_prompts(raw, ["fox", "fox"], previous=old)[0]]
    assert texts == [[raw.tokenizer.end_turn, *texts[1]], raw.tokenizer.encode("fox")]
    assert decode_answer(lm, np.array([*tok.encode("fox"), tok.end_turn, 9]), True) == (None, "fox")
    with pytest.raises(ValueError, match=r"thinking is True; allowed: none: .* has no tokens for it"):
        mj.sample(lm, chat, max_tokens=8, effort="low")
    block = dataclasses.replace(tiny("block_causal"), tokenizer=tok)
    with pytest.raises(ValueError, match="parts is 'a hole'; allowed: texts"):
        mj.infill(block, ["fox", mj.Hole(2), "the"])


def _small(template: str) -> dict[str, bytes]:
    """A tokenizer of at most 320 ids, the tiny model's, without tokens for thinking or holes."""
    files = byte_level(template)
    data = json.loads(files["tokenizer.json"])
    kept = {t: i for t, i in data["model"]["vocab"].items() if i < 300}
    model = {
        **data["model"],
        "vocab": kept,
        "merges": [m for m in data["model"]["merges"] if "".join(m) in kept],
    }
    words = [t for t in data["added_tokens"] if t["special"]]
    added = [{**t, "id": 300 + i} for i, t in enumerate(words)]
    return {**files, "tokenizer.json": json.dumps({**data, "model": model, "added_tokens": added}).encode()}
