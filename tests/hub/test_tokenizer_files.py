"""The files of a tokenizer: they are combined as in transformers, and damaged files raise errors that name them."""

import dataclasses
import json
import random

import pytest
from tokenizers import Tokenizer

from mercury_jax import noise
from mercury_jax.checkpoint import CheckpointError
from mercury_jax.hub.tokenizer import HFTokenizer, unpack
from mercury_jax.hub.tokenizer_files import MAX_BYTES, own_files, read_files
from mercury_jax.tokenizer import SPECIAL, Tokenizer as Ours
from tests.hub.tiny_tokenizers import byte_level, sentencepiece
from tests.test_tokenizer import NASTY, TEXTS, _random_text
from tests.tiny import tokenizer as ours

NAMES = json.loads(byte_level()["tokenizer_config.json"])
CHAT = [{"role": "user", "content": "  def value "}]


def test_special_ids_are_the_models_or_those_of_the_files():
    tok = HFTokenizer.of(sentencepiece())
    assert (tok.pad, tok.eos, tok.mask, tok.begin) == (0, 1, 4, (2,))
    assert tok.end_turn == tok.tokens.control["<end_of_turn>"]
    given = HFTokenizer.of(byte_level(), mask=9, eos=10, pad=11, ends=(12,), vocab=600)
    assert (given.mask, given.eos, given.pad, given.ends, given.begin) == (9, 10, 11, (10, 12), ())
    assert noise.specials(given) == (9, 11)
    assert noise.specials(given, 600) == (9, 11, *range(given.vocab_size, 600))  # ids that stand for nothing
    assert (
        noise.specials(dataclasses.replace(given, mask=None, pad=12)) == ()
    )  # a pad that ends answers is none
    with pytest.raises(ValueError, match=r"pad is 600; allowed: an id in 0..599"):
        HFTokenizer.of(byte_level(), pad=600, vocab=600)
    bare = {"tokenizer.json": byte_level()["tokenizer.json"]}
    with pytest.raises(ValueError, match="eos is None"):
        HFTokenizer.of(bare)


@pytest.mark.parametrize("adds", [None, True, False])
def test_the_post_processor_decides_how_a_text_begins_and_add_bos_token_where_there_is_none(adds):
    """As transformers 5.24 encodes them: `add_bos_token` is read where vocab.json takes tokenizer.json's place."""
    about = json.dumps({**NAMES, **({} if adds is None else {"add_bos_token": adds})}).encode()
    begin = lambda files: HFTokenizer.of({**files, "tokenizer_config.json": about}).begin
    ids = lambda files, text: HFTokenizer.of(files).tokens.control[text]
    assert begin(byte_level()) == ()
    files = {**sentencepiece(), "tokenizer_config.json": sentencepiece()["tokenizer_config.json"]}
    known = json.loads(files["tokenizer_config.json"]) | ({} if adds is None else {"add_bos_token": adds})
    assert HFTokenizer.of({**files, "tokenizer_config.json": json.dumps(known).encode()}).begin == (
        ids(files, "<bos>"),
    )
    model = json.loads(byte_level()["tokenizer.json"])["model"]
    split = {
        "vocab.json": json.dumps({**model["vocab"], "<s>": len(model["vocab"])}).encode(),
        "merges.txt": "\n".join(" ".join(m) for m in model["merges"]).encode(),
    }
    found = HFTokenizer.of(
        {
            **split,
            "tokenizer_config.json": json.dumps(
                json.loads(about) | {"tokenizer_class": "Qwen2Tokenizer"}
            ).encode(),
        },
        eos=1,
    ).begin
    assert found == ((len(model["vocab"]),) if adds else ())


