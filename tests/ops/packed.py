"""Key ranges of rows of documents, as training packs them."""

import numpy as np

from mercury_jax.config import ModelConfig
from mercury_jax.models import masks
from mercury_jax.training.data import packing


def packed(pattern, slots, block, *rows):
    """Ranges [B, slots, R, 2] of rows of documents (tokens, prompt); what is left of a row sees nothing."""
    config = ModelConfig(
        vocab=16, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8, pattern=pattern, block=block
    )
    made = []
    for documents in rows:
        made.append(packing.PackedRow())
        for n, prompt in documents:
            made[-1].add((0, 0), masks.layout(config, np.full(n, 5), prompt))
    return np.asarray(packing.pack(made, slots, 0).ranges)
