"""The laws of corpora in shards: nothing is lost or seen twice, and order and files depend on nothing but the seed."""

import gzip
import json
import signal
import subprocess
import sys
import types
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mercury_jax.tasks import TASKS
from mercury_jax.tokenizer import SPECIAL
from mercury_jax.training import data
from mercury_jax.training.data import corpus, documents, packing, shard_writer
from mercury_jax.training.data.documents import Files, HubStream, Problems
from mercury_jax.training.data.filling import permuted
from tests.tiny import tokenizer
from tests.training.tiny_data import (
    BLOCK,
    FIRST,
    Numbers,
    assert_same,
    conversation,
    layout,
    row_layout,
    take,
)

LENGTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 40, 64, 100, 333, 900, 1500] * 2  # of texts, in tokens
STARTS = FIRST + np.cumsum([0, *LENGTHS])  # every token of the corpus has an id of its own
PATTERNS = ["causal_encoder", "bidirectional", "block_causal"]


def write_texts(path: Path) -> None:
    texts = (" ".join(map(str, range(a, b))) for a, b in pairwise(STARTS))
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n")


def pack(folder: Path, reader, tok=None, **more) -> str:
    shard_writer.pack(reader, tok or Numbers(), folder, **{"shard_tokens": 1500, **more})
    return str(folder)


