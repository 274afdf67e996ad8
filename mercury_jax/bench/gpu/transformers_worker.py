"""The side of transformers in `mercury bench gpu model`: a script for a Python that has torch and transformers.

Reads one JSON object, builds the model with random weights, generates a canvas with few and with many denoising steps
in alternation, and writes one JSON line: the median time difference divided by the difference in passes. Imports
nothing of this package.
"""

import json
import statistics
import sys
import time
from typing import Any


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Measures what `asked` describes; {"left_out": why} where that is not possible."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return {"left_out": f"{error}: install torch and transformers beside JAX to compare"}
    if not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"):
        return {"left_out": f"transformers {transformers.__version__} has no DiffusionGemma; 5.23 has"}
    if asked["device"] == "cuda" and not torch.cuda.is_available():
        return {"left_out": f"torch {torch.__version__} finds no CUDA device"}
    torch.manual_seed(0)
    model, passes = build(torch, transformers, asked), [0]
    model.model.decoder.register_forward_hook(lambda *args: passes.__setitem__(0, passes[0] + 1))
    ids = torch.tensor([asked["prompt"]], device=asked["device"])

    # The default, a static cache, compiles the model, which on a CPU takes longer than everything else.
    how = {} if asked["device"] == "cuda" else {"cache_implementation": "dynamic"}

    def run(steps: int) -> tuple[float, int]:
        passes[0], began = 0, wait(torch, asked["device"])
        with torch.inference_mode():
            # A threshold that is never reached, so that it makes all of its steps.
            model.generate(
                ids,
                max_new_tokens=model.config.canvas_length,
                max_denoising_steps=steps,
                confidence_threshold=1e-30,
                **how,
            )
        return wait(torch, asked["device"]) - began, passes[0]

    short, long = asked["steps"]
    for steps in asked["steps"]:  # the first call of each may compile
        run(steps)
    pairs = [(run(short), run(long)) for _ in range(3)]
    each = [(b[0] - a[0]) / max(b[1] - a[1], 1) for a, b in pairs]
    said = f"transformers {transformers.__version__} generate, torch {torch.__version__}, {asked['dtype']}"
    return {"seconds_per_forward": statistics.median(each), "compared_with": said}


def build(torch: Any, transformers: Any, asked: dict[str, Any]) -> Any:
    """The model with small random weights, made on the device.

    Args:
        torch, transformers: The modules.
        asked: `config`, `dtype` and `device`.

    Returns:
        The model in evaluation mode.
    """
    config = transformers.DiffusionGemmaConfig(**asked["config"])
    torch.set_default_dtype(getattr(torch, asked["dtype"]))
    with torch.device(asked["device"]):
        model = transformers.DiffusionGemmaForBlockDiffusion(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, 0.0, 0.02)
            else:
                torch.nn.init.ones_(weight)
    return model.eval()


def wait(torch: Any, device: str) -> float:
    """Waits until the device is idle; returns the time in seconds.

    Args:
        torch: The module.
        device: "cuda" or "cpu".

    Returns:
        `time.perf_counter()`.
    """
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))), flush=True)
