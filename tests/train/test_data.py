"""The laws of the data: nothing leaks, nothing is lost, and a state goes on exactly where it was taken."""

import dataclasses
import json
import sys
import types

import numpy as np
import pytest

from mercury_jax.config import ModelConfig, Pattern
from mercury_jax.models.masks import layout_of
from mercury_jax.tokenizer import SPECIAL
from mercury_jax.train import data
from mercury_jax.train.data import corpus, packing, streams

FIRST = len(SPECIAL)
BLOCK = 8


class Bytes:
    """A tokenizer of bytes, with the real special ids."""

    special = SPECIAL
    mask, pad, eos, vocab_size = SPECIAL.mask, SPECIAL.pad, SPECIAL.eos, FIRST + 256

    def encode(self, text: str) -> list[int]:
        return [FIRST + byte for byte in text.encode()]


class Runs(Bytes):
    """The text "7 30" is thirty times the id of document 7: a token tells whose it is."""

    vocab_size = FIRST + 1000

    def encode(self, text: str) -> list[int]:
        name, n = map(int, text.split())
        return [FIRST + name] * n


def layout(pattern: Pattern = "causal_encoder"):
    return layout_of(ModelConfig(vocab=FIRST + 1000, block=BLOCK, pattern=pattern))


@pytest.fixture
def many(tmp_path):
    """90 documents of 1 to 90 tokens as JSONL, in the notation of `Runs`."""
    lines = [json.dumps({"text": f"{name} {name + 1}"}) for name in range(90)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines) + "\n\n")
    return str(tmp_path / "*.jsonl")


@pytest.fixture
def mixed(tmp_path):
    """Running text, conversations and problems."""
    (tmp_path / "a.txt").write_text("".join(chr(97 + i * i % 26) for i in range(4000)))
    (tmp_path / "b.txt").write_text("short")
    (tmp_path / "c.jsonl").write_text("\n".join(conversation(f"q{i}", "a" * i) for i in range(30)))
    text, chat = data.text(f"{tmp_path}/*.txt"), data.chat(f"{tmp_path}/c.jsonl")
    return data.mixture((text, 0.5), (chat, 0.2), (data.generated("add3"), 0.3))


def conversation(question: str, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns})


def build(mixture, tokenizer=None, pattern: Pattern = "causal_encoder", **more):
    setting = {"rows": 4, "row": 128, "seed": 3, **more}
    return data.build(mixture, tokenizer or Bytes(), layout(pattern), **setting)


def take(iterator, n):
    return [next(iterator) for _ in range(n)]


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right):
        for x, y in zip(a, b):
            np.testing.assert_array_equal(x, y)


def epoch(source, row=256, limit=4, pattern: Pattern = "causal_encoder", epoch=0):
    """One epoch of a source, packed, its open rows flushed."""
    setting = streams.Setting(Runs(), layout(pattern), row, (0, 0), "train")
    opened = streams.stream(source, setting)
    assert opened is not None
    at, size = opened
    open_rows, closed = [], []
    for i in range(size):
        done = packing.place(open_rows, (0, i), at(epoch * size + i), row, limit)
        closed += [done] if done else []
    return packing.batch(closed + open_rows, row, Runs.pad)


def owners(row_tokens):
    """The document of each slot of a row, -1 for padding; an eos belongs to the document before it."""
    own = np.where(row_tokens >= FIRST, row_tokens - FIRST, -1)
    for i in np.flatnonzero(row_tokens == Runs.eos):
        own[i] = own[i - 1]
    return own


# --- packing


@pytest.mark.parametrize("pattern", ["causal_encoder", "bidirectional", "block_causal"])
def test_no_position_attends_outside_its_own_document(many, pattern):
    packed = epoch(data.jsonl(many), pattern=pattern)
    for tokens, ranges in zip(packed.tokens, packed.ranges):
        own = owners(tokens)
        for query, seen in zip(own, ranges):
            keys = {name for start, end in seen for name in own[start:end]}
            assert keys == ({query} if query >= 0 else set())
            assert (seen[seen[:, 0] == seen[:, 1]] == 0).all()  # an empty range stays at the origin


def test_canvases_are_numbered_through_a_row_and_never_shared(many):
    packed = epoch(data.jsonl(many))
    for tokens, canvas, editable in zip(packed.tokens, packed.canvas, packed.editable):
        assert set(canvas) - {-1} == set(range(canvas.max() + 1))
        assert (canvas[editable] >= 0).all()
        for c in range(canvas.max() + 1):
            slots = np.flatnonzero(canvas == c)
            assert len(slots) <= BLOCK and np.ptp(slots) == len(slots) - 1
            assert len(set(owners(tokens)[slots])) == 1


