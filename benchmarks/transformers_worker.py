"""The side of transformers in `python -m benchmarks.gpu model`: a script for a Python that has torch and transformers.

Reads one JSON object, builds the model with random weights, generates a canvas with few and with many denoising steps
in alternation, and writes one JSON line: the median time difference divided by the difference in passes. Imports
nothing of this package.
"""

import json
import statistics
import sys
import time
from typing import Any


def main(args: dict[str, Any]) -> dict[str, Any]:
    """Measures `generate`.

    Args:
        args: `config`, `dtype` and `device` of the model, the ids of its `prompt`, and two numbers of `steps`.

    Returns:
        `seconds_per_forward` and the versions; {"left_out": why} where that is not possible.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return {"left_out": f"{error}: install torch and transformers beside JAX to compare"}
    if not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"):
        return {"left_out": f"transformers {transformers.__version__} has no DiffusionGemma; 5.23 has"}
    if args["device"] == "cuda" and not torch.cuda.is_available():
        return {"left_out": f"torch {torch.__version__} finds no CUDA device"}
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, args["dtype"]))
    with torch.device(args["device"]):
        model = transformers.DiffusionGemmaForBlockDiffusion(
            transformers.DiffusionGemmaConfig(**args["config"])
        )
    with torch.no_grad():  # small random weights, made on the device
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, 0.0, 0.02)
            else:
                torch.nn.init.ones_(weight)
    model, passes, cuda = model.eval(), [0], args["device"] == "cuda"
    model.model.decoder.register_forward_hook(lambda *args: passes.__setitem__(0, passes[0] + 1))
    ids = torch.tensor([args["prompt"]], device=args["device"])
    # The default, a static cache, compiles the model, which on a CPU takes longer than everything else.
    how = {} if cuda else {"cache_implementation": "dynamic"}
    # A threshold that is never reached, so that it makes all of its steps.
    how |= {"max_new_tokens": model.config.canvas_length, "confidence_threshold": 1e-30}
    wait = torch.cuda.synchronize if cuda else lambda: None

    def run(steps: int) -> tuple[float, int]:
        wait()
        passes[0], began = 0, time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_denoising_steps=steps, **how)
        wait()
        return time.perf_counter() - began, passes[0]

    short, long = args["steps"]
    for steps in args["steps"]:  # the first call of each may compile
        run(steps)
    pairs = [(run(short), run(long)) for _ in range(3)]
    each = [(b[0] - a[0]) / max(b[1] - a[1], 1) for a, b in pairs]
    versions = f"transformers {transformers.__version__} generate, torch {torch.__version__}, {args['dtype']}"
    return {"seconds_per_forward": statistics.median(each), "compared_with": versions}


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))), flush=True)
