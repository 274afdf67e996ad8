"""Images through DiffusionGemma as transformers has it: `python qa/parity/images.py`.

Writes three checkpoints of drawn sizes, `goldens/images/1` to `3`: two rows with one and two images, their soft tokens,
and the logits of encoder and decoder behind them. `goldens/images/processed.json` holds what the image processor makes
of 12 images: the number of soft tokens, and SHA-256 of patches and positions. The images come from seeds. Needs Pillow
beside torch and transformers.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import checkpoints
import gemma
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from released import report
from transformers import (  # pyright: ignore[reportMissingImports]
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DynamicCache,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import (  # pyright: ignore[reportMissingImports]
    Gemma4ImageProcessorPil,
)

from tests.hub.drawn_images import CASES, draw_image

LENGTH = 40  # tokens of a prompt
GRIDS = [[(3, 4)], [(2, 2), (4, 3)]]  # soft tokens (rows, columns) of the images of each row


class Images(NamedTuple):
    patches: Any  # [N, Q, 3 * patch * patch] of all images, those of row 0 first
    positions: Any  # [N, Q, 2]
    starts: list[list[int]]  # of the soft tokens in each row


def config_of(seed: int) -> Any:
    """A DiffusionGemma with a vision tower; the seed chooses every size."""
    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]
    between = lambda low, high: int(rng.integers(low, high + 1))
    _, config = gemma.drawn(seed)
    kv = between(1, 2)
    vision = dict(
        hidden_size=2 * between(6, 12), intermediate_size=between(10, 30), num_hidden_layers=between(1, 3),
        num_attention_heads=kv * between(1, 2), num_key_value_heads=kv, head_dim=4 * between(1, 4),
        patch_size=between(2, 4), pooling_kernel_size=between(2, 3), position_embedding_size=between(16, 40),
        rms_norm_eps=pick(1e-6, 1e-5), standardize=bool(seed % 2),
        rope_parameters={"rope_type": "axial", "rope_theta": float(between(50, 500))},
    )  # fmt: skip
    text = config.text_config.to_dict()
    text["use_bidirectional_attention"] = None if seed % 3 == 0 else "vision"
    vocab = text["vocab_size"]
    return DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=config.canvas_length, image_token_id=vocab - 1,
        boi_token_id=vocab - 2, eoi_token_id=vocab - 3,
    )  # fmt: skip


def images_of(seed: int, config: Any) -> Images:
    """Random patches of the images of both rows, padded, and where their soft tokens are."""
    rng = np.random.default_rng(seed)
    vision = config.vision_config
    pool, size = vision.pooling_kernel_size, 3 * vision.patch_size**2
    grids = [grid for row in GRIDS for grid in row]
    most = (max(rows * columns for rows, columns in grids) + 1) * pool**2
    patches = np.zeros((len(grids), most, size), np.float32)
    positions = np.full((len(grids), most, 2), -1)
    for i, (rows, columns) in enumerate(grids):
        y, x = np.divmod(np.arange(rows * columns * pool**2), columns * pool)
        positions[i, : len(x)] = np.stack([x, y], axis=-1)
        patches[i, : len(x)] = rng.random((len(x), size))
    starts, gap = [], 5
    for row in GRIDS:
        at, found = gap, []
        for rows, columns in row:
            found.append(at)
            at += rows * columns + 3
        starts.append(found)
    return Images(torch.from_numpy(patches), torch.from_numpy(positions), starts)


def passes(tokens: Any, kinds: Any, canvas: Any, images: Images) -> Any:
    """For `both`: soft tokens, and the logits of encoder and decoder, with the masks that `generate` makes."""

    def run(model: Any) -> dict[str, Any]:
        text = model.config.get_text_config(decoder=True)
        cache, encoder = DynamicCache(config=text), model.model.encoder
        patches = images.patches.to(model.dtype)
        soft = encoder.get_image_features(patches, images.positions, return_dict=True).pooler_output
        at = torch.arange(tokens.shape[1])[None]
        masks = encoder.create_masks_for_generate(
            config=text, inputs_embeds=torch.zeros(*tokens.shape, text.hidden_size, dtype=model.dtype),
            attention_mask=torch.ones_like(tokens, dtype=torch.bool), cache=cache, position_ids=at,
            mm_token_type_ids=kinds,
        )  # fmt: skip
        out = model(
            input_ids=tokens, attention_mask=masks, cache=cache, position_ids=at, decoder_input_ids=canvas,
            pixel_values=patches, image_position_ids=images.positions,
        )  # fmt: skip
        cap = model.final_logit_softcapping
        ahead = torch.tanh(model.lm_head(out.encoder_last_hidden_state) / cap) * cap
        return dict(soft=soft, logits=out.logits, encoder=ahead)

    return run


def golden(seed: int) -> None:
    name = f"images/{seed}"
    config = config_of(seed)
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(config)
    checkpoints.randomise(model, seed, 0.6)
    checkpoints.save(model, checkpoints.GOLDENS / name)
    model = checkpoints.load(checkpoints.GOLDENS / name, DiffusionGemmaForBlockDiffusion)
    vocab, images = config.text_config.vocab_size, images_of(seed, config)
    tokens = checkpoints.ids(seed, (2, LENGTH), vocab - 3)
    canvas = checkpoints.ids(seed + 100, (2, config.canvas_length), vocab - 3)
    kinds = torch.zeros_like(tokens)
    for row, (starts, grids) in enumerate(zip(images.starts, GRIDS, strict=True)):
        for start, (rows, columns) in zip(starts, grids, strict=True):
            tokens[row, start - 1], tokens[row, start + rows * columns] = vocab - 2, vocab - 3
            kinds[row, start : start + rows * columns] = 1
    tokens[kinds == 1] = vocab - 1
    single, double = checkpoints.both(model, passes(tokens, kinds, canvas, images))
    gaps = {f"fp64_diff_{k}": checkpoints.difference(single[k], double[k]) for k in single}
    tensors = dict(
        tokens=tokens, image=kinds.int(), canvas=canvas, patches=images.patches, positions=images.positions,
        soft=single["soft"], logits=single["logits"], encoder_logits=single["encoder"], **gaps,
    )  # fmt: skip
    checkpoints.write(checkpoints.GOLDENS / name, tensors)
    for part in single:
        report(f"{name} {part}", single[part], gaps[f"fp64_diff_{part}"])


def processed() -> dict[str, Any]:
    """What the image processor makes of each case of `tests/hub/drawn_images.py`."""
    found = {}
    for i, case in enumerate(CASES):
        processor = Gemma4ImageProcessorPil(max_soft_tokens=case.tokens)
        out = processor(images=draw_image(case), return_tensors="np")
        digest = lambda x, kind: hashlib.sha256(np.ascontiguousarray(x[0].astype(kind)).tobytes()).hexdigest()
        found[str(i)] = dict(
            tokens=int(out["num_soft_tokens_per_image"][0]),
            patches=digest(out["pixel_values"], np.float32),
            positions=digest(out["image_position_ids"], np.int32),
        )  # fmt: skip
    return found


if __name__ == "__main__":
    for seed in (1, 2, 3):
        golden(seed)
    (checkpoints.GOLDENS / "images/processed.json").write_text(json.dumps(processed(), indent=1) + "\n")