def test_tokens_that_only_the_config_files_list_get_their_ids():
    late = {"400": {"content": "<|late|>", "special": True}, "402": {"content": "plainly", "special": False}}
    about = {
        **NAMES,
        "added_tokens_decoder": late,
        "auto_map": {"AutoTokenizer": ["evil.py", None]},
    }
    tok = HFTokenizer.of(
        {**byte_level(), "tokenizer_config.json": json.dumps(about).encode(),
         "added_tokens.json": b'{"<MASK>": 405}'},
        mask=405,
    )  # fmt: skip
    assert tok.tokens.control["<|late|>"] == 400 and tok.tokens.control["<MASK>"] == 405
    assert tok.encode("plainly") == [402] and tok.vocab_size == 406 and tok.pieces[403] == b""
    assert 400 not in tok.encode("<|late|>") and tok.decode([400], False) == "<|late|>"
    assert any("evil.py" in note for note in tok.data.notes)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_a_byte_level_bpe_is_built_from_vocab_and_merges(kind: str):
    data = json.loads(byte_level()["tokenizer.json"])
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    files = {
        "vocab.json": json.dumps(vocab).encode(),
        "merges.txt": ("#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n").encode(),
        "added_tokens.json": json.dumps({t["content"]: t["id"] for t in data["added_tokens"]}).encode(),
        "tokenizer_config.json": json.dumps({**NAMES, "tokenizer_class": kind}).encode(),
    }
    tok, whole = HFTokenizer.of(files), HFTokenizer.of(byte_level())
    assert tok.encode("def value 12 <|im_end|>") == whole.encode("def value 12 <|im_end|>")
    assert tok.decode(tok.encode("é e\u0301")) == ("é é" if kind == "Qwen2Tokenizer" else "é e\u0301")
    assert tok.tokens.control == whole.tokens.control
    strange = json.dumps({"tokenizer_class": "StrangeTokenizer", "eos_token": "<|im_end|>"}).encode()
    with pytest.raises(CheckpointError, match=r"tokenizer_class is 'StrangeTokenizer'.*GPT2Tokenizer"):
        HFTokenizer.of({**files, "tokenizer_config.json": strange})


def test_templates_are_read_from_files_and_configs_by_name():
    bare = {k: v for k, v in byte_level().items() if not k.endswith(".jinja")}
    about = NAMES
    with pytest.raises(
        ValueError, match="messages is 'a conversation'; allowed: a text: .* no chat template"
    ):
        HFTokenizer.of(bare).render(CHAT)
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b{{ tools[0].name }}"}]
    for files, text in [
        ({"tokenizer_config.json": json.dumps({**about, "chat_template": "fox"}).encode()}, "fox"),
        ({"tokenizer_config.json": json.dumps({**about, "chat_template": named}).encode()}, "a"),
        ({"chat_template.json": b'{"chat_template": "json"}'}, "json"),
        ({"chat_template.jinja": b"file", "chat_template.json": b'{"chat_template": "json"}'}, "file"),
        (
            {
                "chat_template.jinja": b"file",
                "additional_chat_templates/tool_use.jinja": b"b{{ tools[0].name }}",
            },
            "file",
        ),
    ]:
        tok = HFTokenizer.of({**bare, **files})
        assert tok.decode(tok.render(CHAT)) == text
        if "tool_use" in tok.data.templates:
            assert tok.decode(tok.render(CHAT, tools=[{"name": "f<|im_end|>"}])) == "bf<|im_end|>"


