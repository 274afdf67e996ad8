"""The laws of the data: nothing leaks, nothing is lost, and a state goes on exactly where it was taken."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from mercury_jax.tokenizer import SPECIAL
from mercury_jax.training import data
from mercury_jax.training.data import packing
from mercury_jax.training.data.documents import Files
from mercury_jax.training.data.shard_writer import pack
from tests.tiny import tokenizer
from tests.training.tiny_data import (
    BLOCK,
    FIRST,
    Bytes,
    Runs,
    build,
    conversation,
    epoch,
    layout,
    owners,
    take,
)

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
        start, stop, final = packing.cut_pieces(lengths, chunk, np.random.default_rng(seed))
        assert (stop - start >= 1).all() and (stop - start <= chunk).all()
        order = np.argsort(start)
        np.testing.assert_array_equal(start[order], np.r_[0, stop[order][:-1]])
        np.testing.assert_array_equal(np.sort(stop[final]), np.cumsum(lengths))


def test_cuts_differ_between_epochs_but_not_in_number():
    a, b = (packing.cut_pieces(np.array([1000, 33]), 64, np.random.default_rng(e)) for e in (0, 1))
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
        some = packing.keep_spans(laid, rng)
        assert not (some.editable & ~laid.editable).any()
        for c in range(laid.canvas.max() + 1):
            kept = np.flatnonzero(some.editable & (laid.canvas == c))
            assert len(kept) and np.ptp(kept) == len(kept) - 1
            starts.append(kept[0] - np.flatnonzero(laid.canvas == c)[0])
    assert 0.4 < np.mean(np.array(starts) == 0) < 0.8


# --- conversations


def test_only_the_last_answer_is_learnt_and_it_closes_with_eos(tmp_path):
    said = [
        ("system", "s"), ("user", "q"), ("assistant", "old"), ("user", "r"), ("assistant", "new"),
        ("user", "z"),
    ]  # fmt: skip
    messages = [{"role": role, "content": content} for role, content in said]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": messages}))
    row = next(build(data.mixture((data.chat(f"{tmp_path}/c.jsonl"), 1)), rows=1, row=64, prefetch=0))
    canvas = row.tokens[0][row.canvas[0] == 0]
    assert canvas.tolist() == Bytes().encode("new") + [SPECIAL.eos] * (BLOCK - 3)
    assert (row.canvas[row.editable] >= 0).all() and FIRST + ord("z") not in row.tokens


# --- thinking that the prompt holds already


@pytest.mark.parametrize("name", ["add2", "sudoku4"])  # with a derivation, and without one
def test_a_share_of_the_prompts_holds_the_start_of_the_answer(name):
    tok, count = tokenizer(), 200

    def before_the_canvas(split, **more):
        source = data.generated(name, thinking=True, **more)
        stream = source.open(packing.StreamSettings(tok, layout(), 256, (0, 0), split))
        assert stream is not None
        found = []
        for laid in map(stream.at, range(count)):
            start = laid.positions[laid.editable].min()
            found.append(int(laid.tokens[(laid.canvas < 0) & (laid.positions == start - 1)][0]))
        return found

    assert set(before_the_canvas("train")) == {SPECIAL.assistant}
    assert set(before_the_canvas("test", prefill=1.0)) == {
        SPECIAL.assistant
    }  # held-out losses stay comparable
    some = before_the_canvas("train", prefill=0.5)
    shares = {i: some.count(i) / count for i in set(some)}
    assert set(shares) == {SPECIAL.assistant, SPECIAL.think, SPECIAL.end_think}
    assert all(abs(shares[i] - want) < 0.12 for i, want in ((SPECIAL.assistant, 0.5), (SPECIAL.think, 0.25)))


def test_a_prefill_without_thinking_is_refused():
    with pytest.raises(ValueError, match="prefill is 0.5; allowed: 0 without thinking=True"):
        data.generated("add2", prefill=0.5)
    with pytest.raises(ValueError, match="task is 'sudoku'; allowed: sudoku4 is the nearest"):
        data.generated("sudoku")


# --- reading files


def test_no_folder_is_read_twice_through_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/x.txt", "a/y.txt", "other/z.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    links = {
        "a/b/up": "..", "a/b/self": ".", "a/c": "b", "a/out": "../other", "link": "a", "a/loop": "loop",
        "a/b/l.txt": "l.txt",
    }  # fmt: skip
    for link, target in links.items():
        os.symlink(target, link)
    texts = lambda pattern: sorted(text for _, text in data.text(pattern).documents("train"))
    for top in ("a", "./a", f"{tmp_path}/a", "link"):
        assert texts(f"{top}/**/*.txt") == ["a/b/x.txt", "a/y.txt", "other/z.txt"]
    assert (
        texts("**/*.txt")
        == texts("*/**/*.txt")
        == texts("**/**/*.txt")
        == ["a/b/x.txt", "a/y.txt", "other/z.txt"]
    )
    assert texts("a/**/b/*.txt") == ["a/b/x.txt"] and texts("a/*/*.txt") == ["a/b/x.txt", "other/z.txt"]
    assert sorted(Files(("a/**/*.txt", "link/*.txt", "other/*")).paths) == [
        "a/b/x.txt",
        "a/y.txt",
        "other/z.txt",
    ]


@pytest.mark.parametrize("end", ["txt", "txt.gz", "jsonl", "jsonl.gz"])
def test_a_byte_order_mark_is_no_token(tmp_path, end):
    text = json.dumps({"text": "hello"}) if "jsonl" in end else "hello"
    raw = "\ufeff".encode() + text.encode()
    path = tmp_path / f"x.{end}"
    path.write_bytes(gzip.compress(raw) if end.endswith("gz") else raw)
    source = data.jsonl(str(path)) if "jsonl" in end else data.text(str(path))
    assert source.documents("train")[0][1] == "hello"
    folder = tmp_path / "packed"
    manifest = pack(Files((str(path),)), tokenizer(), folder)
    assert manifest["train"]["tokens"] == len(tokenizer().encode("hello")) + 1


@pytest.mark.parametrize("end", ["txt.gz", "jsonl.gz", "txt.zst", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_damaged_file_is_named_whatever_its_format(tmp_path, end, how):
    text = "\n".join(json.dumps({"text": f"{i} {i * 7919 % 1013}"}) for i in range(3000)).encode()
    path = tmp_path / f"x.{end}"
    if end.endswith("gz"):
        path.write_bytes(gzip.compress(text))
    elif end.endswith("zst"):
        zstd = pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True)
        path.write_bytes(zstd.compress(text[:5000]) + zstd.compress(text[5000:]))
        whole = b"".join(
            r.value.encode() if isinstance(r.value, str) else r.value for r in Files((str(path),)).records(0)
        )
        assert whole == text  # both frames
    else:
        arrow = pytest.importorskip("pyarrow.parquet")
        arrow.write_table(__import__("pyarrow").table({"text": text.decode().split("\n")}), path)
    raw = bytearray(path.read_bytes())
    if how == "flipped":
        raw[len(raw) // 2] ^= 255
    path.write_bytes(raw[: len(raw) * 2 // 3] if how == "cut" else raw)
    if how == "flipped" and end == "parquet":
        return  # without checksums of pages a changed byte may be a changed text
    with pytest.raises(ValueError, match=rf"SOURCE is .*x\.{end}.*a file that can be read"):
        list(Files((str(path),)).records(0))


def test_bad_lines_stop_or_are_skipped_and_counted(tmp_path, capsys):
    turn = lambda content: {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    }
    parts = [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]
    bad = {
        "null": turn(None),
        "image": turn([{"type": "image_url", "image_url": {}}]),
        "long": turn("long " * 99),
    }
    good = [conversation("q", "one"), json.dumps(turn(parts))]
    path = tmp_path / "c.jsonl"
    open_it = lambda **more: build(data.mixture((data.chat(str(path), **more), 1.0)), prefetch=0)
    for line in bad.values():
        path.write_text("\n".join([*good, json.dumps(line)]))
        with pytest.raises(ValueError, match=r"c\.jsonl:3"):
            open_it()
    path.write_text("\n".join([*good, *map(json.dumps, bad.values()), '{"messages": [']))
    rows = take(open_it(bad_lines="skip"), 4)
    read = bytes(int(t) - FIRST for row in rows for t in row.tokens.ravel() if t >= FIRST)
    assert b"two\nparts" in read and b"one" in read and b"long" not in read
    told = capsys.readouterr().err
    assert "skipped 3 of 6 lines; the first: " in told and "skipped 1 of 3 lines" in told
    manifest = pack(Files((str(path),), chats=True, bad_lines="skip"), tokenizer(), tmp_path / "packed")
    assert manifest["skipped"] == 3 and manifest["train"]["documents"] == 3
    with pytest.raises(ValueError, match=r"c\.jsonl:3: messages\[1\]\.content is None"):
        pack(Files((str(path),), chats=True), tokenizer(), tmp_path / "stopped")
