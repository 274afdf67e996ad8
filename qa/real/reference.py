"""What transformers makes of the GGUF file of SmolLM2: `python qa/real/reference.py FILE.gguf --data FOLDER`.

Needs torch, transformers, gguf and accelerate. FOLDER has `books/*.txt` and `gsm8k/train.jsonl`. Writes
`reference.json` beside this file, which the tests read: prompts with the tokens of greedy answers, the logits'
distance from the second token where it is small, passages with their log-likelihoods, and what is predicted after
8,191 tokens.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import random
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer  # pyright: ignore[reportMissingImports]

OUT = Path(__file__).with_name("reference.json")
TOKENS, CONTEXT, PASSAGE = 48, 8192, 900  # tokens of an answer, of the longest text; characters of a passage
ASKED = (
    "What is the capital of France?", "Write a Python function that returns the n-th Fibonacci number.",
    "Name three primary colours.", "Explain photosynthesis in two sentences.", "Translate 'good morning' to Spanish.",
    "Write a haiku about the sea.", "What is the boiling point of water in Fahrenheit?", "List the planets in order.",
    "Give me a recipe for pancakes.", "Who wrote Hamlet?", "Summarise the water cycle.", "What is 17 plus 25?",
    "Write a SQL query that counts the rows of a table named users.", "What does HTTP stand for?",
    "Write a short e-mail that asks for a day off.", "Describe the moon to a child.", "What is a prime number?",
    "Write a regular expression for a date such as 2024-05-01.", "Suggest a name for a black cat.",
    "What is the difference between a list and a tuple in Python?", "Tell me a joke.", "Define entropy.",
    "Write a bash command that lists the five largest files.", "What is the largest ocean?", "How do vaccines work?",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    load = dict(gguf_file=args.file.name)
    tokenizer = AutoTokenizer.from_pretrained(args.file.parent, **load)
    model = AutoModelForCausalLM.from_pretrained(args.file.parent, dtype=torch.float32, **load).eval()

    rng = random.Random(0)
    questions = [json.loads(line)["question"] for line in (args.data / "gsm8k/train.jsonl").open()]
    prompts = [*ASKED, *rng.sample(questions, 50 - len(ASKED))]
    books = [path.read_text() for path in sorted((args.data / "books").glob("*.txt"))]
    code = "\n".join(map(inspect.getsource, (ast, json, random, inspect, argparse)))
    texts = [rng.choice(books) for _ in range(75)] + [code] * 25
    starts = [rng.randrange(len(text) - PASSAGE) for text in texts]
    passages = [text[at : at + PASSAGE] for text, at in zip(texts, starts, strict=True)]

    answers = []
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )
        with torch.inference_mode():
            out = model.generate(
                ids, do_sample=False, max_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True,
                attention_mask=torch.ones_like(ids),
            )  # fmt: skip
        found = out.sequences[0, ids.shape[1] :].tolist()
        top = [logits[0].topk(2).values.tolist() for logits in out.logits]
        ties = {at: round(a - b, 6) for at, (a, b) in enumerate(top) if a - b < 1e-2}
        answers.append({"prompt": prompt, "length": ids.shape[1], "tokens": found, "close": ties})
    scores = [scored(model, tokenizer(text)["input_ids"]) for text in passages]
    long = tokenizer("\n\n".join(books[0][at : at + PASSAGE] for at in range(10_000, 80_000, 2_000)))[
        "input_ids"
    ]
    with torch.inference_mode():
        last = (
            model(torch.tensor([long[: CONTEXT - 1]]), logits_to_keep=1).logits[0, -1].log_softmax(-1).topk(8)
        )
    told = [{"text": t, "tokens": n, "log_likelihood": s} for t, (n, s) in zip(passages, scores, strict=True)]
    record = {
        "answers": answers, "passages": told,
        "long": {"ids": long[: CONTEXT - 1], "next": last.indices.tolist(), "log_probabilities": last.values.tolist()},
    }  # fmt: skip
    OUT.write_text(json.dumps(record, ensure_ascii=False, indent=0) + "\n")


def scored(model, ids: list[int]) -> tuple[int, float]:
    """The number of tokens of a text, and the log-likelihood of all but the first."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return len(ids), float(logits.gather(1, torch.tensor(ids[1:])[:, None]).sum())


if __name__ == "__main__":
    main()