def content(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Many groups and shards of a small corpus."""
    monkeypatch.setattr(shard_writer, "BATCH", 2000)


@pytest.fixture
def texts(tmp_path):
    """A folder of shards whose every token is unique."""
    write_texts(tmp_path / "texts.jsonl")
    return pack(tmp_path / "texts", Files((f"{tmp_path}/texts.jsonl",)))


@pytest.fixture
def chats(tmp_path):
    (tmp_path / "chats.jsonl").write_text(
        "\n".join(conversation(f"q{i} " * (i % 5 + 1), "a" * (i % 30) + str(i)) for i in range(60))
    )
    return pack(tmp_path / "chats", Files((f"{tmp_path}/chats.jsonl",), chats=True), tokenizer())


def rows_of(folder, pattern="causal_encoder", rows=4, row=100, seed=3, **more):
    source = {k: more.pop(k) for k in ("chunk", "infill") if k in more}
    mixture = data.mixture((data.shards(folder, **source), 1))
    return data.build(
        mixture, Numbers(), row_layout(pattern), rows=rows, row=row, seed=seed, prefetch=0, **more
    )


def new_ids(batch) -> list[int]:
    """The ids of a batch of one row in the order of their first position; a causal encoder has each twice."""
    ids, first = np.unique(batch.tokens[0], return_index=True)
    return [int(i) for i in ids[np.argsort(first)] if i >= FIRST]


def first_epoch(folder, total, **setting):
    """Batches of one row up to the end of the first epoch, and their ids."""
    run, batches, seen = rows_of(folder, rows=1, **setting), [], []
    while len(seen) < total:
        batches.append(next(run))
        seen += new_ids(batches[-1])
    return batches, seen[:total]


# --- an epoch


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("row, chunk", [(40, None), (100, None), (100, 23), (3000, None)])
def test_every_token_is_there_exactly_once_in_an_epoch(texts, pattern, row, chunk):
    _, seen = first_epoch(texts, sum(LENGTHS), pattern=pattern, row=row, chunk=chunk)
    assert sorted(seen) == list(range(STARTS[0], STARTS[-1]))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_all_but_a_prompt_shorter_than_a_block_is_learnt_in_an_epoch(texts, pattern):
    batches, _ = first_epoch(texts, sum(LENGTHS), pattern=pattern, infill=0.0)
    learnt = {int(i) for batch in batches for i in batch.tokens[batch.editable]}
    prompts = set()
    for start, stop in pairwise(STARTS):
        missing = sorted(set(range(start, stop)) - learnt)
        assert (
            missing == list(range(start, start + len(missing)))
            and len(missing) < min(BLOCK, stop - start) + 1
        )
        prompts.add(len(missing))
    assert len(prompts) > 2  # of any length


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_position_attends_outside_its_own_document_and_canvases_are_whole(texts, pattern):
    for batch in take(rows_of(texts, pattern), 20):
        for tokens, ranges, canvas, positions in zip(
            batch.tokens, batch.ranges, batch.canvas, batch.positions
        ):
            own = np.searchsorted(STARTS, tokens, side="right")
            for i in np.flatnonzero(tokens == Numbers.eos):
                own[i] = own[i - 1]
            own[tokens == Numbers.pad] = -1
            for query, seen in zip(own, ranges):
                keys = {name for start, end in seen for name in own[start:end]}
                assert keys == ({query} if query >= 0 else set())
            sizes = np.unique(canvas[canvas >= 0], return_counts=True)[1]
            assert (sizes % BLOCK == 0).all() if pattern == "bidirectional" else (sizes == BLOCK).all()
            assert (tokens[np.flatnonzero(positions[1:] == positions[:-1] + 1) + 1] != Numbers.pad).all()


def test_rows_are_full(texts):
    for pattern, waste in (
        ("bidirectional", BLOCK),
        ("causal_encoder", 3 * BLOCK),
        ("block_causal", 2 * BLOCK),
    ):
        used = [(batch.tokens != Numbers.pad).sum(1) for batch in take(rows_of(texts, pattern, row=200), 20)]
        assert np.min(used) > 200 - waste


def test_pieces_are_as_long_as_a_chunk_at_most(texts):
    longest = max(int(batch.positions.max()) + 1 for batch in take(rows_of(texts, chunk=40, row=200), 40))
    assert 30 < longest <= 40


def test_infilling_narrows_a_share_of_the_pieces_on_the_training_side(texts):
    def share(**more):
        batches = take(rows_of(texts, "causal_encoder", row=400, **more), 20)
        return np.mean([b.editable[b.canvas >= 0].mean() for b in batches])

    none, some, all_of_them = (share(infill=x) for x in (0.0, 0.5, 1.0))
    assert none > 0.9 and all_of_them < 0.7 and all_of_them + 0.05 < some < none - 0.05
    for batch in take(rows_of(texts, infill=1.0), 5):
        for canvas, editable in zip(batch.canvas, batch.editable):
            for c in range(canvas.max() + 1):
                kept = np.flatnonzero(editable & (canvas == c))
                assert len(kept) and np.ptp(kept) == len(kept) - 1


# --- the order


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 1000])
def test_a_permutation_reaches_every_index_once_and_depends_on_its_key(size):
    orders = [[permuted(i, size, key) for i in range(size)] for key in (1, 2)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert size < 10 or orders[0] != orders[1]
    if size == 1000:  # neighbours go anywhere
        assert abs(np.corrcoef(np.arange(size), orders[0])[0, 1]) < 0.1
        assert np.mean(np.abs(np.diff(orders[0])) < 50) < 0.2


def test_the_seed_decides_and_epochs_differ(texts):
    total = sum(LENGTHS)
    first, same, other = (first_epoch(texts, total, seed=seed)[1] for seed in (3, 3, 4))
    assert first == same and first != other
    run, seen = rows_of(texts, rows=1, chunk=32), []
    while len(seen) < 2 * total + 200:
        seen += new_ids(next(run))
    places = [np.argsort(seen[:total]), np.argsort(seen[total : 2 * total])]
    assert abs(np.corrcoef(*places)[0, 1]) < 0.3  # another order, not only other cuts


def test_rows_take_different_windows(texts):
    stream = data.shards(texts, chunk=32).open(settings(100, Numbers(), row_layout()))
    assert stream is not None
    size = stream.size
    run, seen = rows_of(texts, rows=4, chunk=32), []
    while max(row["next"][0] for row in run.get_state()["rows"].values()) < size // 4 - 10:
        batch = next(run)
        seen += [int(i) for tokens in batch.tokens for i in np.unique(tokens[tokens >= FIRST])]
    assert len(seen) == len(set(seen)) > sum(LENGTHS) / 2


def test_any_number_of_processes_makes_the_rows_of_one(texts):
    problems = data.generated("add2")
    mix = data.mixture((data.shards(texts), 0.5), (data.shards(texts, chunk=32), 0.2), (problems, 0.3))

    def batches(**part):
        tok = tokenizer_of_bytes()
        return data.build(mix, tok, row_layout(), rows=4, row=128, seed=1, prefetch=0, **part)

    whole = take(batches(), 12)
    for count in (2, 4):
        parts = [take(batches(index=i, count=count), 12) for i in range(count)]
        assert_same([type(a)(*map(np.concatenate, zip(*rows))) for a, rows in zip(whole, zip(*parts))], whole)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_restored_state_goes_on_exactly(texts, prefetch):
    def start():
        source = data.shards(texts)
        mix = data.mixture((source, 0.6), (data.shards(texts, chunk=20, infill=1.0), 0.4))
        return data.build(mix, Numbers(), row_layout(), rows=3, row=90, seed=5, prefetch=prefetch)

    run = start()
    for step in (1, 7, 30):  # in the first window, in others, in another epoch
        take(run, step)
        state = json.dumps(run.get_state())
        after = take(run, 4)
        fresh = start()
        fresh.set_state(json.loads(state))
        assert json.dumps(fresh.get_state()) == state
        assert_same(take(fresh, 4), after)
    assert any(row["offset"][0] for row in json.loads(state)["rows"].values())


def test_weights_are_shares_of_the_positions(texts):
    mix = data.mixture((data.shards(texts), 0.7), (data.generated("add2"), 0.3))
    run = data.build(mix, tokenizer_of_bytes(), row_layout(), rows=4, row=128, seed=0, prefetch=0)
    used = np.zeros(2)
    for batch in take(run, 300):
        problems = (batch.tokens == SPECIAL.assistant).any(1)  # no row holds both
        held = (batch.tokens != Numbers.pad).sum(1)
        used += held[~problems].sum(), held[problems].sum()
    np.testing.assert_allclose(used / used.sum(), [0.7, 0.3], atol=0.03)


def tokenizer_of_bytes():
    """`Numbers` for shards, that writes other texts too."""
    tok = Numbers()
    tok.encode = lambda text: [FIRST + ord(c) for c in text]
    return tok


# --- sides


def test_held_out_documents_are_never_trained_on(tmp_path):
    write_texts(tmp_path / "texts.jsonl")
    folder = pack(tmp_path / "packed", Files((f"{tmp_path}/texts.jsonl",)), held_out=0.3)
    sides = []
    for split in ("train", "test"):
        batches = take(rows_of(folder, split=split), 150)
        sides.append({int(i) for b in batches for i in b.tokens.ravel() if i >= FIRST})
    assert sides[0].isdisjoint(sides[1]) and sides[1]
    assert sides[0] | sides[1] == set(range(STARTS[0], STARTS[-1]))
    direct = data.jsonl(f"{tmp_path}/texts.jsonl", held_out=0.3)
    held_out = {int(i) for _, text in direct.documents("test") for i in text.split()}
    assert sides[1] == held_out


def test_nothing_held_out_is_said(texts):
    with pytest.raises(ValueError, match="holds anything out"):
        rows_of(texts, split="test")


# --- the same documents as other sources


def laid_out(source, tok, count, split="train"):
    opened = source.open(packing.StreamSettings(tok, layout(), 256, (0, 0), split))
    assert opened is not None
    return [tuple(array.tobytes() for array in opened.at(i)) for i in range(count)], opened


def test_packed_chats_are_those_of_the_direct_source(chats):
    direct = data.chat(f"{chats}.jsonl")
    wanted, _ = laid_out(direct, tokenizer(), 60)
    found, opened = laid_out(data.shards(chats), tokenizer(), 60)
    assert opened.size == 60 and sorted(found) == sorted(wanted) and found != wanted
    again, _ = laid_out(data.shards(chats), tokenizer(), 120)
    assert sorted(again[60:]) == sorted(wanted) and again[60:] != found


def test_a_folder_of_shards_resumes_wherever_it_is(texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of = lambda where: data.build(
        data.mixture((data.shards(where), 1.0)), Numbers(), row_layout(), rows=4, row=100, seed=3, prefetch=0
    )
    first = of(texts)
    take(first, 3)
    state, wanted = first.get_state(), take(first, 3)
    Path(texts).rename("s2")
    for where in ("s2", "./s2", str(tmp_path / "s2")):
        moved = of(where)
        moved.set_state(state)
        assert_same(take(moved, 3), wanted)


def test_packed_problems_are_those_that_a_run_draws(tmp_path):
    source = data.generated("add2", thinking=True, prefill=0.5)
    folder = pack(tmp_path / "add2", Problems(source, 300), tokenizer(), held_out=0.1)
    wanted, _ = laid_out(source, tokenizer(), 300)
    found, _ = laid_out(data.shards(folder), tokenizer(), 300)
    assert sorted(found) == sorted(wanted)
    _, test = laid_out(data.shards(folder), tokenizer(), 30, split="test")
    assert test.size == 30
    for _, text in corpus.sample_documents(folder, tokenizer(), "test"):
        assert TASKS["add2"].split(text.partition("=")[0] + "=") == "test"


def test_texts_of_any_kind_of_file_are_the_same(tmp_path):
    texts = ["one two", "", "drei\nvier é", "x" * 700]
    lines = "\n".join(json.dumps({"body": text}) for text in texts).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    packed = [
        pack(tmp_path / f"packed{i}", Files((f"{tmp_path}/{name}",), "body"), tokenizer())
        for i, name in enumerate(["a.jsonl", "b.jsonl.gz", "*.txt"])
    ]
    for folder in packed:
        for end in (".tokens", ".index"):
            assert content(folder)[f"train-00000{end}"] == content(packed[0])[f"train-00000{end}"]
    found = {text for _, text in corpus.sample_documents(packed[0], tokenizer(), "train")}
    assert found == {text for text in texts if text}


@pytest.mark.parametrize("package, end", [("zstandard", ".jsonl.zst"), ("pyarrow", ".parquet")])
def test_files_that_need_a_package_are_read_or_refused_by_its_name(tmp_path, package, end, monkeypatch):
    path = tmp_path / f"x{end}"
    try:
        if package == "pyarrow":
            import pyarrow  # pyright: ignore[reportMissingImports]
            import pyarrow.parquet  # pyright: ignore[reportMissingImports]

            pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), path)
        else:
            import zstandard  # pyright: ignore[reportMissingImports]

            path.write_bytes(zstandard.compress(b'{"text": "one"}\n{"text": "two"}'))
    except ImportError:
        path.write_bytes(b"")
    else:
        folder = pack(tmp_path / "packed", Files((str(path),)), tokenizer())
        found = {text for _, text in corpus.sample_documents(folder, tokenizer(), "train")}
        assert found == {"one", "two"}
    for name in ("zstandard", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ValueError, match=rf"x{end}'; allowed: any, once the package `{package}` is installed.*data"
    ):
        pack(tmp_path / "refused", Files((str(path),)), tokenizer())


def test_a_dataset_of_the_hub_is_streamed(tmp_path, monkeypatch):
    calls = []

    def load_dataset(*words, **more):
        calls.append((words, more))
        return ({"body": f"value {i}"} for i in range(5))

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    folder = pack(tmp_path / "packed", HubStream("org/set:small", "half", "body"), tokenizer())
    assert calls == [(("org/set", "small"), {"split": "half", "streaming": True})]
    found = {text for _, text in corpus.sample_documents(folder, tokenizer(), "train")}
    assert found == {f"value {i}" for i in range(5)}
    with pytest.raises(ValueError, match="field is 'text'; allowed: body"):
        pack(tmp_path / "refused", HubStream("org/set"), tokenizer())


def test_a_long_text_is_cut_behind_lines_and_ends_once(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LONGEST_TEXT", 100)
    lines = [f"{i} {i + 1} {i + 2}" for i in range(FIRST, FIRST + 900, 3)]
    (tmp_path / "long.txt").write_text("\n".join(lines))
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "\n".join(lines)}))
    folders = [
        pack(tmp_path / f"p{i}", Files((f"{tmp_path}/long.{end}",))) for i, end in enumerate(("txt", "jsonl"))
    ]
    files = content(folders[0])
    assert files["train-00000.tokens"] == content(folders[1])["train-00000.tokens"]
    tokens = np.frombuffer(files["train-00000.tokens"], "<u2")
    assert tokens[:-1].tolist() == list(range(FIRST, FIRST + 900)) and tokens[-1] == Numbers.eos
    index = np.frombuffer(files["train-00000.index"], "<i8")
    assert len(index) > 30 and (np.diff(index) % 3 == 0)[:-1].all()
    # No end of text completes a canvas inside the text; a part loses what is left behind its last whole canvas.
    for batch in take(rows_of(folders[0], infill=0.0), 30):
        ends = np.flatnonzero(batch.tokens == Numbers.eos)
        assert set(batch.tokens.ravel()[ends - 1]) <= {FIRST + 899, Numbers.eos}


# --- packing


def test_the_files_do_not_depend_on_the_number_of_workers(tmp_path):
    lines = (json.dumps({"text": f"value {i} print(x{i})" * 20}) for i in range(60))
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    reader, tok = Files((f"{tmp_path}/t.jsonl",)), tokenizer()
    one, two = (pack(tmp_path / f"p{n}", reader, tok, workers=n, held_out=0.2) for n in (1, 2))
    assert content(one) == content(two) and len(content(one)) > 8


KILLED = """
import os, signal, sys
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.training.data import shard_writer
from mercury_jax.training.data.documents import Files

shard_writer.BATCH, calls = 2000, []

def kill(read):
    calls.append(read)
    if len(calls) == 12:
        os.kill(os.getpid(), signal.SIGKILL)

source, model, out = sys.argv[1:]
shard_writer.pack(Files((source,)), Tokenizer.load(model), out, shard_tokens=1500, held_out=0.2, progress=kill)
"""


def test_a_killed_pack_goes_on_and_ends_with_the_same_files(tmp_path):
    class Counting(Numbers):
        calls = 0

        def encode(self, text):
            Counting.calls += 1
            return tokenizer().encode(text)

    tok = Counting()
    tok.proto, tok.fingerprint, tok.vocab_size = (
        getattr(tokenizer(), n) for n in ("proto", "fingerprint", "vocab_size")
    )
    path, model = tmp_path / "t.jsonl", tmp_path / "tokenizer.model"
    path.write_text("\n".join(json.dumps({"text": f"value {i} print(x{i})" * 20}) for i in range(90)))
    tokenizer().save(model)
    whole = pack(tmp_path / "whole", Files((str(path),)), tok, held_out=0.2)
    calls, Counting.calls = Counting.calls, 0
    root = str(Path(__file__).parents[2])
    killed = subprocess.run([sys.executable, "-c", KILLED, path, model, tmp_path / "killed"], cwd=root)
    assert killed.returncode == -signal.SIGKILL
    left = content(tmp_path / "killed")
    assert "progress-00000.json" in left and "manifest.json" not in left
    with pytest.raises(ValueError, match=r"has completed; this one has no manifest\.json"):
        rows_of(str(tmp_path / "killed"))
    with pytest.raises(ValueError, match=r"held_out is 0\.1; allowed: 0\.2, as in the unfinished pack"):
        pack(tmp_path / "killed", Files((str(path),)), tok, held_out=0.1)
    pack(tmp_path / "killed", Files((str(path),)), tok, held_out=0.2)
    assert 0 < Counting.calls < calls  # complete shards were not tokenised again
    assert content(tmp_path / "killed") == content(whole)


def test_a_complete_pack_is_left_as_it_is(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"text": "21 22"}')
    reader, folder = Files((f"{tmp_path}/one.jsonl",)), tmp_path / "packed"
    first, before = pack(folder, reader), content(folder)
    assert pack(folder, reader) == first and content(folder) == before
    with pytest.raises(ValueError, match=r"held_out is 0\.5; allowed: 0\.0, as in the complete pack of"):
        pack(folder, reader, held_out=0.5)
    (tmp_path / "one.jsonl").write_text('{"text": "21 23"}')
    with pytest.raises(ValueError, match="source is .*as in the complete pack of"):
        pack(folder, reader)


def test_a_pack_that_lost_a_file_is_not_taken_for_complete(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"text": "21 22"}')
    reader, folder = Files((f"{tmp_path}/one.jsonl",)), tmp_path / "packed"
    pack(folder, reader)
    next(folder.glob("train-*.tokens")).unlink()
    with pytest.raises(ValueError, match="damaged"):
        pack(folder, reader)


def test_what_cannot_be_packed_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "one.jsonl").write_text('{"text": "21 22"}')
    (tmp_path / "broken.jsonl").write_bytes(b'{"text": "21"}\n{"text": "\xff"}\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "21"}' * 99)[:-9])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    read = lambda name: Files((f"{tmp_path}/{name}",))
    for name, reader, more, message in (
        ("a", read("none*"), {}, "finds at least one file"),
        ("b", read("empty.txt"), {}, "at least one document; this one is empty"),
        ("c", read("latin.txt"), {}, r"latin\.txt'; allowed: UTF-8 text"),
        ("g", read("broken.jsonl"), {}, r"broken\.jsonl:2: not JSON"),
        ("d", read("cut.jsonl.gz"), {}, r"cut\.jsonl\.gz'; allowed: a file that can be read"),
        ("full", read("one.jsonl"), {}, "out is .*full'; allowed: a new or empty folder"),
        ("e", read("one.jsonl"), {"held_out": 0.9999999}, "a share that leaves some"),
        ("f", read("one.jsonl"), {"held_out": 1}, "held_out is 1"),
        ("h", Files((f"{tmp_path}/latin.txt",), chats=True), {}, r"latin\.txt:1: not JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            pack(tmp_path / name, reader, **more)
    monkeypatch.setattr(documents, "LONGEST_LINE", 5)
    with pytest.raises(ValueError, match=r"one\.jsonl:1 is '6 bytes or more'; allowed: lines up to 5"):
        pack(tmp_path / "i", read("one.jsonl"))


# --- opening


def test_another_tokenizer_is_refused(texts):
    other = Numbers()
    other.fingerprint = "others"
    with pytest.raises(ValueError, match="tokenizer is 'others'; allowed: numbers, with which"):
        data.build(data.mixture((data.shards(texts), 1)), other, row_layout(), rows=1, row=90, seed=0)


def test_a_damaged_shard_is_refused_by_name(texts):
    folder, name = Path(texts), "train-00001"
    whole = {end: (folder / f"{name}{end}").read_bytes() for end in (".tokens", ".index")}
    for end, kept in whole.items():
        (folder / f"{name}{end}").write_bytes(kept[:-2])
        with pytest.raises(
            ValueError, match=rf"size of .*{name}\{end} is {len(kept) - 2}; allowed: {len(kept)}"
        ):
            rows_of(texts)
        (folder / f"{name}{end}").unlink()
        with pytest.raises(ValueError, match=rf"size of .*{name}\{end} is None"):
            rows_of(texts)
        (folder / f"{name}{end}").write_bytes(kept)
    (folder / f"{name}.index").write_bytes(whole[".index"][8:] + bytes(8))
    with pytest.raises(ValueError, match=rf"{name}\.index: first and last is .*damaged"):
        take(rows_of(texts), 50)


def test_folders_that_are_no_corpus_are_refused(texts, tmp_path):
    with pytest.raises(ValueError, match=r"shards is .*none'; allowed: a folder that `mercury data pack`"):
        rows_of(str(tmp_path / "none"))
    manifest = Path(texts) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(
        ValueError, match=r"manifest\.json: format and version is \('mercury_jax shards', 2\)"
    ):
        rows_of(texts)
    manifest.write_text("{")
    with pytest.raises(ValueError, match=r"whose manifest\.json can be read"):
        rows_of(texts)


@pytest.mark.parametrize(
    "setting, message",
    [({"chunk": 15}, r"chunk is 15; allowed: 16\.\.\d+"), ({"chunk": 99}, r"chunk is 99; allowed: 16\.\.\d+"),
     ({"row": 14}, "row is 14; allowed: 15 or more")],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(texts, setting, message):
    with pytest.raises(ValueError, match=message):
        rows_of(texts, **setting)


def test_chats_are_neither_cut_nor_infilled_nor_too_long_for_a_row(chats):
    for name, value in (("chunk", 32), ("infill", 0.5)):
        with pytest.raises(ValueError, match=rf"{name} is {value}; allowed: None: .*chats"):
            laid_out(data.shards(chats, **{name: value}), tokenizer(), 1)
    direct = data.chat(f"{chats}.jsonl").open(settings(256))
    assert direct is not None
    longest = max(len(direct.at(i).tokens) for i in range(60))
    assert data.shards(chats).open(settings(longest)) is not None
    with pytest.raises(ValueError, match=rf"row is {longest - 1}; allowed: {longest} positions"):
        data.shards(chats).open(settings(longest - 1))


def settings(row, tok=None, laid_out_by=None):
    return packing.StreamSettings(tok or tokenizer(), laid_out_by or layout(), row, (0, 0), "train")


def test_a_layout_of_single_documents_is_refused(texts):
    with pytest.raises(ValueError, match=r"layout is .*; allowed: `Model\.layout`"):
        data.build(data.mixture((data.shards(texts), 1)), Numbers(), layout(), rows=1, row=90, seed=0)


def test_texts_come_back_for_a_tokenizer(tmp_path):
    words = [f"value {i}" for i in range(30)]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in words))
    folder = pack(tmp_path / "packed", Files((f"{tmp_path}/t.jsonl",)), tokenizer())
    assert sorted(data.texts(data.mixture((data.shards(folder), 1)), 10_000)) == sorted(words)
