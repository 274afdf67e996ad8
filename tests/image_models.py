"""A small random DiffusionGemma with a vision tower, and a tokenizer whose chat template writes images."""

import functools
import json

import jax
import numpy as np

from mercury_jax import models, noise
from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.images import VisionConfig
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.types import LM
from tests.hub.tiny_tokenizers import sentencepiece

TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<start_of_turn>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}{{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {{- '<|image|>' if part['type'] == 'image' else part['text'] }}
        {%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
MARKS = ("<|image|>", "<|image>", "<image|>")


@functools.cache
def image_tokenizer(template: str = TEMPLATE) -> HFTokenizer:
    files = sentencepiece()
    data = json.loads(files["tokenizer.json"])
    first = 1 + max(data["model"]["vocab"].values())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data["added_tokens"] += [{"id": first + i, "content": text, **flags} for i, text in enumerate(MARKS)]
    files = {
        **files,
        "tokenizer.json": json.dumps(data).encode(),
        "chat_template.jinja": template.encode(),
    }
    return HFTokenizer.of(files, eos=1, pad=0)


@functools.cache
def image_lm(tokens: int = 12, vision: bool = True, window: int = 6) -> LM:
    """The model; with more `tokens` an image may be longer than a plain prefill pass."""
    tokenizer = image_tokenizer()
    ids = dict(zip(("placeholder", "begin", "end"), map(tokenizer.tokens.control.__getitem__, MARKS)))
    tower = VisionConfig(
        width=16, layers=2, heads=2, kv_heads=2, head_dim=8, ffn=24, patch=4, pool=2, positions=200,
        standardise=True, tokens=tokens, **ids,
    )  # fmt: skip
    config = GemmaConfig(
        vocab=tokenizer.vocab_size, width=16, layers=3, heads=2, kv_heads=1, head_dim=8, ffn=24, window=window,
        global_layers=(1,), global_head_dim=8, global_kv_heads=1, block=8, self_conditioning=True,
        encoder_scalars=True, context=1024, eos=1, vision=tower if vision else None,
    )  # fmt: skip
    model = models.build(config)
    params = jax.jit(model.init)(jax.random.key(0))
    # No bytes, which are not text one by one, and no control tokens.
    vocab = json.loads(tokenizer.files["tokenizer.json"])["model"]["vocab"]
    hidden = {i for text, i in vocab.items() if text.startswith("<") and i != 1}
    corruption = noise.uniform(config.vocab, forbidden=tuple(sorted({*ids.values(), *hidden})))
    return LM(model, params, tokenizer, corruption, "tiny image model")


def picture(seed: int, height: int = 20, width: int = 30) -> np.ndarray:
    """Pixels [H, W, 3] of noise."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def conversation(*images, text: str = "the quick fox", detail: str | None = None) -> list[dict]:
    """One message of the user: each image, then a text."""
    more = {} if detail is None else {"detail": detail}
    parts = [{"type": "image", "image": image, **more} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
