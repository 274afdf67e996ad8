"""Compares kinds of noise at equal training tokens: bits per byte of held-out books under each objective.

A 1M-parameter transformer is trained on the same windows of text with the same optimizer, as an autoregressive model
and with each kind of noise. Each bound is then estimated a second time by a formula that shares no code with the
objective: the discrete-time ELBO, a sum of exact KL divergences between posteriors. Each run writes one line of the
output. Runs whose line exists are skipped, so the benchmark may be interrupted and continued. Run with `python -m
benchmarks.objectives --books DIR`.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import mercury_jax as mj
from benchmarks.script import Ints, run_script
from mercury_jax import noise
from mercury_jax.cli import arguments
from mercury_jax.cli.app import INTERRUPTED
from mercury_jax.cli.arguments import Int as IntArg, option
from mercury_jax.config import ModelConfig, NoiseConfig, NoiseKind, Pattern, refuse
from mercury_jax.training import objectives
from mercury_jax.training.data.packing import Example, StreamSettings, lay_out
from mercury_jax.training.data.sources import Seed, Stream
from mercury_jax.training.objectives import Objective
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import TrainConfig
from mercury_jax.types import LM, LaidOutDocument, PackedPass

WINDOW = 257  # tokens of a window; the first one is given
VOCAB = 512
HELD_OUT = 0.1  # held-out share of each book
CHECKED = 64  # number of windows of the second estimate
MASK = ModelConfig(vocab=VOCAB).mask  # mask id of tokenizers that `mj.Tokenizer.train` makes


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a model is trained.

    Attributes:
        pattern: Attention pattern.
        block: Positions of a canvas.
        objective: The loss, a likelihood bound for each method.
        kind: Kind of noise; None: autoregressive.
    """

    pattern: Pattern
    block: int
    objective: Objective
    kind: NoiseKind | None = "absorbing"


METHODS = {
    "autoregressive": Method(pattern="block_causal", block=1, objective=objectives.next_token(), kind=None),
    "absorbing": Method(pattern="bidirectional", block=WINDOW, objective=objectives.masked_elbo()),
    "uniform": Method(
        pattern="bidirectional", block=WINDOW, objective=objectives.uniform_elbo(), kind="uniform"
    ),
    "gidd": Method(pattern="bidirectional", block=WINDOW, objective=objectives.gidd_elbo(), kind="hybrid"),
    "block 4": Method(pattern="block_causal", block=4, objective=objectives.masked_elbo()),
    "block 16": Method(pattern="block_causal", block=16, objective=objectives.masked_elbo()),
}


@dataclass(frozen=True, kw_only=True)
class ObjectivesBenchmark:
    """Train each method on the same tokens and compare bits per byte of held-out text.

    examples:
      python -m benchmarks.objectives --books books --out rows.jsonl
      python -m benchmarks.objectives --books books --methods gidd --seeds 1 --steps 200
    """

    books: Annotated[str, option("DIR")]
    """Folder of .txt files; the last tenth of each is held out."""
    out: Annotated[str, option("FILE")] = "objectives.jsonl"
    """Rows are appended here; runs that it holds are skipped."""
    methods: Annotated[tuple[str, ...], option("NAME [NAME ...]")] = tuple(METHODS)
    """Methods to train."""
    seeds: Ints = (0, 1, 2)
    """Seeds of parameters, order and noise."""
    steps: IntArg = 600
    """Updates of 8 windows of 256 tokens."""
    windows: IntArg = 256
    """Held-out windows."""
    samples: IntArg = 16
    """Noised copies of each window."""


@dataclass(frozen=True)
class Windows:
    """A data source of random windows of WINDOW tokens with a prompt of one token, the same for every pattern."""

    folder: str

    def _ids(self, settings: StreamSettings) -> np.ndarray:
        return tokens_of(self.folder, settings.tokenizer, settings.split == "test")

    def open(self, settings: StreamSettings) -> Stream | None:
        """Implements `DataSource.open`."""
        ids = self._ids(settings)

        def at(index: int) -> LaidOutDocument:
            start = int(np.random.default_rng((*settings.seed, index)).integers(len(ids) - WINDOW))
            return lay_out(settings, Example(ids[start : start + WINDOW], 1, False), self.folder)

        return Stream(at, 0)

    def texts(self, seed: Seed) -> Iterator[str]:
        """Implements `DataSource.texts`."""
        parts = [text[i : i + 8000] for text in sides(self.folder)[0] for i in range(0, len(text), 8000)]
        return (parts[i] for i in np.random.default_rng(seed).permutation(len(parts)))


