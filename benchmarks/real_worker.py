"""The side of transformers in `benchmarks.real`, in a process of its own. Run as a script, never imported.

Reads one JSON line for each answer ({"ids": prompt, "max_tokens": n, "lookup": drafted tokens or 0}), decodes greedily
with `generate` in fp32, and answers with one line. Needs torch, transformers, gguf and accelerate, and nothing of this
package.
"""

import json
import os
import sys
import time


def main(file: str, threads: int) -> None:
    """Answers calls with the model of a GGUF file until standard input ends."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    folder, name = os.path.split(file)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32
    ).eval()
    passes = [0]
    model.register_forward_hook(lambda *args: passes.__setitem__(0, passes[0] + 1))
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        ids = torch.tensor([asked["ids"]])
        drafts = {"prompt_lookup_num_tokens": asked["lookup"]} if asked["lookup"] else {}
        passes[0], began = 0, time.perf_counter()
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=asked["max_tokens"],
                **drafts,
            )
        seconds = time.perf_counter() - began
        print(
            json.dumps({"ids": made[0, ids.shape[1] :].tolist(), "seconds": seconds, "passes": passes[0]}),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
