"""The laws of the pipeline: splits do not overlap, and a state goes on exactly where it was taken."""

import dataclasses
import hashlib
import json
import subprocess
import sys
import types

import numpy as np
import pytest

from mercury_jax import hub, models
from mercury_jax.config import ModelConfig
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.training import data
from mercury_jax.training.data import packing, sources
from mercury_jax.training.recipe import load_recipe
from tests.training.tiny_data import (
    Bytes,
    Runs,
    assert_same,
    build,
    conversation,
    owners,
    take,
)

# --- the pipeline


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_restored_state_goes_on_exactly_with_rows_open(mixed, prefetch):
    run = build(mixed, prefetch=prefetch)
    take(run, 5)
    state = json.dumps(run.get_state())
    assert sum(len(refs) for row in json.loads(state)["rows"].values() for refs in row["open"]) > 4
    after = take(run, 6)
    fresh = build(mixed, prefetch=prefetch)
    fresh.set_state(json.loads(state))
    assert json.dumps(fresh.get_state()) == state
    assert_same(take(fresh, 6), after)
    run.set_state(json.loads(state))  # and in place
    assert_same(take(run, 6), after)


def test_a_state_of_other_data_is_refused_by_what_differs(mixed):
    state = build(mixed, prefetch=0).get_state()
    with pytest.raises(ValueError, match="the tokenizer is another one"):
        build(mixed, prefetch=0).set_state(state | {"data": state["data"] | {"tokenizer": 7}})
    for other, words in ((dict(seed=4), "seed is 4; allowed: 3"), (dict(rows=2), "batch is 2; allowed: 4")):
        with pytest.raises(ValueError, match=f"{words}, as in the checkpoint to resume"):
            build(mixed, prefetch=0, **other).set_state(state)


def test_a_state_of_an_earlier_version_goes_on_without_later_fields_and_with_shorter_documents(mixed):
    run = build(mixed, pattern="bidirectional", prefetch=0)
    take(run, 5)
    state = json.loads(json.dumps(run.get_state()))
    del state["data"]["blocks"], state["data"]["sources"][1]["bad_lines"]
    for row in state["rows"].values():  # all in one row, which is overfull
        row["open"] = [[ref for refs in row["open"] for ref in refs]]
    run.set_state(state)
    assert all(batch.tokens.shape == (4, 128) for batch in take(run, 20))
    state["data"]["tokenizer"] = 7
    state["data"]["sources"][0]["content"] = "other"
    with pytest.raises(ValueError, match="the tokenizer is another one"):
        run.set_state(state)


