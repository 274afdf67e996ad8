"""The objective of a block drafter: predict the next tokens of a frozen model's own answers, all in one pass.

One causal pass of the target over packed rows gives the hidden states that the drafter reads. In each row some anchors
are drawn inside the answers. At each anchor starts a block: the token of the anchor, and masks. All blocks of a row
share one pass of the drafter; a block attends to the target's positions before its anchor and to itself (DFlash,
arXiv 2602.06036, section 4).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax import noise
from mercury_jax.config import PositiveFloat, PositiveInt, checked, refuse
from mercury_jax.training.objectives import objective as parts
from mercury_jax.training.objectives.next_token import next_tokens
from mercury_jax.training.objectives.objective import Objective
from mercury_jax.types import Batch, DrafterPasses, Key, Loss, Model, PackedPass, Params


@checked
def block_draft(
    *, anchors: PositiveInt = 16, decay: PositiveFloat = 4.0, sampled: PositiveInt | None = None
) -> Objective:
    """The cross-entropy of the tokens after each anchor, with weights that fall with the distance.

    The token at distance k = 1, 2, ... from its anchor has the weight exp(-(k - 1) / decay): a token is accepted only
    if all tokens before it are. The metrics `agrees_<k>` are the shares of tokens at distance k that are the drafter's
    most probable ones, and `accepted` is the mean number of tokens before the first that is not. On greedy answers of
    the target these are the shares that it accepts.

    Args:
        anchors: Blocks of a row; fewer where its answers have fewer tokens.
        decay: Distance at which the weight has fallen by a factor of e.
        sampled: Number of ids, drawn at each step, that stand for all ids that are not in the batch (sampled softmax,
            arXiv 1412.2007): the head of a large vocabulary is most of the work of a small drafter. The shares are then
            those among fewer ids, a little too high. None: all ids.

    Returns:
        The objective, for a recipe with a `drafter` and any noise.

    Raises:
        ValueError: An argument is out of range; or, when the objective is traced, a model without a drafter.
    """

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        del corruption
        drafter = model.drafter
        if not isinstance(drafter, DrafterPasses):
            raise refuse("drafter", None, "a DrafterConfig, for the objective block_draft")
        # 1. The target's hidden states of the whole row, constants for the drafter.
        hidden = model.apply(params, PackedPass(batch.tokens, batch.positions, batch.ranges))
        context = jax.lax.stop_gradient(hidden.blocks)  # [B, T, n D]
        # 2. The drafter's, of A blocks with L positions each.
        blocks = draw_blocks(key, model, batch, anchors, drafter.config.block)
        found = drafter.apply(params, context, batch.positions, blocks.given)
        # 3. Cross-entropy of the masks [B, A, L - 1]; the first token of a block is decided.
        shape = blocks.target.shape
        masks = jax.tree.map(lambda x: x.reshape(*shape[:2], shape[2] + 1, -1)[:, :, 1:], found)
        flat = lambda x: x.reshape(shape[0], shape[1] * shape[2], *x.shape[3:])
        if sampled is None:
            scored, reduce = (model, params), functools.partial(parts.token_cross_entropy, None)
        else:
            scored, reduce = sample_vocabulary(key, model, params, batch, sampled), sampled_cross_entropy
        scores = parts.reduce_logits(*scored, jax.tree.map(flat, masks), reduce, flat(blocks.target))
        ce, hit = (x.reshape(shape) for x in scores)
        weight = blocks.exists * jnp.exp(-jnp.arange(shape[2]) / decay)
        # 4. Agreement by distance, and the length of the longest prefix that agrees.
        agrees = hit * blocks.exists
        accepted = jnp.cumprod(agrees, axis=2).sum()
        metrics = {
            f"agrees_{k + 1}": (agrees[..., k].sum(), blocks.exists[..., k].sum().astype(jnp.float32))
            for k in range(shape[2])
        }
        metrics["accepted"] = (accepted, blocks.exists[..., 0].sum().astype(jnp.float32))
        return Loss((ce * weight).sum((1, 2)), weight.sum((1, 2)), metrics)

    return objective


def sample_vocabulary(
    key: Key, model: Model, params: Params, batch: Batch, sampled: int
) -> tuple[Model, Params]:
    """Narrows the head to the ids of a batch and to some drawn ids, which stand for all others.

    Args:
        key: Random key.
        model: A model with `head_chunk`.
        params: Its parameters.
        batch: Packed rows; each of their tokens is one of the ids, so that n = B T + sampled.
        sampled: Number of drawn ids.

    Returns:
        A model whose head computes the logits of these ids [.., n], and its parameters: those of the model, the ids
        [n], and log weights [n] with which the sum of weight * exp(logit) estimates that over the vocabulary.
    """
    vocab, own = model.config.vocab, batch.tokens.reshape(-1)
    drawn = jax.random.randint(jax.random.fold_in(key, 1), (sampled,), 0, vocab)
    # A token that is in the batch k times counts k times 1 / k; a drawn id that is in the batch counts there.
    count = jnp.zeros(vocab).at[own].add(1.0)
    others = jnp.where(count[drawn] > 0, -1e30, math.log(vocab / sampled))
    ids, weights = jnp.concatenate([own, drawn]), jnp.concatenate([-jnp.log(count[own]), others])
    chunk = model.head_chunk
    assert chunk is not None  # a model with a drafter has one
    head = lambda narrow, hidden: chunk(narrow[0], hidden, narrow[1], len(ids))
    return model._replace(head=head), (params, ids, weights)


def sampled_cross_entropy(
    narrow: Params, logits: Float[Array, "B T n"], target: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes the cross-entropy over a sampled vocabulary: a `Reduce`, as `objective.token_cross_entropy`.

    Args:
        narrow: The parameters from `sample_vocabulary`.
        logits: Logits of its ids.
        target: Target id of each position, one of them.

    Returns:
        -log p(target) in nats, estimated, and 1.0 where no other of the ids is more probable.
    """
    _, ids, weights = narrow
    chosen = jnp.where(ids == target[..., None], logits, -jnp.inf).max(axis=-1)
    ce = jax.nn.logsumexp(logits + weights, axis=-1) - chosen
    return ce, (chosen >= logits.max(axis=-1)).astype(jnp.float32)


