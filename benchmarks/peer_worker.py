"""The side of transformers in `benchmarks.peer`, in a process of its own. Run as a script, never imported.

Reads one JSON line for each call from standard input ({"steps": n} or {"stop": true}), generates one canvas with
transformers' `generate`, and answers with one line. Needs torch and transformers, and nothing of this package.
"""

import json
import sys
import time


def main(folder: str, prompt: list[int], threads: int) -> None:
    """Answers calls with the checkpoint in `folder` until standard input ends.

    Args:
        folder: A Hugging Face checkpoint.
        prompt: Ids.
        threads: Threads of torch.
    """
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([prompt])
    canvas = model.config.canvas_length
    passes = [0]
    model.model.decoder.register_forward_hook(lambda *args: passes.__setitem__(0, passes[0] + 1))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions | {"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("stop"):
            return
        passes[0] = 0
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                max_new_tokens=canvas,
                max_denoising_steps=asked["steps"],
                # A threshold that is never reached, so that both sides make the same number of steps.
                confidence_threshold=1e-30,
                cache_implementation="dynamic",
            )
        print(json.dumps({"seconds": time.perf_counter() - began, "passes": passes[0]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