@pytest.mark.parametrize("kind", ["text", "jsonl", "chat"])
def test_data_are_known_by_their_content_wherever_they_are(tmp_path, monkeypatch, kind):
    lines = [conversation(f"q{i}", f"answer {i}") if kind == "chat" else json.dumps({"text": f"word {i} " * 9})
             for i in range(6)]  # fmt: skip
    (tmp_path / "s1").mkdir()
    (tmp_path / "s1/a.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    source = getattr(data, kind)
    of = lambda where, **more: build(data.mixture((source(where, **more), 1.0)), prefetch=0)
    first = of("s1/*.jsonl")
    take(first, 3)
    state = json.loads(json.dumps(first.get_state()))
    wanted = take(first, 3)
    (tmp_path / "s1").rename(tmp_path / "s2")
    for where in ("s2/*.jsonl", "./s2/a.jsonl", f"{tmp_path}/s2/a.jsonl"):
        moved = of(where)
        moved.set_state(state)
        assert_same(take(moved, 3), wanted)
    if kind != "text":  # one document, which is not divided
        with pytest.raises(
            ValueError, match=r"held_out \(data, source 1: s2/\*.jsonl\) is 0.2; allowed: 0.0, as in"
        ):
            of("s2/*.jsonl", held_out=0.2).set_state(state)
    changed = [line.replace("3", "7") for line in lines]
    (tmp_path / "s2/a.jsonl").write_text("\n".join(changed))
    with pytest.raises(ValueError, match="source 1: s2/a.jsonl has other content than in the checkpoint"):
        of("s2/a.jsonl").set_state(state)


def test_the_seed_decides(mixed):
    first = take(build(mixed, prefetch=0), 4)
    assert_same(first, take(build(mixed, prefetch=0), 4))
    other = take(build(mixed, prefetch=0, seed=4), 4)
    assert any((a.tokens != b.tokens).any() for a, b in zip(first, other))


def test_the_problems_of_the_embedded_model_are_the_ones_that_its_recipe_draws():
    """Bit for bit: another order, cut, problem or packing would be another data set under the same seed."""
    config = load_recipe("nano")
    problems = data.mixture(*(pair for pair in config.mixture.sources if isinstance(pair[0], data.Generated)))
    tokenizer, model = Tokenizer.load(hub.NANO / "tokenizer.model"), models.build(config.model)
    run = data.build(problems, tokenizer, model.layout, rows=config.batch, row=config.row, seed=0, prefetch=0)
    digest = hashlib.blake2b(digest_size=8)
    for batch in take(run, 3):
        for array in batch:
            digest.update(np.ascontiguousarray(array).tobytes())
    assert digest.hexdigest() == "b92c439762b0666e"


def test_weights_are_shares_of_the_positions(mixed):
    run = build(mixed, prefetch=0)
    take(run, 40)
    given = np.array([row["positions"] for row in run.get_state()["rows"].values()]).sum(0)
    np.testing.assert_allclose(given / given.sum(), [0.5, 0.2, 0.3], atol=0.03)


@pytest.mark.parametrize("split", ["train", "test"])
def test_any_number_of_processes_makes_the_batches_of_one(split, many):
    mixture = data.mixture((data.jsonl(many, held_out=0.3), 0.5), (data.generated("add2"), 0.5))
    setting = {"split": split, "prefetch": 0}
    whole = take(build(mixture, **setting), 6)
    for count in (2, 4):
        parts = [take(build(mixture, index=i, count=count, **setting), 6) for i in range(count)]
        joined = [type(a)(*map(np.concatenate, zip(*rows))) for a, rows in zip(whole, zip(*parts))]
        assert_same(joined, whole)


def test_a_state_of_one_process_goes_on_in_two_and_back(mixed):
    one = build(mixed, prefetch=0)
    take(one, 3)
    state = one.get_state()
    after = take(one, 4)
    two = [build(mixed, index=i, count=2, prefetch=0) for i in range(2)]
    for part in two:
        part.set_state(state)
    parts = [take(part, 2) for part in two]
    assert_same([type(a)(*map(np.concatenate, zip(*rows))) for a, rows in zip(after, zip(*parts))], after[:2])
    states = [part.get_state() for part in two]
    back = build(mixed, prefetch=0)
    with pytest.raises(
        ValueError, match=r"state\.rows is \[0, 1\]; allowed: all of this process's, \[2, 3\] too"
    ):
        back.set_state(states[0])
    back.set_state({**states[0], "rows": states[0]["rows"] | states[1]["rows"]})
    assert_same(take(back, 2), after[2:])


def test_rows_read_different_documents(tmp_path):
    lines = [json.dumps({"text": f"{name} {name % 90 + 1}"}) for name in range(900)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    mixture = data.mixture((data.jsonl(f"{tmp_path}/many.jsonl"), 1))
    run = build(mixture, Runs(), rows=3, row=256, prefetch=0)
    seen: list[set[int]] = [set(), set(), set()]
    while (
        min(row["next"][0] for row in run.get_state()["rows"].values()) < 250
    ):  # of an epoch of 300 for each
        for names, tokens in zip(seen, next(run).tokens):
            names |= set(owners(tokens)) - {-1}
    assert all(seen[i].isdisjoint(seen[j]) for i in range(3) for j in range(i))
    assert all(len(names) > 150 for names in seen)


@dataclasses.dataclass(frozen=True)
class Alphabet:
    """A source of a user: the letters from a to `last`, backwards."""

    last: str = "z"

    def open(self, settings):
        letters = "".join(map(chr, range(ord(self.last), ord("a") - 1, -1)))
        ids = np.array(settings.tokenizer.encode(letters), np.int32)
        laid = packing.lay_out(settings, packing.Example(ids, 0, True), "the alphabet")
        return sources.Stream(lambda index: laid, 1) if settings.split == "train" else None

    def texts(self, seed):
        yield "zyx"


def test_a_source_of_the_users_own_is_used_as_it_is(mixed):
    own = data.mixture((Alphabet("m"), 0.5), *((source, 0.5 * w) for source, w in mixed.sources))
    assert isinstance(Alphabet(), data.DataSource) and "zyx" in list(data.texts(own, 500))
    run = build(own, prefetch=0)
    take(run, 3)
    state = run.get_state()
    after = take(run, 2)
    fresh = build(own, prefetch=0)
    fresh.set_state(state)
    assert_same(take(fresh, 2), after)
    wanted = np.array(Bytes().encode("mlkji"))
    windows = np.lib.stride_tricks.sliding_window_view(after[0].tokens, 5, axis=1)
    assert (windows == wanted).all(-1).any()
    with pytest.raises(ValueError, match="as in the checkpoint to resume"):  # another alphabet is other data
        build(data.mixture((Alphabet("n"), 0.5), *own.sources[1:]), prefetch=0).set_state(state)


# --- splits


def test_held_out_documents_are_never_trained_on(many):
    source = data.jsonl(many, held_out=0.3)
    mixture = data.mixture((source, 1))
    train = take(build(mixture, Runs(), row=256, prefetch=0), 30)
    test = take(build(mixture, Runs(), rows=2, row=256, seed=0, split="test", prefetch=0), 20)
    assert len(test) == 20
    left, right = ({n for b in side for t in b.tokens for n in owners(t)} - {-1} for side in (train, test))
    assert left.isdisjoint(right) and len(left) + len(right) == 90 and 15 < len(right) < 40
    assert_same(test, take(build(mixture, Runs(), rows=2, row=256, seed=0, split="test", prefetch=0), 20))


def test_problems_of_the_two_sides_are_disjoint():
    source = data.generated("add3")
    train, test = (
        {source.problem(i, (0, 0), split).input for i in range(300)} for split in ("train", "test")
    )
    assert train.isdisjoint(test) and len(train) > 290
    few = data.generated("add3", distinct=5)
    assert len({few.problem(i, (0, 0), "train").input for i in range(50)}) <= 5


def test_the_standard_library_is_split_by_file():
    train, test = sources.stdlib_files("train"), sources.stdlib_files("test")
    assert {path for path, _ in train}.isdisjoint(path for path, _ in test)
    size = [sum(len(text.encode()) for _, text in side) for side in (train, test)]
    assert 5e6 < size[0] < 14e6 and 0.02 < size[1] / size[0] < 0.1
    parts = [path.split("/") for path, _ in train + test]
    assert ["argparse.py"] in parts and not [p for p in parts if {"test", "site-packages"} & set(p)]


def test_nothing_held_out_is_said(many):
    with pytest.raises(ValueError, match="holds anything out"):
        build(data.mixture((data.jsonl(many), 1)), Runs(), split="test", prefetch=0)


def test_a_share_of_few_documents_holds_out_one(tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} {n}"}) + "\n" for n in (*range(9), 3)))
    source = data.jsonl(str(path), held_out=1e-6)
    train, test = ({text for _, text in source.documents(split)} for split in ("train", "test"))
    assert len(test) == 1 and train | test == {f"{n} {n}" for n in range(9)} and train.isdisjoint(test)
    assert test <= {text for _, text in data.jsonl(str(path), held_out=0.5).documents("test")}
    path.write_text(json.dumps({"text": "1 2"}) + "\n")
    with pytest.raises(ValueError, match=r"held_out is 1e-06; allowed: 0: .*few.jsonl' holds one document"):
        source.documents("train")


# --- the tokenizer's texts


def test_texts_come_in_proportion_and_within_the_budget(mixed):
    some = list(data.texts(mixed, 9000))
    assert 9000 <= sum(len(t.encode()) for t in some) < 9500
    assert some == list(data.texts(mixed, 9000)) and some != list(data.texts(mixed, 9000, seed=1))
    problem = data.generated("add3").problem(0, (0, 2), "train")
    assert f"{problem.input}\n{problem.output}" in some


# --- refusals


LINES = {
    "list.jsonl": ('{"text": "1 1"}\n[1]\n', r"list\.jsonl:2: a list"),
    "cut.jsonl": ('{"text": "1 1"}\n\n{"text": "1', r"cut\.jsonl:3: not JSON"),
    "field.jsonl": ('{"body": "1 1"}', r"field\.jsonl:1: text is None"),
    "half.jsonl": ('{"text": "\\ud800"}', r"half\.jsonl:1: text .* surrogates"),
    "empty.jsonl": ("\n", r"glob is .*\*\.jsonl'; allowed: files with at least one document"),
    "a.chat": ('{"messages": "hello"}', r"a\.chat:1: messages is 'hello'"),
    "b.chat": ('{"messages": [{"role": "assistant", "content": "a"}]}', "follows another turn"),
    "c.chat": ('{"messages": [{"role": "user", "content": "a"}]}', "follows another turn"),
    "d.chat": (conversation("a", "a").replace("user", "king"), r"d\.chat:1: .*king"),
    "e.chat": (
        conversation("a", "a").replace("content", "text", 1),
        r"e\.chat:1: messages\[0\]\.content is None",
    ),
    "f.chat": (
        conversation("q", "a" * 500),
        r"row is 128; allowed: \d+ positions .* or more, for .*f\.chat:1",
    ),
    "latin.txt": (b"caf\xe9", r"latin\.txt.*UTF-8 text \(byte 3"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_broken_line_is_refused_by_file_and_line(tmp_path, name):
    text, message = LINES[name]
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    kind = {"jsonl": data.jsonl, "chat": data.chat, "txt": data.text}[name.partition(".")[2]]
    with pytest.raises(ValueError, match=message):
        build(data.mixture((kind(f"{tmp_path}/*.{name.partition('.')[2]}"), 1)))


def test_files_that_are_not_there_are_refused_by_name(tmp_path):
    (tmp_path / "gone.md").symlink_to(tmp_path / "nowhere")
    for pattern, message in (
        ("none/*.txt", "finds at least one file"),
        ("gone.md", r"gone\.md.*can be read"),
    ):
        with pytest.raises(ValueError, match=message):
            build(data.mixture((data.text(f"{tmp_path}/{pattern}"), 1)))


ADD3 = (data.generated("add3"), 1)


@pytest.mark.parametrize(
    "make, message",
    [(lambda: data.mixture(), "sources"),
     (lambda: data.mixture((data.stdlib(), 0)), r"weight is 0\.0"),
     (lambda: data.mixture(("stdlib", 1)), "source is 'stdlib'"),  # type: ignore[arg-type]
     (lambda: build(data.mixture((data.stdlib(chunk=200), 1))), r"chunk is 200; allowed: 2\.\.\d+"),
     (lambda: build(data.mixture((data.generated("add99"), 1))), "task is 'add99'; allowed: add4 is the nearest"),
     (lambda: build(data.mixture(ADD3), row=8), "row is 8; .*a problem of add3"),
     (lambda: build(data.mixture(ADD3), index=2, count=2), "index is 2"),
     (lambda: build(data.mixture(ADD3), count=3), "rows is 4; allowed: a multiple of 3")],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


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
        with pytest.raises(ValueError, match=rf"model\.{name} is 9"):
            data.check_fit(Bytes(), dataclasses.replace(fits, **{name: 9 if name != "vocab" else 99}))


def test_a_mixture_is_plain_data(mixed):
    assert hash(mixed) == hash(dataclasses.replace(mixed))
    assert json.loads(json.dumps(dataclasses.asdict(mixed)))["sources"][2][0]["name"] == "add3"


@pytest.mark.long
def test_a_script_that_keeps_an_iterator_ends_without_an_exception(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("def f(x):\n    return x\n" * 300)
    script = f"""
import mercury_jax as mj
from mercury_jax.training import data
lm = mj.load()
mixture = data.mixture((data.text({str(path)!r}), 1.0))
batches = data.build(mixture, lm.tokenizer, lm.model.layout, rows=2, row=64, seed=0)
print(next(batches).tokens.shape)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("(2, 64)\n", "")