def write(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def test_tokenizer_files_are_read_and_packed_unchanged(tmp_path):
    files = {**byte_level(), "additional_chat_templates/tool_use.jinja": b"x"}
    write(tmp_path, files)
    (tmp_path / "evil.py").write_text("raise SystemExit")
    tok = HFTokenizer.of(read_files(tmp_path), mask=4, ends=(5,))
    assert dict(tok.files) == files
    again = unpack(tok.proto)
    assert again.fingerprint == tok.fingerprint != HFTokenizer.of(files).fingerprint
    assert (again.mask, again.ends) == (4, (321, 5)) and again.proto == tok.proto
    assert unpack(ours().proto) == ours()
    with pytest.raises(ValueError, match="archive"):
        unpack(tok.proto[:-100])


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordLevel", "vocab": {"<unk>": 0, "<mask>": 1, "fox": 2}, "unk_token": "<unk>"},
        {"type": "Unigram", "vocab": [["<unk>", 0.0], ["<mask>", 0.0], ["fox", -1.0], ["<", -2.0]], "unk_id": 0},
        {"type": "BPE", "vocab": {"<unk>": 0, "<mask>": 1, "f": 2, "<": 3, "m": 4, "<m": 5, "ask>": 6},
         "merges": ["< m", "<m ask>"], "unk_token": "<unk>", "ignore_merges": True},
    ],
    ids=lambda model: model["type"],
)  # fmt: skip
def test_a_special_token_is_not_assembled_from_ordinary_pieces(model):
    data = {"model": model, "added_tokens": [{"id": 1, "content": "<mask>", "special": True}]}
    data["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    files = {"tokenizer.json": json.dumps(data).encode(), "tokenizer_config.json": b'{"unk_token": "<unk>"}'}
    plain = Tokenizer.from_str(json.dumps({**data, "added_tokens": []}))
    assert plain.encode("<mask>").ids == [1]
    tok = HFTokenizer.of(files, eos=0)
    assert 1 not in tok.encode("fox <mask> <mask>") and tok.decode([1], skip_special=False) == "<mask>"


def test_an_id_that_is_too_large_is_refused():
    data = json.loads(byte_level()["tokenizer.json"])
    data["model"]["vocab"]["far"] = 4_000_000_000
    with pytest.raises(CheckpointError, match="id 4000000000; allowed: 0..3999999"):
        HFTokenizer.of({**byte_level(), "tokenizer.json": json.dumps(data).encode()})


def test_a_missing_or_too_large_tokenizer_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"no tokenizer; allowed: tokenizer.json, or vocab.json and merges.txt$"
    ):
        read_files(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="let transformers write tokenizer.json"):
        read_files(tmp_path)
    (tmp_path / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="symbolic link"):
        read_files(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    write(tmp_path, byte_level())
    (tmp_path / "chat_template.jinja").write_bytes(b" " * (MAX_BYTES["chat_template.jinja"] + 1))
    with pytest.raises(CheckpointError, match="more than 1000000 bytes"):
        read_files(tmp_path)


def test_a_bad_template_only_affects_conversations():
    tok = HFTokenizer.of({**byte_level(), "chat_template.jinja": b"{% for i in range(10**9) %}{% endfor %}"})
    assert tok.decode(tok.encode("fox")) == "fox"
    with pytest.raises(ValueError, match="chat_template: "):
        tok.render(CHAT)


def used(files) -> str:
    """Whether the files are read and work, or the words in which they are refused."""
    try:
        tok = HFTokenizer.of(files)
        return f"read {len(tok.pieces)} {tok.decode(tok.encode('def <|im_end|> é'))}"
    except ValueError as error:
        return str(error)


def test_damaged_tokenizer_files_raise_an_error_or_are_read():
    rng = random.Random(0)
    for files in (byte_level(), sentencepiece()):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            for _ in range(60):
                data = bytearray(files[name])
                for _ in range(rng.choice([1, 1, 3])):
                    at = rng.randrange(len(data))
                    data[at] = rng.choice([*b'{}[]",:0129ntf', rng.randrange(256)])
                cut = rng.choice([len(data), len(data), rng.randrange(len(data))])
                assert used({**files, name: bytes(data[:cut])})
    for odd in (
        b"[]",
        b"3",
        b"null",
        b'{"model": 3}',
        b'{"model": {"vocab": {"a": "b"}}}',
        b'{"added_tokens": 3, "model": {}}',
    ):
        with pytest.raises(ValueError, match="tokenizer.json"):
            HFTokenizer.of({**byte_level(), "tokenizer.json": odd})


# --- our own tokenizer, written for other libraries


@pytest.fixture(scope="module")
def own() -> Ours:
    return Ours.train(TEXTS, 370)


def test_our_tokenizer_has_the_same_ids_in_the_tokenizers_library(own: Ours):
    files = own_files(own)
    theirs, rng = HFTokenizer.of(files), random.Random(0)
    plain = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in [*NASTY, *TEXTS[:5], *(_random_text(rng) for _ in range(300))]:
        ids = own.encode(text)
        assert theirs.encode(text) == ids and theirs.decode(ids) == text
        if "<|" not in text:  # others take a special token from anyone
            assert plain.encode(text).ids == ids
    assert theirs.pieces == own.pieces
    assert plain.token_to_id("<|think|>") == SPECIAL.think


def test_our_chat_template_renders_as_our_tokenizer(own: Ours):
    theirs = HFTokenizer.of(own_files(own))
    chat = [
        {"role": role, "content": f"def {role} <|eos|>"} for role in ("system", "user", "assistant", "tool")
    ]
    for thinking in (False, True):
        assert theirs.render(chat, thinking=thinking) == own.render(chat, thinking=thinking)
        assert theirs.follow(chat, thinking=thinking) == own.follow(chat, thinking=thinking)
    assert theirs.example("a", "b", "c") == own.example("a", "b", "c")
    names = ("mask", "pad", "eos", "ends", "end_turn", "thinking", "fim", "begin", "vocab_size")
    assert [getattr(theirs, n) for n in names] == [getattr(own, n) for n in names]
