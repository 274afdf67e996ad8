"""Random checkpoints of three families in Hugging Face's layout, each with a tokenizer and a chat template, and chats.

The sizes are those of a toy, the build is that of the published models: LLaDA is bidirectional, Qwen3 autoregressive
without a mask, DiffusionGemma has experts, sliding layers, self-conditioning and uniform noise. Vocabularies have more
ids than the tokenizer, as Qwen3's.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from mercury_jax import hub, models, noise, types
from mercury_jax.config import Experts, ModelConfig, NoiseConfig
from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.training.lora import LoraConfig
from mercury_jax.training.objectives import diffusion_gemma, llada
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import InitModel, TrainConfig
from tests.hub.tiny_tokenizers import byte_level, sentencepiece

VOCAB = 512
FAMILIES = ("LLaDA", "Qwen3", "DiffusionGemma")
WORDS = ("red", "blue", "green", "gold")


def tokenizer(family: str) -> HFTokenizer:
    if family == "DiffusionGemma":
        return HFTokenizer.of(sentencepiece("turns"), eos=1, pad=0, ends=(6,), vocab=VOCAB)
    files = dict(byte_level("llada" if family == "LLaDA" else "chatml"))
    if family == "Qwen3":  # its tokenizer has no mask
        about = json.loads(files["tokenizer_config.json"])
        files["tokenizer_config.json"] = json.dumps(
            {k: v for k, v in about.items() if k != "mask_token"}
        ).encode()
    return HFTokenizer.of(files, vocab=VOCAB)


def config(family: str, tok: HFTokenizer) -> ModelConfig:
    ids = dict(vocab=VOCAB, pad=tok.pad, eos=tok.eos, ends=tok.ends[1:], context=256)
    plain = dict(width=32, layers=2, heads=4, head_dim=8, ffn=48, zero_centred=False, scale_embed=False)
    if family == "LLaDA":
        own = dict(kv_heads=4, pattern="bidirectional", block=32, qk_norm=False, tied=False, norm_eps=1e-5)
        return ModelConfig(**ids, **plain, **own, mask=tok.mask)  # pyright: ignore
    if family == "Qwen3":
        own = dict(kv_heads=2, pattern="block_causal", block=1, predicts_next=True)
        return ModelConfig(**ids, **plain, **own, mask=None)  # pyright: ignore
    return GemmaConfig(
        **ids, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, block=16, window=12, global_layers=(1,),
        global_head_dim=16, global_kv_heads=1, keys_as_values=True, self_conditioning=True, encoder_scalars=True,
        experts=Experts(count=4, active=2, width=16),
    )  # fmt: skip


def checkpoint(folder: Path, family: str) -> Path:
    """Writes a random checkpoint of a family."""
    tok = tokenizer(family)
    c = config(family, tok)
    model = models.build(c)
    params = jax.jit(model.init)(jax.random.key(1))
    # Norms and scalars of a checkpoint are not the ones of a fresh model.
    params = jax.tree.map(
        lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape) if x.ndim < 2 else x, params
    )
    lm = types.LM(model, params, tok, noise.uniform(VOCAB))
    return hub.save_hf(folder, lm, family=family)


def chats(path: Path) -> Path:
    """Conversations that a small model learns by heart."""
    turn = lambda role, content: {"role": role, "content": content}
    lines = [
        {"messages": [turn("user", f"{word} fox {i}"), turn("assistant", f"the quick {word} model")]}
        for word in WORDS
        for i in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def recipe(family: str, base: Path, chats: Path, out: Path, rank: int = 0, **changes) -> TrainConfig:
    """Forty steps of SFT, in full or with adapters, as the packaged recipe of the family has it."""
    gemma, qwen = family == "DiffusionGemma", family == "Qwen3"
    how = (
        dict(pattern="block_causal", block=4, predicts_next=False)
        if qwen
        else dict(predicts_next=gemma or None)
    )
    made = TrainConfig(
        name="tuned", objective=diffusion_gemma() if gemma else llada(), init=str(base), chats=str(chats), out=str(out),
        model=InitModel(**how),  # type: ignore
        noise=NoiseConfig(kind="uniform" if gemma else "absorbing"), lora=LoraConfig(rank=rank),
        optim=OptimConfig(lr=1e-2 if rank else 3e-3, warmup=2, decay="constant", weight_decay=0.0),
        steps=40, batch=8, row=128, ema=0.0, eval_every=0, sample_every=0, log_every=1, save_every=40,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def losses(out: Path) -> tuple[float, float]:
    """The mean loss of the first and of the last five steps of a run that logs every step."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    values = [row["loss"] for row in rows if row.get("kind", "train") == "train" and "loss" in row]
    mean = lambda some: sum(some) / len(some)
    return mean(values[:5]), mean(values[-5:])
