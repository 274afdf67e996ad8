"""A denoiser, an objective and data small enough to train in a second; shared by the tests of `train`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax import noise
from mercury_jax.config import ModelConfig
from mercury_jax.models.ops import dot
from mercury_jax.training import data, recipe
from mercury_jax.training.optim import OptimConfig
from mercury_jax.types import Batch, Loss, Model, PackedPass

VOCAB, ROWS, ROW = 11, 8, 6
CORRUPTION = noise.absorbing(0)


def model(width: int = 8) -> Model:
    """Each position guesses from its own token: embed, a norm's scale, a hidden matrix, a head."""

    def init(key):
        waves = lambda *shape: jnp.cos(jnp.arange(np.prod(shape)) ** 2.0 + _number(key)).reshape(shape)
        return {
            "embed": waves(VOCAB, width),
            "norm": {"scale": jnp.ones(width)},
            "hidden": {"w": waves(width, width) * width**-0.5},
            "head": waves(width, VOCAB) * width**-0.5,
        }

    def apply(params, given, *, mesh=None, device=None):
        x = params["embed"][given.tokens] * params["norm"]["scale"]
        return jnp.tanh(dot(x, params["hidden"]["w"], 1))

    rules = ((r"embed$", (None, "fsdp")), (r"w$", ("fsdp", "tensor")), (r"head$", ("fsdp", None)))

    def unused(*args):
        raise NotImplementedError("training does not decode")

    config = ModelConfig(vocab=VOCAB, width=width)
    head = lambda params, hidden: hidden @ params["head"]
    return Model(config, init, apply, unused, head, unused, unused, unused, unused, rules)


def _number(key):
    """A number that depends on the key; real random bits take a second to compile, in every test."""
    return jax.random.key_data(key)[-1] % 1000 / 7.0


def objective(key, model, params, batch, corruption):
    """Cross-entropy where half of the tokens are masked; rows weigh by what they score, so they differ."""
    coins = jnp.sin(_number(key) * (1 + jnp.arange(batch.tokens.size))).reshape(batch.tokens.shape)
    hidden = (coins < 0) & batch.editable
    return _loss(model, params, batch, jnp.where(hidden, corruption.mask, batch.tokens))


def quiet(key, model, params, batch, corruption):
    """The same without noise: its sums over a batch are those over the parts of the batch."""
    return _loss(model, params, batch, batch.tokens)


def _loss(model, params, batch, xt):
    logits = model.head(params, model.apply(params, PackedPass(xt, batch.positions, batch.ranges)))
    ce = (
        -jnp.take_along_axis(jax.nn.log_softmax(logits), batch.tokens[..., None], -1)[..., 0] * batch.editable
    )
    return Loss(
        ce.sum(1), batch.editable.sum(1).astype(jnp.float32), {"ce": (ce.sum(), batch.editable.sum())}
    )


def batch(seed: int = 0, rows: int = ROWS) -> Batch:
    r = np.random.default_rng(seed)
    zeros = np.zeros((rows, ROW), np.int32)
    tokens = r.integers(1, VOCAB, (rows, 1)).astype(np.int32) + zeros
    editable = r.random((rows, ROW)) < 0.7
    return Batch(tokens, zeros, np.zeros((rows, ROW, 2, 2), np.int32), editable, zeros)  # type: ignore[arg-type]


class Data:
    """Batches by number; `hook` is called with the number before each."""

    def __init__(self, hook=lambda number: None, rows: int = ROWS):
        self.number, self.hook, self.rows = 0, hook, rows

    def __next__(self):
        self.hook(self.number)
        self.number += 1
        return batch(self.number, self.rows)

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


def config(out, **fields) -> recipe.TrainConfig:
    """Thirty steps, saved every ten."""
    base = recipe.TrainConfig(
        name="tiny", model=model().config, objective=objective, data=data.stdlib(), steps=30, batch=ROWS, row=ROW,
        save_every=10, eval_every=10, sample_every=0, ema=0.9, out=str(out),
        optim=OptimConfig(lr=1e-2, warmup=3),
    )  # fmt: skip
    return dataclasses.replace(base, **fields)
