"""What transformers computes from each mutated config.json: `python qa/parity/mutated.py [cases...]`.

Writes `goldens/mutations.safetensors`: for each case of `tests/hub/mutations.py` that is loaded, the float32 logits at
its last token (DiffusionGemma: at the canvas), and their largest difference from the float64 logits. The test makes the
weights again. With names of cases only those are computed, and the others are kept.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import checkpoints
import gemma
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file  # pyright: ignore[reportMissingImports]

from tests.hub import mutations


def load(folder: Path) -> Any:
    """transformers' model of a case; only tensors of a vision tower may be missing, no text passes through it."""
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {k: [x for x in v if "vision" not in str(x)] for k, v in info.items()}
    assert not any(wrong.values()), wrong
    if model.config.tie_word_embeddings and not torch.equal(model.lm_head.weight, table(model)):
        model.config = copy.deepcopy(model.config)
        model.config.tie_word_embeddings = False  # what it did, so that its twin in float64 does the same
    return checkpoints.plain(model)


def table(model: Any) -> Any:
    return model.get_input_embeddings().weight


def logits(case: mutations.Case) -> tuple[Any, Any]:
    """[2, V] or [2, L, V], and the difference between float32 and float64."""
    ids = torch.from_numpy(mutations.tokens(case)).long()

    def run(model: Any) -> dict[str, Any]:
        if case.base != "diffusion_gemma":
            return dict(logits=model(input_ids=ids, use_cache=False).logits[:, -1])
        split = ids.shape[1] - mutations.CANVAS
        carry = torch.zeros(2, mutations.CANVAS, mutations.VOCAB)
        return dict(logits=gemma.passes(ids[:, :split], ids[:, split:], carry)(model)["logits"])

    with tempfile.TemporaryDirectory() as folder:
        single, double = checkpoints.both(load(mutations.write(Path(folder), case)), run)
    return single["logits"], checkpoints.difference(single["logits"], double["logits"])


def main(names: list[str]) -> None:
    cases = [case for case in mutations.CASES if not case.refused and (not names or case.name in names)]
    path = checkpoints.GOLDENS / "mutations.safetensors"
    found: dict[str, Any] = load_file(path) if names else {}
    for case in cases:
        try:
            found[case.name], found[f"{case.name}, fp64_diff"] = logits(case)
        except Exception as error:
            print(f"{case.name:45} {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        gap = found[f"{case.name}, fp64_diff"].item()
        print(f"{case.name:45} std {found[case.name].std():.2f}  fp32-fp64 {gap:.1e}", flush=True)
    checkpoints.write(checkpoints.GOLDENS, found, "mutations", transformers=transformers.__version__)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    main(sys.argv[1:])