def sides(folder: str) -> tuple[list[str], list[str]]:
    """Splits the books.

    Args:
        folder: Folder of .txt files.

    Returns:
        The texts to train on, and the held-out last tenth of each book.
    """
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.txt"))]
    cuts = [int(len(text) * (1 - HELD_OUT)) for text in texts]
    return [t[:c] for t, c in zip(texts, cuts)], [t[c:] for t, c in zip(texts, cuts)]


@functools.lru_cache(4)
def tokens_of(folder: str, tokenizer: Any, held_out: bool) -> np.ndarray:
    """Encodes one side of the books.

    Args:
        folder: Folder of .txt files.
        tokenizer: Encodes the texts.
        held_out: Which side.

    Returns:
        The ids of all books, concatenated, int32 [N].
    """
    return np.concatenate([np.asarray(tokenizer.encode(text), np.int32) for text in sides(folder)[held_out]])


def recipe(name: str, args: ObjectivesBenchmark, seed: int, folder: Path) -> TrainConfig:
    """Makes the training run of a method.

    Args:
        name: Key of `METHODS`.
        args: Options of the benchmark.
        seed: Seed of parameters, order and noise.
        folder: Folder of the run.

    Returns:
        The recipe.
    """
    method = METHODS[name]
    model = ModelConfig(
        vocab=VOCAB, width=128, layers=5, heads=4, kv_heads=4, head_dim=32, ffn=344, context=512,
        pattern=method.pattern, block=method.block, predicts_next=method.kind is None,
        mask=MASK if method.kind else None,
    )  # fmt: skip
    # A block-causal diffusion model sees each window twice, as clean tokens and as canvases.
    row = WINDOW if method.pattern == "bidirectional" or method.kind is None else 2 * WINDOW
    return TrainConfig(
        name="books", model=model, objective=method.objective, data=Windows(args.books),
        noise=NoiseConfig(kind=method.kind or "uniform"),
        optim=OptimConfig(optimizer="muon", lr=5e-3, warmup=30, decay="wsd", final=0.02, tail=0.4),
        steps=args.steps, batch=8, row=row, ema=0.99, seed=seed, eval_every=0, sample_every=0, save_every=100,
        log_every=50, out=str(folder), resume=True, tokenizer=str(folder.parent / "tokenizer.model"),
    )  # fmt: skip


# --- evaluation


def held_out_windows(args: ObjectivesBenchmark, tokenizer: Any) -> np.ndarray:
    """Selects windows of the held-out text, evenly spaced.

    Args:
        args: Options of the benchmark.
        tokenizer: Encodes the texts.

    Returns:
        Ids [args.windows, WINDOW].
    """
    ids = tokens_of(args.books, tokenizer, True)
    starts = np.linspace(0, len(ids) - WINDOW, args.windows).astype(int)
    return ids[starts[:, None] + np.arange(WINDOW)]


