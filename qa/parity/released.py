"""Golden checkpoints and logits that a released package makes: `python qa/parity/released.py [names...]`.

Needs torch and transformers, and for the whole generations jax; the tests only read what it writes into
tests/hub/goldens. Every weight and token comes from a seed, so that a second run on the same machine writes
the same files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import causal
import checkpoints
import gemma
import torch  # pyright: ignore[reportMissingImports]


class Recipe(NamedTuple):
    make: Callable[[], tuple[Any, Any]]  # (class, config)
    seed: int
    embed: float = 0.6  # standard deviation of the embedding, which sets that of the logits
    published: Callable[[dict], dict] | None = None
    shard: str = "1GB"
    length: int = 24  # of the prompt


CAUSAL = {
    "qwen2": Recipe(causal.qwen2, 11, published=causal.published),
    "qwen2_tied": Recipe(causal.qwen2_tied, 12),
    "qwen3": Recipe(causal.qwen3, 13),
    "qwen3_moe": Recipe(causal.qwen3_moe, 14, published=causal.published, shard="60KB"),
    "llama3": Recipe(causal.llama3, 15, published=causal.published, length=48),
    "gemma4_moe": Recipe(gemma.moe, 16),
    "gemma4_dense": Recipe(gemma.dense, 17, published=gemma.published),
    "gemma4_ple": Recipe(gemma.per_layer, 18),
}
DIFFUSION = {
    "diffusion_gemma": Recipe(gemma.diffusion, 21),
    "diffusion_gemma_other": Recipe(lambda: gemma.drawn(7), 22),
}


def checkpoint(name: str, recipe: Recipe) -> Any:
    """The folder of a random checkpoint, written and read back."""
    kind, config = recipe.make()
    torch.manual_seed(recipe.seed)
    model = kind(config)
    checkpoints.randomise(model, recipe.seed, recipe.embed)
    if name == "diffusion_gemma":
        same_scalars(model)
        model.generation_config = gemma.sampling(gemma.EOS)
    checkpoints.save(model, checkpoints.GOLDENS / name, recipe.published, max_shard_size=recipe.shard)
    return checkpoints.load(checkpoints.GOLDENS / name, kind)


def same_scalars(model: Any) -> None:
    """Encoder and decoder keep a layer scalar each; the released checkpoint has them equal."""
    pairs = zip(model.model.encoder.language_model.layers, model.model.decoder.layers, strict=True)
    for encoder, decoder in pairs:
        encoder.layer_scalar.copy_(decoder.layer_scalar)


def causal_golden(name: str, recipe: Recipe) -> None:
    model = checkpoint(name, recipe)
    tokens = checkpoints.ids(recipe.seed, (2, recipe.length), model.config.get_text_config().vocab_size)
    run = lambda model: dict(logits=model(input_ids=tokens).logits)
    single, double = checkpoints.both(model, run)
    gap = checkpoints.difference(single["logits"], double["logits"])
    checkpoints.write(checkpoints.GOLDENS / name, dict(tokens=tokens, logits=single["logits"], fp64_diff=gap))
    report(name, single["logits"], gap)


def diffusion_golden(name: str, recipe: Recipe) -> None:
    model = checkpoint(name, recipe)
    vocab, length = model.config.text_config.vocab_size, model.config.canvas_length
    tokens = checkpoints.ids(recipe.seed, (2, recipe.length), vocab)
    canvas = checkpoints.ids(recipe.seed + 100, (2, length), vocab)
    noise = torch.Generator().manual_seed(recipe.seed)
    carry = 3.0 * torch.randn(2, length, vocab, generator=noise)
    single, double = checkpoints.both(model, gemma.passes(tokens, canvas, carry))
    gap = {k: checkpoints.difference(single[k], double[k]) for k in single}
    checkpoints.write(
        checkpoints.GOLDENS / name,
        dict(
            tokens=tokens, canvas=canvas, carry_logits=carry, logits=single["logits"], fp64_diff=gap["logits"],
            logits_conditioned=single["conditioned"], fp64_diff_conditioned=gap["conditioned"],
            encoder_logits=single["encoder"], fp64_diff_encoder=gap["encoder"],
        ),
    )  # fmt: skip
    for part in single:
        report(f"{name} {part}", single[part], gap[part])
    if name == "diffusion_gemma":
        import generation  # here, because the noise is ours and needs jax; nothing else does

        generation.golden(model, checkpoints.GOLDENS / name)


def report(name: str, logits: Any, gap: Any) -> None:
    print(f"{name:32} logits {tuple(logits.shape)} std {logits.std():.2f}  fp32-fp64 {gap.item():.1e}")


def main(names: list[str]) -> None:
    makers = {k: (causal_golden, r) for k, r in CAUSAL.items()}
    makers |= {k: (diffusion_golden, r) for k, r in DIFFUSION.items()}
    unknown = set(names) - set(makers)
    if unknown:
        raise SystemExit(f"unknown: {sorted(unknown)}; known: {sorted(makers)}")
    for name in names or makers:
        make, recipe = makers[name]
        make(name, recipe)


if __name__ == "__main__":
    main(sys.argv[1:])
