"""Views made by hand, for rules, processors and stops without a model."""

import jax
import jax.numpy as jnp

from mercury_jax.decode.token_stats import token_stats
from mercury_jax.types import View

MASK, KEY = 9, jax.random.key(0)


def view(p_sample, masked, entropy=None, uniform=False, **more):
    """A row of a canvas whose position i would draw token i with the given probability; 10 ids, 9 the mask."""
    n = len(p_sample)
    p = jnp.asarray(p_sample, jnp.float32)
    ids = jnp.arange(n)
    masked = jnp.asarray(masked)
    canvas = jnp.where(masked, MASK, 8)
    reading = token_stats(jnp.zeros((n, 10)), canvas, ids, jnp.asarray(-1))._replace(
        sample=ids,
        argmax=ids,
        p_sample=p,
        p_argmax=p,
        entropy=jnp.asarray(entropy if entropy else p, jnp.float32),
    )
    fields = dict(
        canvas=canvas,
        answer=canvas,
        stats=reading,
        leave_one_out=reading,
        logits=jnp.zeros((n, 10)),
        editable=masked,
        masked=masked,
        used=jnp.asarray(n),
        growth=jnp.asarray(0),
        noise=jnp.full(n, 7 if uniform else MASK),
        t=jnp.asarray(1.0),
        s=jnp.asarray(0.5),
        alpha_t=jnp.asarray(0.0),
        alpha_s=jnp.asarray(0.5),
        step=jnp.asarray(0),
        steps=jnp.asarray(2),
        eos=jnp.asarray(-1),
        position=jnp.asarray(0),
        output_counts=jnp.zeros(10, int),
        prompt_counts=jnp.zeros(10, int),
    )
    fields |= more
    return View(**({"draw_logits": fields["logits"]} | fields))


def view_of(logits, canvas, masked, key=KEY, temperature=0.0, mask=MASK, **more):
    """A view read from real logits [L, V], as the decoder would read them."""
    from mercury_jax.decode.token_stats import draw, forbid

    logits = forbid(jnp.asarray(logits, jnp.float32), (mask,))
    canvas, masked = jnp.asarray(canvas, jnp.int32), jnp.asarray(masked)
    uniforms = jax.random.uniform(key, canvas.shape)
    sample = draw(logits, uniforms, jnp.asarray(temperature, jnp.float32))
    eos = jnp.asarray(more.get("eos", -1))
    reading = token_stats(logits, canvas, sample, eos)
    base = view([0.0] * len(canvas), masked)
    vocab = jnp.zeros(logits.shape[-1], int)
    fields = dict(
        canvas=canvas,
        answer=canvas,
        stats=reading,
        leave_one_out=reading,
        logits=logits,
        draw_logits=logits,
        editable=jnp.ones_like(masked),
        masked=masked,
        noise=jnp.full_like(canvas, mask),
        output_counts=vocab,
        prompt_counts=vocab,
    )
    return base._replace(**(fields | more))


def taken(rule, v, memory=()):
    """The canvas after one step of a rule."""
    proposal, _ = rule(KEY, v, memory)
    return proposal.canvas.tolist()
