"""The public decoder is a JAX function like any other: under every transform its tokens are those of `mj.sample`."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportAttributeAccessIssue=false

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mercury_jax as mj
from mercury_jax.decode.token_stats import LogprobBuffer
from tests.marks import slow_except
from tests.tiny import tiny

PROMPTS = np.array([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12], [5, 5, 5, 5, 6], [7, 7, 7, 8, 9]])
SEED, NEW, SLOTS = 3, 12, 17
SAMPLER = mj.Sampler(mj.rules.threshold(0.5), temperature=1.0)
KEYS = jax.vmap(jax.random.key)(SEED + jnp.arange(4))
PATTERNS = ["bidirectional", "block_causal", "causal_encoder"]


@functools.cache
def expected(pattern="block_causal"):
    return tokens(mj.sample(tiny(pattern), PROMPTS, max_tokens=NEW, seed=SEED, sampler=SAMPLER).tokens)


def tokens(rows):
    return [np.asarray(row).tolist() for row in rows]


def rows_of(answer):
    ids, lengths = jax.tree.map(np.asarray, answer)
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


def make(pattern="block_causal", sampler=SAMPLER, **options):
    """A decoder, and the function of (params, ids, keys) that decodes from the start to the end."""
    decoder = mj.decoder(tiny(pattern), sampler, slots=SLOTS, **options)

    def decode(params, ids, keys):
        state = decoder.init(params, ids, max_tokens=NEW, key=keys)
        return decoder.answer(decoder.run(params, state))

    return decoder, decode


def params(pattern="block_causal"):
    return tiny(pattern).params


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_under_jit_it_decodes_what_sample_does(pattern):
    _, decode = make(pattern)
    assert rows_of(jax.jit(decode)(params(pattern), PROMPTS, KEYS)) == expected(pattern)


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_a_scan_over_more_passes_than_it_needs_changes_nothing(pattern):
    decoder, _ = make(pattern)

    @jax.jit
    def decode(params):
        state = decoder.init(params, PROMPTS, max_tokens=NEW, key=KEYS)
        state, frames = decoder.run(params, state, 40)
        return decoder.answer(state), frames

    answer, frames = decode(params(pattern))
    assert rows_of(answer) == expected(pattern)
    assert (
        frames.answer.shape[:2] == (40, 4) and bool(frames.done[-1].all()) and not bool(frames.done[0].any())
    )
    assert int(frames.used[-1].sum()) == 0  # rows that are done show nothing


def test_step_by_step_in_a_loop_of_the_users_own():
    decoder, _ = make()

    @jax.jit
    def decode(params):
        state = decoder.init(params, PROMPTS, max_tokens=NEW, key=KEYS)
        unfinished = lambda state: ~jnp.all(state.done)
        return decoder.answer(jax.lax.while_loop(unfinished, lambda s: decoder.step(params, s)[0], state))

    assert rows_of(decode(params())) == expected()


@pytest.mark.long
def test_some_passes_and_then_the_rest():
    decoder, _ = make()

    @jax.jit
    def decode(params):
        state = decoder.init(params, PROMPTS, max_tokens=NEW, key=KEYS)
        state, _ = decoder.run(params, state, passes=3)
        early = decoder.answer(state)
        return early, decoder.answer(decoder.run(params, state))

    early, late = decode(params())
    assert rows_of(late) == expected()
    assert all(a == b[: len(a)] and len(a) < len(b) for a, b in zip(rows_of(early), expected(), strict=True))


@pytest.mark.long
def test_vmap_over_prompts_and_keys():
    _, decode = make()
    one = lambda ids, key: jax.tree.map(lambda x: x[0], decode(params(), ids[None], key[None]))
    assert rows_of(jax.jit(jax.vmap(one))(PROMPTS, KEYS)) == expected()


@pytest.mark.long
def test_vmap_over_stacked_parameters():
    _, decode = make()
    stacked = jax.tree.map(lambda x: jnp.stack([0.9 * x, x]), params())
    answers = jax.jit(jax.vmap(decode, in_axes=(0, None, None)))(stacked, PROMPTS, KEYS)
    other, same = (rows_of(jax.tree.map(lambda x, i=i: x[i], answers)) for i in range(2))
    assert same == expected() and other != same


@pytest.mark.long
def test_vmap_over_a_parameter_of_the_rule():
    def forwards(p):
        decoder, _ = make(sampler=mj.rules.threshold(p))
        state = decoder.init(params(), PROMPTS, max_tokens=NEW, key=KEYS)
        state = decoder.run(params(), state)
        return decoder.answer(state), state.nfe

    (ids, lengths), nfe = jax.jit(jax.vmap(forwards))(jnp.asarray([0.05, 0.9]))
    for i, p in enumerate((0.05, 0.9)):
        out = mj.sample(
            tiny("block_causal"), PROMPTS, max_tokens=NEW, seed=SEED, sampler=mj.rules.threshold(p)
        )
        assert (
            rows_of((ids[i], lengths[i])) == tokens(out.tokens) and nfe[i].tolist() == out.forwards.tolist()
        )
    assert nfe[0].sum() < nfe[1].sum()


@pytest.mark.long
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_grad_of_a_scan_is_the_slope_of_the_log_probabilities(pattern):
    decoder, _ = make(pattern, mj.rules.confidence(), logprobs=0)

    def total(params):
        state = decoder.init(params, PROMPTS, max_tokens=NEW, key=KEYS)
        state, _ = decoder.run(params, state, passes=6)
        return state.logprobs.chosen.sum()

    total, here = jax.jit(jax.value_and_grad(total)), params(pattern)
    _, slope = total(here)
    size = float(jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(slope))))
    step = 1e-4  # along the slope; so small that no choice changes, of a token or of a position
    ahead, behind = (
        float(total(jax.tree.map(lambda p, g, way=way: p + way * step / size * g, here, slope))[0])
        for way in (1, -1)
    )
    assert size > 1 and abs((ahead - behind) / (2 * step) - size) < 0.05 * size


@pytest.mark.long
def test_log_probabilities_in_the_state_are_those_of_sample():
    decoder, _ = make(logprobs=2)

    @jax.jit
    def decode(params):
        return decoder.run(params, decoder.init(params, PROMPTS, max_tokens=NEW, key=KEYS)).logprobs

    kept: LogprobBuffer = jax.device_get(decode(params()))
    out = mj.sample(tiny("block_causal"), PROMPTS, max_tokens=NEW, seed=SEED, sampler=SAMPLER, logprobs=2)
    for i, (row, n) in enumerate(zip(out.logprobs or (), out.lengths, strict=True)):
        np.testing.assert_allclose(kept.chosen[i, 5 : 5 + n], row.tokens, atol=1e-5)
        np.testing.assert_array_equal(kept.top_ids[i, 5 : 5 + n], row.top_ids)


@pytest.mark.long
def test_rows_of_several_lengths_and_budgets_decode_as_alone():
    decoder, _ = make()
    lengths, most = np.array([5, 3, 1, 4]), np.array([12, 2, 7, 9])

    @jax.jit
    def decode(params, lengths, most):
        state = decoder.init(params, PROMPTS, lengths, max_tokens=most, key=KEYS)
        return decoder.answer(decoder.run(params, state))

    for i, row in enumerate(rows_of(decode(params(), lengths, most))):
        prompt = PROMPTS[i, : lengths[i]].tolist()
        alone = mj.sample(
            tiny("block_causal"), prompt, max_tokens=int(most[i]), seed=SEED + i, sampler=SAMPLER
        )
        assert row == tokens(alone.tokens)[0]


def test_unknown_tokens_of_a_prompt_are_filled_in():
    lm = tiny("bidirectional")
    decoder, _ = make("bidirectional", mj.rules.confidence())
    given = np.array([[True, False, False, True, True]] * 4)

    @jax.jit
    def decode(params):
        state = decoder.init(params, PROMPTS, key=KEYS, given=given)
        state = decoder.run(params, state)
        return state.tokens, decoder.answer(state)

    whole, answer = decode(lm.params)
    for i, (row, filled) in enumerate(zip(np.asarray(whole), rows_of(answer), strict=True)):
        assert row[:5][given[i]].tolist() == PROMPTS[i][given[i]].tolist()
        assert lm.corruption.mask not in row[:5].tolist() and filled == row[1:5].tolist()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("axes", slow_except(["Auto", "default"], "default"))
@pytest.mark.parametrize("form", ["shard_map", "sharded prompts", "set_mesh"])
def test_over_four_devices(axes, form):
    kinds = {"axis_types": (AxisType.Auto,)} if axes == "Auto" else {}
    mesh = jax.make_mesh((4,), ("data",), **kinds)
    _, decode = make()
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    given = (
        jax.device_put(params(), whole),
        jax.device_put(jnp.asarray(PROMPTS), rows),
        jax.device_put(KEYS, rows),
    )
    if form == "shard_map":
        specs = (P(), P("data"), P("data"))
        decode = jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=P("data"))
    if form == "set_mesh":
        with jax.set_mesh(mesh):
            assert rows_of(jax.jit(decode)(*given)) == expected()
            out = mj.sample(tiny("block_causal"), PROMPTS, max_tokens=NEW, seed=SEED, sampler=SAMPLER)
            assert tokens(out.tokens) == expected()
    else:
        assert rows_of(jax.jit(decode)(*given)) == expected()


@pytest.mark.long
def test_sample_and_stream_take_the_mesh_that_jax_makes():
    how: dict[str, Any] = dict(
        max_tokens=NEW, seed=SEED, sampler=SAMPLER, mesh=jax.make_mesh((4,), ("data",))
    )
    out = mj.sample(tiny("block_causal"), PROMPTS, **how)
    assert tokens(out.tokens) == expected()
    last = {moment.row: moment for moment in mj.stream(tiny("block_causal"), PROMPTS, **how)}
    assert [last[row].text for row in range(len(PROMPTS))] == out.texts


def test_a_model_is_a_tree_of_its_parameters():
    lm = tiny("block_causal")
    _, decode = make()
    assert len(jax.tree.leaves(lm)) == len(jax.tree.leaves(lm.params))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(lm)]
    assert all(path.startswith(".params") for path in paths)
    run = jax.jit(chex.assert_max_traces(lambda lm: decode(lm.params, PROMPTS, KEYS), n=1))
    assert rows_of(run(lm)) == expected()
    other = jax.tree.map(lambda x: 0.9 * x, lm)  # the same program serves other parameters
    assert isinstance(other, mj.LM) and other.tokenizer is lm.tokenizer and rows_of(run(other)) != expected()


def test_one_program_for_other_keys_lengths_budgets_parameters_and_thresholds():
    def decode(params, ids, lengths, most, p, key):
        decoder = mj.decoder(tiny("block_causal"), mj.rules.threshold(p), slots=SLOTS)
        state = decoder.init(params, ids, lengths, max_tokens=most, key=key)
        return decoder.answer(decoder.run(params, state))

    run = jax.jit(chex.assert_max_traces(decode, n=1))
    for i in range(3):
        few = np.minimum(PROMPTS + i, 300), np.full(4, 5 - i), np.full(4, 12 - i)
        run(jax.tree.map(lambda x, i=i: (1 - 0.1 * i) * x, params()), *few, 0.9 - 0.2 * i, jax.random.key(i))


def test_forked_rows_differ_from_then_on():
    decoder, _ = make()

    @jax.jit
    def decode(params, rows, key):
        state = decoder.init(params, PROMPTS, max_tokens=NEW, key=KEYS)
        return decoder.answer(decoder.run(params, decoder.fork(state, rows, key)))

    forked = rows_of(decode(params(), np.zeros(8, int), jax.random.key(0)))
    assert len(set(map(tuple, forked))) == 8
    again = rows_of(decode(params(), np.zeros(8, int), jax.random.key(0)))
    other = rows_of(decode(params(), np.zeros(8, int), jax.random.key(1)))
    assert forked == again != other


@pytest.mark.long
def test_a_fork_keeps_what_a_row_has_decided():
    decoder, _ = make(sampler=mj.rules.threshold(0.5))

    @jax.jit
    def decode(params):
        state, _ = decoder.run(params, decoder.init(params, PROMPTS, max_tokens=NEW, key=KEYS), passes=4)
        state = decoder.fork(state, jnp.array([2, 2, 0]), jax.random.key(5))
        return decoder.answer(decoder.run(params, state))

    greedy = mj.sample(
        tiny("block_causal"), PROMPTS, max_tokens=NEW, seed=SEED, sampler=mj.rules.threshold(0.5)
    )
    assert rows_of(decode(params())) == [tokens(greedy.tokens)[i] for i in (2, 2, 0)]


@pytest.mark.long
def test_arrays_of_the_caller_may_be_closed_over():
    ids, lengths = jnp.asarray(PROMPTS), jnp.array([5, 3, 1, 4])
    decoder, _ = make()
    start = lambda: decoder.init(params(), ids, lengths, max_tokens=NEW, key=KEYS)
    run = jax.jit(lambda state: decoder.answer(decoder.run(params(), state)))
    assert rows_of(run(jax.jit(start)())) == rows_of(run(start()))


def test_shapes_alone_are_enough_to_trace_it():
    decoder, decode = make()
    shapes = jax.eval_shape(lambda p: p, params())
    ids, lengths = jax.eval_shape(decode, shapes, jax.ShapeDtypeStruct((4, 5), jnp.int32), KEYS)
    assert ids.shape[0] == 4 and lengths.shape == (4,)
    assert decoder.config == make()[0].config and hash(decoder) == hash(decoder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda d: mj.decoder(tiny(), slots=0), "slots is 0"),
        (lambda d: mj.decoder(tiny(), slots=10_000), "slots is 10000"),
        (lambda d: mj.decoder(tiny(), plan={}, slots=9), "plan is {}"),
        (lambda d: mj.decoder("nano", slots=9), "lm is 'nano'"),
        (lambda d: mj.decoder(tiny(), "threshold", slots=9), "sampler is 'threshold'"),
        (lambda d: d.init(params(), [3, 4], key=KEYS), "ids is"),
        (lambda d: d.init(params(), np.ones((4, 3)), key=KEYS), "ids is"),
        (lambda d: d.init(params(), np.ones((4, 30), int), key=KEYS), "ids is"),
        (lambda d: d.init(params(), PROMPTS, np.ones(3, int), key=KEYS), "lengths is"),
        (lambda d: d.init(params(), PROMPTS, np.full(4, 6), key=KEYS), "lengths is"),
        (lambda d: d.init(params(), PROMPTS, max_tokens=[1, 2], key=KEYS), "max_tokens is"),
        (lambda d: d.init(params(), PROMPTS, max_tokens=13, key=KEYS), "max_tokens is 13"),
        (lambda d: d.init(params(), PROMPTS, max_tokens=0.5, key=KEYS), "max_tokens is 0.5"),
        (lambda d: d.init(params(), PROMPTS, key=0), "key is 0"),
        (lambda d: d.init(params(), PROMPTS, key=KEYS[:2]), "key is"),
        (lambda d: d.init(params(), PROMPTS, key=KEYS, given=[True]), "given is"),
        (lambda d: d.run(params(), None), "state is"),
        (lambda d: d.init(tiny("block_causal"), PROMPTS, key=KEYS), "params is 'a LM'"),
        (lambda d: d.answer(params()), "run(params, state, passes=) returns"),
        (lambda d: make(logprobs=1)[0].answer(d.init(params(), PROMPTS, key=KEYS)), "another logprobs="),
        (lambda d: d.run(params(), d.init(params(), PROMPTS, key=KEYS), passes=0), "passes is 0"),
    ],
)
def test_what_does_not_fit_is_named(call, names):
    with pytest.raises(ValueError) as error:
        call(make()[0])
    assert names in str(error.value)