def scored(lm: LM, windows: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores windows by `mj.score`.

    Args:
        lm: The trained model.
        windows: Ids [N, WINDOW]; the first id of each is given.
        samples: Noised copies of each window.

    Returns:
        Nats of each window [N], the standard error of its noise [N], and its size in bytes, times ln 2 [N]: bits per
        byte are nats over size.
    """
    lengths = np.array([len(piece) for piece in lm.tokenizer.pieces])
    found = mj.score(lm, windows[:, :1], windows[:, 1:], samples=samples)
    return -np.asarray(found.log_p), np.asarray(found.se), lengths[windows[:, 1:]].sum(1) * math.log(2)


def evaluate(lm: LM, args: ObjectivesBenchmark) -> dict[str, float]:
    """Estimates bits per byte by `mj.score`, and a second time on the first CHECKED windows.

    Args:
        lm: The trained model.
        args: Options of the benchmark.

    Returns:
        `bits_per_byte` over all windows with two standard errors: over windows, and of the noise for given windows.
        `bits_per_byte_checked` and `bits_per_byte_again` are both estimates on the CHECKED windows, to be compared.
    """
    windows = held_out_windows(args, lm.tokenizer)
    nats, se, size = scored(lm, windows, args.samples)
    report = {
        "bits_per_byte": nats.sum() / size.sum(),
        "se_over_windows": float(np.std(nats / size, ddof=1) / np.sqrt(len(nats))),
        "se_of_noise": float(np.sqrt((se**2).sum()) / size.sum()),
    }
    some = windows[:CHECKED]
    again, error = second_estimate(lm, some)
    return report | {
        "bits_per_byte_checked": nats[: len(some)].sum() / size[: len(some)].sum(),
        "bits_per_byte_again": again.sum() / size[: len(some)].sum(),
        "se_again": float(np.sqrt((error**2).sum()) / size[: len(some)].sum()),
    }


def second_estimate(
    lm: LM, windows: np.ndarray, levels: int = 512, draws: int = 32
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates the nats of each window by a formula that is independent of the objectives.

    Diffusion models: the ELBO of a process with `levels` discrete steps (D3PM, arXiv 2107.03006, eq. 1),
    sum_k KL(q(x_s | x_t, x_0) || p(x_s | x_t)) with exact posteriors, estimated at `draws` stratified steps.
    Autoregressive models: `prefix_nats`.

    Args:
        lm: The model.
        windows: Ids [N, WINDOW].
        levels: Number of discrete steps.
        draws: Number of steps at which the sum is estimated.

    Returns:
        Nats of each window [N], and their standard errors [N].
    """
    if lm.model.config.autoregressive:
        return prefix_nats(lm, windows)
    rng, found = np.random.default_rng(0), np.zeros((len(windows), draws))
    for i, window in enumerate(windows):
        laid = lm.model.layout(window, 1, all_clean=False)
        # Stratified: each canvas has one draw in each of `draws` equal parts of the steps, in a random order.
        part = (rng.permuted(np.tile(np.arange(draws), (laid.canvas.max() + 1, 1)), axis=1)).T  # [draws, C]
        step = (part + rng.random(part.shape)) / draws * levels
        at = np.floor(step)[:, np.maximum(laid.canvas, 0)]
        arrays = (jnp.asarray(x) for x in (laid.tokens, laid.positions, laid.ranges, laid.editable))
        found[i] = discrete_terms(lm, jax.random.key(i), jnp.asarray(at), levels, *arrays)
    found *= levels
    return found.mean(1), found.std(1, ddof=1) / np.sqrt(draws)


@functools.partial(jax.jit, static_argnums=3)
def discrete_terms(
    lm: LM,
    key: Array,
    step: Float[Array, "N T"],
    levels: int,
    tokens: Int[Array, "T"],
    positions: Int[Array, "T"],
    ranges: Int[Array, "T R 2"],
    editable: Array,
) -> Float[Array, "N"]:
    """Computes the terms of the discrete ELBO at given steps.

    Args:
        lm: The model.
        key: Random key of the noise.
        step: Index of the step of each position, 0 to levels - 1, for N draws.
        levels: Number of discrete steps.
        tokens: Clean ids.
        positions: Positions in the document.
        ranges: Key ranges of attention.
        editable: Positions that are noised and scored [T].

    Returns:
        KL(q(x_s | x_t, x_0) || p(x_s | x_t)) in nats, summed over the positions of each draw.
    """
    corruption, v = lm.corruption, lm.model.config.vocab
    t, s = (step + 1.0) / levels, step / levels
    # Hybrid noise changes fast near t = 0 (like sqrt(t)), so its steps are cubed: smaller steps at small times.
    t, s = (x**3 if corruption.kind == "hybrid" else x for x in (t, s))
    many = lambda x: jnp.broadcast_to(x, (len(step), *x.shape))
    x0 = many(tokens)
    xt = noise.corrupt(key, corruption, x0, t, many(editable)).xt
    # One batch of N rows, the same window at N different steps. p is the prediction of the clean token [N, T, V].
    given = PackedPass(xt, many(positions), many(ranges))
    logits = lm.model.head(lm.params, lm.model.apply(lm.params, given))
    allowed = jnp.asarray(~np.isin(np.arange(v), corruption.forbidden))
    p = jax.nn.softmax(jnp.where(allowed, logits, -1e30), axis=-1)

    def law(time: Array) -> tuple[Array, Array]:
        """Returns alpha [N, T, 1], and the probability of each id under the noise [N, T, V]."""
        alpha = jnp.clip(corruption.alpha(time), 0.0, 1.0)[..., None]
        share = {"absorbing": jnp.zeros_like, "uniform": jnp.ones_like}.get(
            corruption.kind, corruption.uniform_share
        )
        share = share(jnp.maximum(time, 1e-12))[..., None]  # type: ignore
        masks = 0.0 if corruption.mask is None else (1.0 - share) * jax.nn.one_hot(corruption.mask, v)
        return alpha, (1.0 - alpha) * (masks + share * allowed / allowed.sum())

    # The step from s to t keeps a token with probability alpha_t / alpha_s, otherwise draws it from a distribution with
    # mass `own` at xt. Bayes' rule then gives q(x_s | x_t, x_0), proportional to q(x_t | x_s) q(x_s | x_0).
    (alpha_t, noise_t), (alpha_s, noise_s) = law(t), law(s)
    ratio = alpha_t / alpha_s
    at = jax.nn.one_hot(xt, v)
    own = ((noise_t - ratio * noise_s) * at).sum(-1, keepdims=True)  # noise of the step from s to t, at xt
    forward = ratio * at + jnp.maximum(own, 0.0)  # q(xt | x_s) for every x_s

    def posterior(clean: Array) -> Array:
        x = forward * (alpha_s * clean + noise_s)
        return x / jnp.maximum(x.sum(-1, keepdims=True), 1e-30)

    true, ours = posterior(jax.nn.one_hot(x0, v)), posterior(p)
    kl = jnp.where(
        true > 0, true * (jnp.log(jnp.maximum(true, 1e-30)) - jnp.log(jnp.maximum(ours, 1e-30))), 0.0
    )
    return (kl.sum(-1) * editable).sum(-1)


def prefix_nats(lm: LM, windows: np.ndarray, every: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Estimates the nats of an autoregressive model from a sample of the tokens of each window.

    Each sampled token takes a separate forward pass over the tokens before it only, so that the estimate does not
    depend on causal masks.

    Args:
        lm: The model.
        windows: Ids [N, WINDOW].
        every: One token is sampled in each run of this many tokens.

    Returns:
        -log p of each window without its first token, in nats [N], and the standard errors [N].
    """
    found, rng = [], np.random.default_rng(0)
    for first in range(1, windows.shape[1], every):
        # A random place in each run: always the first one would sample the token with no context too often.
        end = int(rng.integers(first, first + every))
        logits = mj.logits(lm, windows[:, end - 1 : end], None if end == 1 else windows[:, : end - 1])
        log_p = jax.nn.log_softmax(jnp.asarray(logits)[:, 0].at[:, list(lm.corruption.forbidden)].set(-1e30))
        found.append(-np.take_along_axis(np.asarray(log_p), windows[:, end, None], axis=1)[:, 0])
    nats, scored = np.stack(found, axis=1), windows.shape[1] - 1
    return nats.mean(1) * scored, nats.std(1, ddof=1) / np.sqrt(nats.shape[1]) * scored


def prepare(books: str, out: Path) -> Path:
    """Makes the folder of the runs, and trains their tokenizer if it is not there yet.

    Args:
        books: Folder of .txt files.
        out: The output file, FILE.jsonl.

    Returns:
        The folder FILE.runs, with a tokenizer.model.

    Raises:
        ValueError: There are no books.
    """
    if not list(Path(books).glob("*.txt")):
        raise refuse("books", books, "a folder with .txt files")
    root = out.with_suffix(".runs")
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "tokenizer.model").exists():
        texts = Windows(books).texts((0,))
        mj.Tokenizer.train((next(texts) for _ in range(400)), VOCAB).save(root / "tokenizer.model")
    return root


def run(argv: Sequence[str]) -> int:
    """Trains and evaluates each method and seed whose row is not in the output file yet.

    Args:
        argv: Command-line arguments.

    Returns:
        The exit code.

    Raises:
        ValueError: An option is wrong.
    """
    args = arguments.read(ObjectivesBenchmark, argv, "python -m benchmarks.objectives")
    for name in args.methods:
        if name not in METHODS:
            raise refuse("methods", name, ", ".join(METHODS))
    out = Path(args.out)
    root = prepare(args.books, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(row["method"], row["seed"], row["steps"]) for row in rows}
    for seed in args.seeds:
        for name in args.methods:
            if (name, seed, args.steps) in done:
                continue
            folder = root / f"{name.replace(' ', '_')}-{seed}-{args.steps}"
            began = time.perf_counter()
            if mj.train(recipe(name, args, seed, folder)).stopped:
                return INTERRUPTED  # by a signal: the row would be of a part of the run
            lm = mj.load(folder / "model")
            row = {"method": name, "seed": seed, "steps": args.steps, "parameters": lm.parameters}
            row |= {key: round(float(value), 5) for key, value in evaluate(lm, args).items()}
            row |= {"tokens": args.steps * 8 * (WINDOW - 1), "seconds": round(time.perf_counter() - began)}
            print(json.dumps(row), flush=True)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(run))
