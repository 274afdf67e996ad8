"""Between a grammar and the device: what a constrained row commits to an open canvas, and what such a row draws."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.decode.constrained import CommittedTokens, ConstrainedRow, _write_row, no_tokens
from mercury_jax.decode.denoise import sample_front
from mercury_jax.decode.grammar import Choice, JSONSchema, compile
from mercury_jax.decode.sampler import propose
from mercury_jax.decode.state import Limits, Records
from tests.decode.grammar_many import nano_tokenizer
from tests.decode.views import MASK, view

TOK, EOS = nano_tokenizer(), 3
WIDTH, LENGTH = 6, 4  # of a canvas, and where it begins


def amended(tokens=(), front=4, clear=False, ended=False, step=2, mask=MASK, block=WIDTH):
    """A row of 16 places after a write; its canvas was one held token, then masks and the drafts 51 and 52."""
    config = SimpleNamespace(width=WIDTH, block=block, corruption=SimpleNamespace(mask=mask))
    canvas = jnp.array([44, MASK, 51, MASK, 52, MASK])
    row = SimpleNamespace(
        tokens=jnp.arange(100, 116), canvas=canvas, answer=canvas, frozen=jnp.array([True] + [False] * 5),
        cache_length=jnp.asarray(LENGTH), committed=jnp.asarray(LENGTH), step=jnp.asarray(step),
        done=jnp.asarray(False), limits=Limits(jnp.asarray(14), jnp.asarray(14), jnp.asarray(0)),
        records=Records(jnp.asarray(0), jnp.asarray(-1), (), ()),
    )  # fmt: skip
    padded = jnp.asarray([*tokens, *[0] * (WIDTH - len(tokens))])
    change = CommittedTokens(
        padded, jnp.asarray(front), jnp.asarray(len(tokens)), jnp.asarray(clear), jnp.asarray(ended)
    )
    new = jax.device_get(_write_row(config, row, change, jnp.asarray(EOS)))  # type: ignore[arg-type]
    return SimpleNamespace(**new), row


@pytest.mark.long
def test_nothing_to_write_changes_no_tokens():
    new, row = amended()
    for name, value in vars(new).items():
        np.testing.assert_array_equal(value, getattr(row, name))


def test_accepted_tokens_are_text_and_held_and_the_block_stays_open():
    new, row = amended([61, 62], front=5)
    assert (
        new.canvas.tolist() == [44, 61, 62, MASK, 52, MASK]
        and new.frozen.tolist() == [True] * 3 + [False] * 3
    )
    assert new.tokens[5:7].tolist() == [61, 62] and (new.committed, new.step, new.done) == (4, 2, False)
    assert np.delete(new.tokens, [5, 6]).tolist() == np.delete(np.asarray(row.tokens), [5, 6]).tolist()


def test_what_does_not_fit_becomes_noise_again_and_what_is_held_does_not():
    new, _ = amended([61], front=5, clear=True)
    assert new.canvas.tolist() == [44, 61, MASK, MASK, MASK, MASK]


@pytest.mark.parametrize("tokens, block", [([61, 62, 63, 64, 65], 6), ([61, 62], 3)])
def test_a_full_block_is_known_and_closed(tokens, block):
    new, _ = amended(tokens, front=5, block=block)
    assert (new.committed, new.step, new.limits.end, new.done) == (5 + len(tokens), -1, 14, False)


def test_where_no_canvas_is_open_what_is_accepted_is_known_at_once():
    new, _ = amended([61, 62], front=4, step=-1)
    assert (new.committed, new.step) == (6, -1) and new.tokens[4:6].tolist() == [61, 62]


def test_an_answer_that_ends_has_its_end_behind_it():
    new, _ = amended([61], front=5, ended=True)
    assert (new.committed, new.limits.end, new.done) == (6, 6, True) and new.tokens[5:7].tolist() == [61, EOS]
    new, _ = amended([], front=5, ended=True)
    assert (new.committed, new.limits.end, new.done) == (5, 5, True) and new.tokens[5] == EOS


@pytest.mark.parametrize("gated", [True, False])
def test_the_front_of_a_gated_row_is_drawn_though_its_rule_waits(gated):
    v = view([0.1, 0.2, 0.3, 0.9], [False, True, True, True])
    waits = propose(
        v, v.canvas.at[3].set(3), jnp.array([8, 7, 7, 3])
    )  # the rule settles the last place alone
    new = sample_front(v, waits, jnp.asarray(gated))
    assert new.canvas.tolist() == ([8, 1, MASK, 3] if gated else [8, MASK, MASK, 3])
    assert new.answer.tolist() == ([8, 1, 7, 3] if gated else [8, 7, 7, 3])


def gate(spec, budget=60):
    row = ConstrainedRow(compile(TOK, spec).walk(budget))
    assert not row.begun and not row.pending
    row.begin(10)
    return row


def test_what_does_not_fit_into_one_write_waits_for_the_next():
    row = gate(Choice(["for value in range(count): total"]))
    written, fronts = [], []
    while row.pending:
        change = no_tokens(2, 4)
        row.write(change, 1)
        written += change.tokens[1, : int(change.used[1])].tolist()
        fronts.append(int(change.start[1]))
        assert change.used[0] == 0 and bool(change.ended[1]) == (len(written) == len(row.committed))
    assert row.ended and written == row.committed and fronts == list(range(10, 10 + len(written), 4))


def test_a_gate_looks_from_its_front_on_and_only_where_it_has_begun():
    row = ConstrainedRow(compile(TOK, JSONSchema({"type": "integer"})).walk(5))
    row.propose(10, TOK.encode("12"), [True, True])
    assert not row.begun and not row.pending
    row.begin(12)
    digits = TOK.encode("1234567")
    row.propose(10, digits, [True] * len(digits))  # two places before its front
    assert TOK.decode(row.committed) == TOK.decode(digits[2:]) and row.frontier == 12 + len(row.committed)


def test_a_text_that_the_budget_cuts_off_fills_its_row_without_an_end():
    row = gate(JSONSchema({"type": "integer"}), budget=3)
    digits = TOK.encode("9")[-1:] * 6
    row.propose(10, digits, [True] * 6)
    change = no_tokens(1, 8)
    row.write(change, 0)
    assert row.ended and int(change.used[0]) == 3 and not change.ended[0] and not row.pending