@pytest.mark.parametrize("n", [0, 1])
def test_every_document_is_there_and_each_of_its_editable_tokens_counts_once(many, n):
    packed = epoch(data.jsonl(many, infill=0.0), epoch=n)
    for name in range(90):
        mine = np.stack([owners(t) == name for t in packed.tokens])
        scored = np.sort(packed.positions[mine & packed.editable])
        assert scored[0] < BLOCK and scored[-1] >= name + 1  # the eos behind name + 1 tokens
        np.testing.assert_array_equal(scored, np.arange(scored[0], scored[-1] + 1))


def test_rows_are_filled_first_fit_and_few_stay_open():
    laid = layout()(np.arange(FIRST, FIRST + 30, dtype=np.int32), 0, None)
    rows, closed = [], []
    for i in range(100):
        done = packing.place(rows, (0, i), laid, 256, 4)
        closed += [done] if done else []
        assert len(rows) <= 4
    assert {len(row.refs) for row in closed} == {256 // len(laid.tokens)}
    assert sorted(ref for row in closed + rows for ref in row.refs) == [(0, i) for i in range(100)]


# --- text


@pytest.mark.parametrize("chunk", [2, 3, 7, 64])
def test_an_epoch_cuts_every_text_into_pieces_that_cover_it_once(chunk):
    lengths = np.arange(1, 300)
    for seed in range(3):
        start, stop, final = streams.cut(lengths, chunk, np.random.default_rng(seed))
        assert (stop - start >= 1).all() and (stop - start <= chunk).all()
        order = np.argsort(start)
        np.testing.assert_array_equal(start[order], np.r_[0, stop[order][:-1]])
        np.testing.assert_array_equal(np.sort(stop[final]), np.cumsum(lengths))


def test_cuts_differ_between_epochs_but_not_in_number():
    a, b = (streams.cut(np.array([1000, 33]), 64, np.random.default_rng(e)) for e in (0, 1))
    assert len(a.start) == len(b.start) and set(a.start) != set(b.start)


@pytest.mark.parametrize("pattern", ["causal_encoder", "bidirectional", "block_causal"])
def test_long_text_fits_the_row_and_ends_in_whole_canvases(tmp_path, pattern):
    (tmp_path / "long.txt").write_text("5 5000")
    packed = epoch(data.text(f"{tmp_path}/*.txt", infill=0.0), row=100, pattern=pattern)
    assert (packed.positions.max(1) >= 40).mean() > 0.8  # the rows are well used
    assert 1 <= (packed.editable & (packed.tokens == Runs.eos)).sum() <= BLOCK  # only where the text ends
    if pattern == "causal_encoder":
        sizes = np.concatenate([np.unique(c[c >= 0], return_counts=True)[1] for c in packed.canvas])
        assert (sizes == BLOCK).mean() > 0.97  # a first piece shorter than a block stays short


def test_infilling_leaves_one_span_of_each_canvas_editable():
    laid = layout()(np.arange(FIRST, FIRST + 60, dtype=np.int32), 4, Bytes.eos)
    rng, starts = np.random.default_rng(0), []
    for _ in range(50):
        some = streams.spans(laid, rng)
        assert not (some.editable & ~laid.editable).any()
        for c in range(laid.canvas.max() + 1):
            kept = np.flatnonzero(some.editable & (laid.canvas == c))
            assert len(kept) and np.ptp(kept) == len(kept) - 1
            starts.append(kept[0] - np.flatnonzero(laid.canvas == c)[0])
    assert 0.4 < np.mean(np.array(starts) == 0) < 0.8


# --- conversations


def test_only_the_last_answer_is_learnt_and_it_closes_with_eos(tmp_path):
    said = [
        ("system", "s"),
        ("user", "q"),
        ("assistant", "old"),
        ("user", "r"),
        ("assistant", "new"),
        ("user", "z"),
    ]
    messages = [{"role": role, "content": content} for role, content in said]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": messages}))
    row = next(build(data.mixture((data.chat(f"{tmp_path}/c.jsonl"), 1)), rows=1, row=64, prefetch=0))
    canvas = row.tokens[0][row.canvas[0] == 0]
    assert canvas.tolist() == Bytes().encode("new") + [SPECIAL.eos] * (BLOCK - 3)
    assert (row.canvas[row.editable] >= 0).all() and FIRST + ord("z") not in row.tokens


# --- the pipeline


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_restored_state_goes_on_exactly_with_rows_open(mixed, prefetch):
    run = build(mixed, prefetch=prefetch)
    take(run, 5)
    state = json.dumps(run.get_state())
    assert sum(map(len, json.loads(state)["open"])) > 4
    after = take(run, 6)
    fresh = build(mixed, prefetch=prefetch)
    fresh.set_state(json.loads(state))
    assert json.dumps(fresh.get_state()) == state
    assert_same(take(fresh, 6), after)
    run.set_state(json.loads(state))  # and in place
    assert_same(take(run, 6), after)
    run.close()
    fresh.close()


def test_a_state_of_other_data_is_refused(mixed):
    state = build(mixed, prefetch=0).get_state()
    for other in (build(mixed, prefetch=0, seed=4), build(mixed, prefetch=0, rows=2)):
        with pytest.raises(ValueError, match=r"state\.data"):
            other.set_state(state)


def test_the_seed_decides(mixed):
    first = take(build(mixed, prefetch=0), 4)
    assert_same(first, take(build(mixed, prefetch=0), 4))
    other = take(build(mixed, prefetch=0, seed=4), 4)
    assert any((a.tokens != b.tokens).any() for a, b in zip(first, other))


def test_weights_are_shares_of_the_positions(mixed):
    run = build(mixed, prefetch=0)
    take(run, 30)
    given = np.array(run.get_state()["positions"])
    np.testing.assert_allclose(given / given.sum(), [0.5, 0.2, 0.3], atol=0.02)


def test_processes_read_different_documents(tmp_path):
    lines = [json.dumps({"text": f"{name} {name % 90 + 1}"}) for name in range(900)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    mixture = data.mixture((data.jsonl(f"{tmp_path}/many.jsonl"), 1))
    seen = []
    for index in range(3):
        run = build(mixture, Runs(), index=index, count=3, rows=1, row=256, prefetch=0)
        names: set[int] = set()
        while run.get_state()["next"][0] < 250:  # of an epoch of 300 for each
            names |= {name for tokens in next(run).tokens for name in owners(tokens)} - {-1}
        seen.append(names)
    assert all(seen[i].isdisjoint(seen[j]) for i in range(3) for j in range(i))
    assert all(len(names) > 150 for names in seen)


# --- splits


def test_held_out_documents_are_never_trained_on(many):
    source = data.jsonl(many, held_out=0.3)
    mixture = data.mixture((source, 1))
    train = take(build(mixture, Runs(), row=256, prefetch=0), 30)
    test = data.held_out(mixture, Runs(), layout(), rows=2, row=256, batches=20)
    assert len(test) == 20
    left, right = ({n for b in side for t in b.tokens for n in owners(t)} - {-1} for side in (train, test))
    assert left.isdisjoint(right) and len(left) + len(right) == 90 and 15 < len(right) < 40
    assert_same(test, data.held_out(mixture, Runs(), layout(), rows=2, row=256, batches=20))


def test_problems_of_the_two_sides_are_disjoint():
    at = {split: streams.problems(data.generated("add3"), (0, 0), split) for split in ("train", "test")}
    train, test = ({at[split](i).input for i in range(300)} for split in ("train", "test"))
    assert train.isdisjoint(test) and len(train) > 290
    few = streams.problems(data.generated("add3", distinct=5), (0, 0), "train")
    assert len({few(i).input for i in range(50)}) <= 5


def test_the_standard_library_is_split_by_file():
    train, test = corpus.files("train"), corpus.files("test")
    assert {path for path, _ in train}.isdisjoint(path for path, _ in test)
    size = [sum(len(text.encode()) for _, text in side) for side in (train, test)]
    assert 5e6 < size[0] < 14e6 and 0.02 < size[1] / size[0] < 0.1
    parts = [path.split("/") for path, _ in train + test]
    assert ["argparse.py"] in parts and not [p for p in parts if {"test", "site-packages"} & set(p)]


def test_nothing_held_out_is_said(many):
    with pytest.raises(ValueError, match="holds anything out"):
        data.held_out(data.mixture((data.jsonl(many), 1)), Runs(), layout(), rows=2, row=256)


# --- the tokenizer's texts


def test_texts_come_in_proportion_and_within_the_budget(mixed):
    some = list(data.texts(mixed, 9000))
    assert 9000 <= sum(len(t.encode()) for t in some) < 9500
    assert some == list(data.texts(mixed, 9000)) and some != list(data.texts(mixed, 9000, seed=1))
    problem = streams.problems(data.generated("add3"), (0, 2), "train")(0)
    assert f"{problem.input}\n{problem.output}" in some


# --- refusals


BROKEN = {
    "list.jsonl": ('{"text": "1 1"}\n[1]\n', r"list\.jsonl:2: a list"),
    "cut.jsonl": ('{"text": "1 1"}\n\n{"text": "1', r"cut\.jsonl:3: no JSON"),
    "field.jsonl": ('{"body": "1 1"}', r"field\.jsonl:1: text is None"),
    "half.jsonl": ('{"text": "\\ud800"}', r"half\.jsonl:1: text .* surrogates"),
    "empty.jsonl": ("\n", r"glob is .*\*\.jsonl'; allowed: files with at least one document"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_refused_by_file_and_line(tmp_path, name):
    text, message = BROKEN[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        build(data.mixture((data.jsonl(f"{tmp_path}/*.jsonl"), 1)), Runs())


CHATS = {
    '{"messages": "hello"}': r"c\.jsonl:1: messages is 'hello'",
    '{"messages": [{"role": "assistant", "content": "a"}]}': r"follows another turn",
    '{"messages": [{"role": "user", "content": "a"}]}': r"follows another turn",
    conversation("a", "a").replace("user", "king"): r"c\.jsonl:1: .*king",
    conversation("a", "a").replace("content", "text", 1): r"c\.jsonl:1: content is None",
}


@pytest.mark.parametrize("line", CHATS)
def test_a_broken_conversation_is_refused(tmp_path, line):
    (tmp_path / "c.jsonl").write_text(line)
    with pytest.raises(ValueError, match=CHATS[line]):
        build(data.mixture((data.chat(f"{tmp_path}/c.jsonl"), 1)))


def test_an_answer_that_no_row_holds_is_refused_by_file_and_line(tmp_path):
    (tmp_path / "c.jsonl").write_text(conversation("q", "a" * 500))
    with pytest.raises(ValueError, match=r"row is 128; allowed: \d+ positions .* or more, for .*c\.jsonl:1"):
        build(data.mixture((data.chat(f"{tmp_path}/c.jsonl"), 1)))


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "gone.md").symlink_to(tmp_path / "nowhere")
    for pattern, message in (
        ("none/*.txt", "finds at least one file"),
        ("*.txt", r"latin\.txt.*UTF-8 text \(byte 3"),
        ("gone.md", r"gone\.md.*can be read"),
    ):
        with pytest.raises(ValueError, match=message):
            build(data.mixture((data.text(f"{tmp_path}/{pattern}"), 1)))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: data.mixture(), "sources"),
        (lambda: data.mixture((data.stdlib(), 0)), r"weight is 0\.0"),
        (lambda: data.mixture(("stdlib", 1)), "source is 'stdlib'"),  # type: ignore[arg-type]
        (lambda: data.text("x", infill=2), "infill is 2"),
        (lambda: data.text("x", chunk=1), "chunk is 1"),
        (lambda: data.generated("add3", distinct=0), "distinct is 0"),
        (lambda: build(data.mixture((data.generated("add99"), 1))), "generated is 'add99'; allowed: add2"),
        (lambda: build(data.mixture((data.generated("add3"), 1)), row=8), "row is 8; .*a problem of add3"),
        (lambda: build(data.mixture((data.generated("add3"), 1)), index=2, count=2), "index is 2"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_chunk_longer_than_the_row_is_refused(many):
    with pytest.raises(ValueError, match=r"chunk is 200; allowed: 2\.\.\d+"):
        build(data.mixture((data.jsonl(many, chunk=200), 1)), Runs())


def test_hugging_face_data_without_the_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"hf\('some/set'\).*`datasets` is installed"):
        build(data.mixture((data.hf("some/set"), 1)))


def test_hugging_face_data_is_read(monkeypatch):
    class Table(dict):
        column_names = ("text",)

    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda name, split: Table(text=["1 20", "2 30"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    batch = next(build(data.mixture((data.hf("some/set"), 1)), Runs(), prefetch=0))
    assert {name for tokens in batch.tokens for name in owners(tokens)} - {-1} == {1, 2}


def test_a_tokenizer_that_does_not_fit_the_model_is_refused():
    fits = ModelConfig(vocab=Bytes.vocab_size, mask=Bytes.mask, pad=Bytes.pad, eos=Bytes.eos)
    data.check_fit(Bytes(), fits)
    for name in ("vocab", "mask", "pad", "eos"):
        with pytest.raises(ValueError, match=f"{name} is 9"):
            data.check_fit(Bytes(), dataclasses.replace(fits, **{name: 9 if name != "vocab" else 99}))


def test_a_mixture_is_plain_data(mixed):
    assert hash(mixed) == hash(dataclasses.replace(mixed))
    assert json.loads(json.dumps(dataclasses.asdict(mixed)))["sources"][2][0]["name"] == "add3"
