"""DiffusionGemma against transformers: its logits, with and without self-conditioning, behind a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode import defaults, rules
from mercury_jax.decode.token_stats import draw, token_stats
from mercury_jax.hub.load import load_opened, open_checkpoint
from mercury_jax.types import Pass
from tests.decode.views import KEY, view_of
from tests.hub.goldens_of import GOLDENS, golden, limit, read_all
from tests.marks import slow_except

LIMIT = 1e-4
CHECKPOINTS = ["diffusion_gemma", "diffusion_gemma_other"]  # the second: every size drawn at random


def denoise(g, tokens, canvas, carry_logits, conditioned):
    """Logits of the tokens as they are encoded, and of the canvas behind them; conditioned: told carry_logits.

    Tokens are padded, and how many there are is an argument: all tests of a checkpoint share its program.
    """
    known = tokens.shape[1]
    padded = np.pad(tokens, [(0, 0), (0, 40 - known)])
    encoded, denoised = _denoise(g.opened.model, g.params, padded, known, canvas, carry_logits, conditioned)
    return np.asarray(encoded)[:, :known], np.asarray(denoised)


@functools.partial(jax.jit, static_argnums=0)
def _denoise(model, params, tokens, known, canvas, carry_logits, conditioned):
    (rows, slots), length = tokens.shape, canvas.shape[1]
    full = lambda x: jnp.full((rows,), x, jnp.int32)
    yes = jnp.ones((rows,), bool)
    carry = model.condition(params, carry_logits)
    nothing = jax.tree.map(lambda x: jnp.zeros((rows, slots, *x.shape[2:]), x.dtype), carry)
    carry = jax.tree.map(lambda x: jnp.where(conditioned, x, 0), carry)
    cache = model.empty_cache(rows, slots + length)
    given = Pass(tokens, cache, full(0), full(known), full(known), yes, nothing)
    hidden, cache = model.forward(params, given)
    encoded = model.head(params, hidden)
    given = Pass(canvas, cache, full(known), full(length), full(known + length), ~yes, carry)
    hidden, _ = model.forward(params, given)
    return encoded, model.head(params, hidden)


def told(g, conditioned):
    return denoise(g, g.said["tokens"], g.said["canvas"], g.said["carry_logits"], conditioned)


@pytest.mark.parametrize("name", slow_except(CHECKPOINTS, "diffusion_gemma"))
def test_canvas_logits_equal_transformers(name):
    g = golden(name)
    bare, conditioned = (limit(g.said[key]) for key in ("fp64_diff", "fp64_diff_conditioned"))
    assert np.abs(told(g, False)[1] - g.said["logits"]).max() <= bare
    assert np.abs(told(g, True)[1] - g.said["logits_conditioned"]).max() <= conditioned
    assert np.abs(g.said["logits"] - g.said["logits_conditioned"]).max() > 0.1  # the signal is heard


@pytest.mark.parametrize("name", slow_except(CHECKPOINTS, "diffusion_gemma"))
def test_encoder_logits_equal_transformers(name):
    g = golden(name)
    assert np.abs(told(g, False)[0] - g.said["encoder_logits"]).max() <= limit(g.said["fp64_diff_encoder"])


# --- whole generations

SEED, STEPS = 22, 12


@functools.cache
def recorded():
    """What `generate` was given and did, step by step; golden README.md says what each name is."""
    return read_all(GOLDENS / "diffusion_gemma" / "generation.safetensors")


def model_of(dtype):
    """The checkpoint as an LM without a tokenizer; call under x64 for float64."""
    folder = GOLDENS / "diffusion_gemma"
    opened = open_checkpoint(folder, dtype=dtype)
    return load_opened(opened, dtype=jnp.dtype(dtype))


@pytest.mark.parametrize("bits", slow_except([32, 64], 32))
@pytest.mark.slow
def test_two_sampled_canvases_equal_those_of_generate(bits):
    """Nothing is injected on our side: the reference was given the noise that this very call draws."""
    said = recorded()
    with jax.enable_x64(bits == 64):
        lm = model_of(f"float{bits}")
        assert defaults.default_plan(lm, mj.Plan()).steps == STEPS
        out = mj.sample(lm, [t.tolist() for t in said["tokens"]], max_tokens=32, seed=SEED, history=True)
    assert out.forwards.tolist() == said[f"passes_{bits}"].tolist()
    for row, tokens in enumerate(out.tokens):
        want = said[f"sequences_{bits}"][row, 24:].tolist()
        want = want[: want.index(1)] if 1 in want else want
        assert tokens.tolist() == want, first_difference(out, said, bits, row)


def first_difference(out, said, bits, row):
    """The first step whose argmax is another than the reference's."""
    frames = [f for f in out.history if f.n[row] > 0]
    theirs = [s[row] for c in range(2) for s in said[f"argmax_{bits}"][c] if s.any()]
    for i, (ours, answer) in enumerate(zip(frames, theirs)):
        if not np.array_equal(ours.answer[row], answer):
            return f"row {row} parts at pass {i}"
    return f"row {row}: every step agrees"


def test_each_step_from_the_references_canvas_gives_its_next_canvas():
    """Its canvas, its self-conditioning and its noise in; its draws, its acceptance and its next canvas out."""
    g, said = golden("diffusion_gemma"), recorded()
    steps = 0
    for canvas in range(2):
        known = said["sequences_32"][:, : 24 + 16 * canvas]
        for step in range(STEPS):
            live = ~said["finished_32"][canvas, step - 1] if step else np.ones(2, bool)
            if not said["margin_32"][canvas, step].any():
                continue
            before = said["logits_32"][canvas, max(step - 1, 0)]
            at = said["canvas_32"][canvas, step]
            _, raw = denoise(g, known, at, before, step > 0)
            warmth = 0.05 + 0.05 * (STEPS - step) / STEPS
            for row in np.flatnonzero(live & (said["margin_32"][canvas, step] > 0)):
                check_step(raw[row] / warmth, said, canvas, step, row, warmth)
                steps += 1
    assert steps == said["passes_32"].sum()


def check_step(logits, said, canvas, step, row, warmth):
    at = lambda name: said[f"{name}_32"][canvas, step, row]
    assert np.abs(logits - at("logits")).max() * warmth <= LIMIT
    sampled, proposal = stepped(logits, at("uniforms"), at("canvas"), at("fresh"))
    np.testing.assert_array_equal(sampled, at("sampled"))
    np.testing.assert_array_equal(proposal.canvas, at("next"))
    np.testing.assert_array_equal(proposal.answer, at("argmax"))


@jax.jit
def stepped(logits, uniforms, canvas, fresh):
    """(what is drawn, the proposal) of one row."""
    sampled = draw(logits, uniforms, jnp.asarray(1.0))
    v = view_of(logits, canvas, jnp.ones(logits.shape[0], bool))
    v = v._replace(logits=logits, stats=token_stats(logits, canvas, sampled, jnp.asarray(-1)), noise=fresh)
    return sampled, rules.entropy_bound(0.1)(KEY, v, ())[0]
