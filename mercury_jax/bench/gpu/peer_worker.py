"""transformers' side of `peer`: a script for a Python that may have torch and transformers; imports nothing of ours.

Reads one JSON object, builds the model with random weights, generates a canvas with few and with many denoising
steps by turns, and writes one JSON line: the median difference, divided by that of the passes that were made.
"""

import json
import statistics
import sys
import time
from typing import Any


def main(asked: dict[str, Any]) -> dict[str, Any]:
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

    # Its default, a static cache, also compiles it: on a CPU for longer than all else takes.
    how = {} if asked["device"] == "cuda" else {"cache_implementation": "dynamic"}

    def run(steps: int) -> tuple[float, int]:
        passes[0], began = 0, wait(torch, asked["device"])
        with torch.inference_mode():
            # Never both stable and that sure: it makes all of its steps.
            model.generate(
                ids,
                max_new_tokens=model.config.canvas_length,
                max_denoising_steps=steps,
                confidence_threshold=1e-30,
                **how,
            )
        return wait(torch, asked["device"]) - began, passes[0]

    short, long = asked["steps"]
    for steps in asked["steps"]:  # whatever it compiles
        run(steps)
    pairs = [(run(short), run(long)) for _ in range(3)]
    each = [(b[0] - a[0]) / max(b[1] - a[1], 1) for a, b in pairs]
    said = f"transformers {transformers.__version__} generate, torch {torch.__version__}, {asked['dtype']}"
    return {"seconds_per_forward": statistics.median(each), "compared_with": said}


def build(torch: Any, transformers: Any, asked: dict[str, Any]) -> Any:
    """The model with small random weights, made on the device itself."""
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
    """The time, once the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))), flush=True)
