"""What was fine-tuned is what transformers and PEFT load: `python qa/parity/finetuned.py [families...]`.

A random checkpoint of each family is tuned on chats for 40 steps, in full and with LoRA. The tuned model is written in
Hugging Face's layout and read by the family's class; where PEFT is installed, it loads the adapter onto the base, and
we load the file that it writes. All must give the same logits. LLaDA's class is not in transformers: `LLADA=FOLDER`
names a folder with its modeling_llada.py and configuration_llada.py. The class of the diffusion model that Qwen3
becomes is Qwen3's with another mask.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

import mercury_jax as mj
from mercury_jax import hub
from tests.hub.goldens_of import logits_of_model
from tests.training.tiny_checkpoints import FAMILIES, chats, checkpoint, losses, recipe

LIMIT, ROWS, LENGTH, CANVAS = 1e-4, 2, 32, 16


def files(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def reference(family: str, folder: Path, out: Path) -> Any:
    """The checkpoint as the family's class in torch reads it, in fp32."""
    if family == "LLaDA":
        if "LLADA" not in os.environ:
            return None
        code = Path(os.environ["LLADA"]).resolve()
        sys.path.insert(0, str(code.parent))
        module = __import__(f"{code.name}.modeling_llada", fromlist=["LLaDAModelLM"])
        config = module.LLaDAConfig(**json.loads((folder / "config.json").read_text()), init_device="cpu")
        config.use_cache = False  # which transformers 5 drops, and the class reads
        model = module.LLaDAModelLM(config)
        from safetensors.torch import load_file  # pyright: ignore[reportMissingImports]

        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.eval()
    kind = {"Qwen3": "Qwen3ForCausalLM", "DiffusionGemma": "DiffusionGemmaForBlockDiffusion"}[family]
    if family == "Qwen3":  # also of the diffusion model, whose class is Qwen3's with another mask
        out.mkdir()
        for path in folder.iterdir():
            (out / path.name).write_bytes(path.read_bytes())
        about = json.loads((out / "config.json").read_text()) | {
            "model_type": "qwen3",
            "architectures": [kind],
        }
        (out / "config.json").write_text(json.dumps({k: v for k, v in about.items() if k != "auto_map"}))
        folder = out
    model, info = getattr(transformers, kind).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = [key for key in info["missing_keys"] if "vision" not in key]
    assert not missing and not info["unexpected_keys"], (missing, info["unexpected_keys"])
    return model.eval()


def their_logits(family: str, model: Any, tokens: np.ndarray, block: int) -> np.ndarray:
    """Logits of whole rows; of DiffusionGemma those of a canvas behind the prompt."""
    ids = torch.from_numpy(tokens).long()
    with torch.inference_mode():
        if family == "LLaDA":
            return model(input_ids=ids).logits.numpy()
        if family == "Qwen3":  # a token sees its own block and all before it
            at = torch.arange(LENGTH) // block
            mask = torch.where(at[None] <= at[:, None], 0.0, torch.finfo(torch.float32).min)
            return model(input_ids=ids, attention_mask=mask.expand(ROWS, 1, LENGTH, LENGTH)).logits.numpy()
        known = LENGTH - CANVAS
        out = model(input_ids=ids[:, :known], decoder_input_ids=ids[:, known:])
        return out.logits.numpy()


def our_logits(family: str, lm: Any, tokens: np.ndarray) -> np.ndarray:
    return logits_of_model(lm.model, lm.params, tokens, CANVAS if family == "DiffusionGemma" else 0)


def run(family: str, rank: int, folder: Path) -> None:
    base = checkpoint(folder / "base", family)
    before = files(base)
    result = mj.train(recipe(family, base, chats(folder / "chats.jsonl"), folder / "run", rank))
    first, last = losses(result.out)
    assert files(base) == before, "the base was changed"
    adapter = result.out / "adapter" if rank else None
    source = base if rank else result.out / "model"
    written = hub.convert(source, folder / "hf", to="hf", adapter=adapter)
    lm = mj.load(base, adapter=adapter) if rank else mj.load(source)
    tokens = np.random.default_rng(0).integers(8, 300, (ROWS, LENGTH)).astype(np.int32)
    ours, block = our_logits(family, lm, tokens), lm.model.config.block
    line = f"{family}, {'LoRA' if rank else 'full'}: loss {first:.3f} -> {last:.3f} ({1 - last / first:.0%} lower)"
    model = reference(family, written, folder / "named")
    if model is None:
        print(f"{line}; LLADA names no folder with the class, not compared")
        return
    found = {"exported": np.abs(their_logits(family, model, tokens, block) - ours).max()}
    moved = np.abs(our_logits(family, mj.load(base), tokens)[:, -1] - ours[:, -1]).max()
    if rank and importlib.util.find_spec("peft") is not None:
        import peft  # pyright: ignore[reportMissingImports]

        model = peft.PeftModel.from_pretrained(
            reference(family, base, folder / "base_named"), str(adapter)
        ).eval()
        found["by PEFT"] = np.abs(their_logits(family, model, tokens, block) - ours).max()
        model.save_pretrained(folder / "theirs")  # without our record: the base's own config
        again = mj.load(base, adapter=folder / "theirs")
        theirs = their_logits(family, model, tokens, again.model.config.block)
        found["PEFT's file by us"] = np.abs(our_logits(family, again, tokens) - theirs).max()
    print(
        line
        + f"; base unchanged; logits moved {moved:.2g}; "
        + ", ".join(f"{k} {v:.1e}" for k, v in found.items())
    )
    assert max(found.values()) <= LIMIT < moved and last <= 0.7 * first


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for family in sys.argv[1:] or FAMILIES:
        for rank in (0, 4):
            with tempfile.TemporaryDirectory() as folder:
                run(family, rank, Path(folder))
