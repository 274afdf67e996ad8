"""What we write is what transformers reads: `python qa/parity/written.py`, part of `make parity`.

Each checkpoint is loaded by us, written by `hub.save_hf`, loaded by transformers, and must say what the golden says.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from mercury_jax import hub
from tests.hub.goldens_of import GOLDENS, read_all

CAUSAL = ("qwen2", "qwen2_tied", "qwen3", "qwen3_moe", "llama3", "gemma4_dense", "gemma4_moe", "gemma4_ple")
LIMIT = 1e-4


def difference(name: str) -> float:
    """Largest difference of transformers' logits of what we wrote from the golden ones."""
    said = read_all(GOLDENS / name / "golden.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        path = hub.save_hf(Path(folder) / "written", hub.load(GOLDENS / name, dtype="float32"))
        kind = getattr(transformers, hub.info(path)["architecture"])
        model, about = kind.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        missing = [key for key in about["missing_keys"] if "vision" not in key]
        assert not missing and not about["unexpected_keys"], (missing, about["unexpected_keys"])
        with torch.inference_mode():
            tokens = torch.from_numpy(said["tokens"]).long()
            logits = model(input_ids=tokens).logits if name in CAUSAL else canvas(model.eval(), tokens, said)
    return float(np.abs(logits.numpy() - said["logits"]).max())


def canvas(model: Any, tokens: Any, said: dict[str, np.ndarray]) -> Any:
    """Logits of a canvas behind the encoded prompt."""
    import gemma

    ids = torch.from_numpy(said["canvas"]).long()
    return gemma.passes(tokens, ids, torch.from_numpy(said["carry_logits"]))(model)["logits"]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:] or (*CAUSAL, "diffusion_gemma", "diffusion_gemma_other"):
        found = difference(name)
        print(f"{name}: {found:.1e}")
        assert found <= LIMIT