class Blocks(NamedTuple):
    """The blocks of a batch: A in each row, of L positions each.

    Attributes:
        given: Tokens, positions and key ranges of the drafter's pass [B, A * L]; masks are -1.
        target: The token of each mask [B, A, L - 1].
        exists: Whether the answer has this token.
    """

    given: PackedPass
    target: Int[Array, "B A M"]
    exists: Bool[Array, "B A M"]


def draw_blocks(key: Key, model: Model, batch: Batch, anchors: int, block: int) -> Blocks:
    """Draws the anchors of each row, and lays out their blocks behind the row's T positions.

    Args:
        key: Random key.
        model: Its config says how documents are laid out.
        batch: Packed rows of an autoregressive model.
        anchors: A, number of anchors.
        block: L, positions of a block.

    Returns:
        The blocks. Without an anchor for it, a block attends to nothing and no token of it exists.
    """
    rows, slots = batch.tokens.shape
    # 1. An anchor is a token that an answer token follows. `at` [B, A]: the slots of A of them, in random order.
    following = next_tokens(model, batch)
    lottery = jnp.where(following.known & following.answer, jax.random.uniform(key, (rows, slots)), -1.0)
    drawn, at = jax.lax.top_k(lottery, min(anchors, slots))
    # 2. The L slots from the anchor on [B, A, L]. Behind the end of a document the positions start again at 0.
    steps = jnp.arange(block)
    inside = at[..., None] + steps
    here = jnp.minimum(inside, slots - 1)
    pick = lambda x: jnp.take_along_axis(x, here.reshape(rows, -1), axis=1).reshape(here.shape)
    first = jnp.take_along_axis(batch.positions, at, axis=1)[..., None]
    same = (inside < slots) & (pick(batch.positions) == first + steps) & pick(batch.editable)
    exists = same & (drawn >= 0)[..., None]
    # 3. Key ranges [B, A, L, 2, 2]: the target's positions before the anchor, and the block itself.
    begin = jnp.take_along_axis(batch.ranges[:, :, 0, 0], at, axis=1)
    own = slots + jnp.broadcast_to(jnp.arange(at.shape[1]) * block, at.shape)
    ranges = jnp.stack([jnp.stack([begin, at], -1), jnp.stack([own, own + block], -1)], axis=2)
    ranges = jnp.where((drawn >= 0)[..., None, None], ranges, 0)[:, :, None]
    ranges = jnp.broadcast_to(ranges, (*here.shape, 2, 2))
    tokens = jnp.where(steps == 0, pick(batch.tokens), -1)
    flat = lambda x: x.reshape(rows, -1, *x.shape[3:])
    given = PackedPass(flat(tokens), flat(first + steps), flat(ranges).astype(jnp.int32))
    return Blocks(given, pick(batch.tokens)[..., 1:], exists[..., 1:])
