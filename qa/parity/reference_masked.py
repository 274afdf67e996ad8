"""Runs the published samplers of LLaDA, Dream and Fast-dLLM on our tiny random checkpoints and keeps what they emit.

    python -m qa.parity.reference_masked --references FOLDER [llada dream fast_dllm ...]

FOLDER holds the authors' public code as they publish it: LLaDA/ (ML-GSAI/LLaDA), Fast-dLLM/ (NVlabs/Fast-dLLM) and
Fast-dLLM-v1/, a later version with `factor` (ours was the copy in Q-qiuqiu/Fast-dLLM @ aadcf06). It needs torch and
transformers 4.52; nothing of that code is in this repository. One file of
goldens/ is written for each name: `cases` have the tokens and the forward passes of a run at temperature 0, `draws` how
often each answer came up. `arguments` are those of the script, which `mj.presets.<preset>` takes too.

Prompts are drawn from a seed until the reference emits no end of text, behind which our decoder stops (see
decode/presets.py), and the same tokens in float64.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

TESTS = Path(__file__).parents[2] / "tests"
CHECKPOINTS = TESTS / "hub" / "goldens"
SHORT, LONG = 5, 60
DRAWS = 4000  # rows
SEEDS = 6  # prompts, of which the one whose answer has the most different tokens is taken
# The queries' weights are multiplied by it: random weights alone attend evenly, and an answer repeats two tokens.
SHARPNESS = 4.0
Run = Callable[..., torch.Tensor]  # (model, prompts [B, P], **arguments) -> sequences [B, P + N]


def namespace(name: str, folder: Path) -> None:
    """Makes a folder importable as a package without running its `__init__`."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


class Counted:
    """A reference model that counts its forward passes, and those over a block in which no mask is left.

    It never predicts the mask, as a trained model: our decoder forbids that id, and a random model gives it some
    probability, which would be missing from our confidences.
    """

    def __init__(self, model: Any, mask: int):
        self.passes, self.idle, self.block = 0, 0, 0
        plain = model.eval().forward

        def forward(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            cached = kwargs.get("past_key_values") is not None
            self.idle += cached and not (tokens[:, : self.block] == mask).any()
            out = plain(tokens, *args, **kwargs)
            out.logits[..., mask] = -1e30
            return out

        model.forward = forward


def llada_model(folder: Path) -> Any:
    namespace("model", folder / "Fast-dLLM" / "llada" / "model")
    made = importlib.import_module("model.modeling_llada").LLaDAModelLM
    return sharpened(made.from_pretrained(CHECKPOINTS / "llada", torch_dtype=torch.float32))


def sharpened(model: Any) -> Any:
    for name, weight in model.named_parameters():
        if name.endswith("q_proj.weight"):
            weight *= SHARPNESS
    return model


def dream_model(folder: Path, file: str = "Fast-dLLM/dream/model") -> Any:
    name = "dream_" + file.replace("/", "_").replace("-", "_")
    namespace(name, folder / file)
    module = importlib.import_module(f"{name}.modeling_dream")
    config = module.DreamConfig.from_pretrained(CHECKPOINTS / "dream")
    model = module.DreamModel(config)
    from safetensors.torch import load_file  # pyright: ignore[reportMissingImports]

    missing = model.load_state_dict(load_file(CHECKPOINTS / "dream" / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys and all("inv_freq" in key for key in missing.missing_keys)
    return sharpened(model)


# --- cases: (name, prompt length, arguments)


def both(name: str, long: int = LONG, **arguments: Any) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """A short and a long prompt."""
    for kind, length in (("short", SHORT), ("long", long)):
        yield f"{name}, {kind} prompt", length, arguments


LLADA_CASES = [
    *both("one block", steps=16, gen_length=16, block_length=16),
    *both("four blocks", steps=32, gen_length=32, block_length=8),
    *both("uneven steps", steps=10, gen_length=32, block_length=16),
    *both("guidance", steps=8, gen_length=16, block_length=8, cfg_scale=1.5),
    *both("guidance, one block", steps=16, gen_length=16, block_length=16, cfg_scale=0.5),
]
LLADA_DRAWS = [
    *both("random remasking", steps=4, gen_length=4, block_length=4, remasking="random"),
    *both("random remasking in blocks", steps=4, gen_length=6, block_length=3, remasking="random"),
    *both("low confidence, drawn", steps=4, gen_length=4, block_length=4, temperature=0.4),
    *both("guidance, drawn", steps=2, gen_length=4, block_length=4, temperature=0.8, cfg_scale=1.0),
]
DREAM_ALGS = ("maskgit_plus", "topk_margin", "entropy")
DREAM_CASES = [
    case
    for alg in DREAM_ALGS
    for arguments in (
        dict(max_new_tokens=32, steps=32),
        dict(max_new_tokens=32, steps=7, eps=0.2),
        dict(max_new_tokens=32, steps=40, top_p=0.9, top_k=20),
    )
    for case in both(f"{alg}, {arguments['steps']} steps", alg=alg, **arguments)
]
# Top-p leaves a sure position one id and the confidence 1: which of two such positions comes first is not defined by
# torch, so it is drawn here where no confidence decides.
DREAM_DRAWS = [
    *both("origin", alg="origin", max_new_tokens=4, steps=3),
    *both("origin, drawn", alg="origin", max_new_tokens=4, steps=4, temperature=0.4, top_p=0.9),
    *(
        case
        for alg in DREAM_ALGS
        for case in both(f"{alg}, drawn", alg=alg, max_new_tokens=4, steps=3, temperature=0.4, top_k=8)
    ),
    *(
        case
        for alg in DREAM_ALGS
        for case in both(
            f"{alg}, drawn positions", alg=alg, max_new_tokens=4, steps=3, alg_temp=0.5 if alg == "entropy" else 0.1
        )
    ),
    *both(
        "entropy, all of it", alg="entropy", max_new_tokens=4, steps=3, alg_temp=0.4, temperature=0.5, top_p=0.95,
        top_k=8,
    ),
]  # fmt: skip
CACHES = {
    "no cache": {},
    "prefix cache": {"use_cache": True},
    "dual cache": {"use_cache": True, "dual_cache": True},
}
FAST_CASES = [
    case
    for cache, how in CACHES.items()
    for rule, arguments in (
        ("steps", dict(steps=16, gen_length=32, block_length=8)),
        ("threshold 0.3", dict(steps=32, gen_length=32, block_length=8, threshold=0.3)),
        ("threshold 0.6", dict(steps=32, gen_length=32, block_length=8, threshold=0.6)),
        ("factor 2", dict(steps=32, gen_length=32, block_length=8, factor=2.0)),
        ("factor 3", dict(steps=32, gen_length=32, block_length=8, factor=3.0)),
    )
    for case in both(f"{cache}, {rule}", **arguments, **how)
]


FAST_DREAM_CASES = [
    case
    for name, arguments in (
        ("no cache, threshold 0.5", dict(steps=8, alg="confidence_threshold", threshold=0.5)),
        ("no cache, threshold 0.8", dict(steps=16, alg="confidence_threshold", threshold=0.8)),
        ("prefix cache, threshold 0.5", dict(steps=8, alg="confidence_threshold", threshold=0.5, use_cache=True)),
        ("prefix cache, entropy", dict(steps=16, alg="entropy", use_cache=True)),
        (
            "dual cache, threshold 0.5",
            dict(steps=8, alg="confidence_threshold", threshold=0.5, use_cache=True, dual_cache=True),
        ),
        ("dual cache, entropy", dict(steps=16, alg="entropy", use_cache=True, dual_cache=True)),
    )
    for case in both(
        name, max_new_tokens=32, **arguments, **({"block_length": 8} if "use_cache" in arguments else {})
    )
]  # fmt: skip


# --- running


def ids(seed: int, length: int, vocab: int, never: tuple[int, ...]) -> list[int]:
    """A random prompt without special ids."""
    allowed = [i for i in range(vocab) if i not in never]
    return np.random.default_rng(seed).choice(allowed, length).tolist()


def golden_of(
    model: Any, counted: Counted, run: Run, cases: list[Any], vocab: int, never: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Runs every case at temperature 0, on the first prompt whose answer is free of special ids and of ties."""
    found = []
    for name, length, arguments in cases:
        runs, seed, counted.block = [], 0, arguments.get("block_length", 0)
        while len(runs) < SEEDS and seed < 20 * SEEDS:
            prompt, seed = ids(1000 * length + seed, length, vocab, never), seed + 1
            counted.passes = counted.idle = 0
            out = run(model, torch.tensor([prompt]), **arguments)[0, length:].tolist()
            if not set(out) & set(never):
                runs.append((-len(set(out)), prompt, out, counted.passes, counted.idle))
        for chosen in sorted(runs):
            _, prompt, out, passes, idle = chosen
            model.double()
            wide = run(model, torch.tensor([prompt]), **arguments)[0, length:].tolist()
            model.float()
            if wide == out:
                break
        else:
            raise RuntimeError(f"no prompt for {name}: {len(runs)} of {seed} answers are free of special ids")
        case = dict(name=name, prompt=prompt, arguments=arguments, tokens=out, forwards=passes, idle=idle)
        found.append(case)
        print(
            f"{name}: {passes} passes, {idle} idle, {len(set(out))} different tokens, {seed} tried",
            flush=True,
        )
    return found


def draws_of(
    model: Any, run: Run, cases: list[Any], vocab: int, never: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Counts the answers of `DRAWS` equal rows, for the first prompt whose answers are many and free of special ids."""
    found = []
    for name, length, arguments in cases:
        for seed in range(100):
            prompt = ids(5000 * length + seed, length, vocab, never)
            torch.manual_seed(seed)
            few = run(model, torch.tensor([prompt] * 200), **arguments)[:, length:]
            if len(torch.unique(few, dim=0)) < 3 or any((few == i).any() for i in never):
                continue
            out = run(model, torch.tensor([prompt] * DRAWS), **arguments)[:, length:]
            rare = torch.stack([(out == i).any(-1) for i in never]).any(0).float().mean()
            if rare <= 2e-4:
                break
        else:
            raise RuntimeError(f"no prompt for {name}")
        counts = collections.Counter(" ".join(map(str, row)) for row in out.tolist())
        # Answers too rare for a test are one entry, "".
        kept = {answer: n for answer, n in counts.most_common() if n >= DRAWS // 500}
        kept[""] = DRAWS - sum(kept.values())
        found.append(dict(name=name, prompt=prompt, arguments=arguments, counts=kept))
        print(f"{name}: seed {seed}, {len(kept)} answers, {kept[''] / DRAWS:.3f} rare")
    return found


def llada(folder: Path) -> dict[str, Any]:
    model = llada_model(folder)
    namespace("llada_reference", folder / "LLaDA")
    module = importlib.import_module("llada_reference.generate")

    def run(model: Any, prompts: torch.Tensor, **arguments: Any) -> torch.Tensor:
        # Guidance needs a mask of attention; ones change nothing.
        return module.generate(model, prompts, torch.ones_like(prompts), mask_id=95, **arguments)

    never, counted = (95, 90), Counted(model, 95)
    return dict(
        checkpoint="llada", preset="llada", reference="ML-GSAI/LLaDA generate.py @ b7e6c35",
        cases=golden_of(model, counted, run, LLADA_CASES, 97, never),
        draws=draws_of(model, run, LLADA_DRAWS, 97, never),
    )  # fmt: skip


def dream(folder: Path) -> dict[str, Any]:
    model = dream_model(folder)

    def run(model: Any, prompts: torch.Tensor, **arguments: Any) -> torch.Tensor:
        # What is not given would come from config.json, where transformers fills in a temperature of 1.
        plain = dict(temperature=0.0, top_p=None, top_k=None, alg_temp=None, eps=1e-3)
        return model.diffusion_generate(prompts, mask_token_id=96, **(plain | arguments))

    never, counted = (96, 93), Counted(model, 96)
    return dict(
        checkpoint="dream", preset="dream",
        reference="Dream's generation_utils.py as in NVlabs/Fast-dLLM dream/model @ 24cc59e",
        cases=golden_of(model, counted, run, DREAM_CASES, 101, never),
        draws=draws_of(model, run, DREAM_DRAWS, 101, never),
    )  # fmt: skip


def fast_dllm(folder: Path) -> dict[str, Any]:
    model = llada_model(folder)
    sys.path.insert(0, str(folder / "Fast-dLLM" / "llada"))
    nvlabs = importlib.import_module("generate")
    namespace("fast_dllm_v1", folder / "Fast-dLLM-v1" / "v1" / "llada")
    newer = importlib.import_module("fast_dllm_v1.generate")

    def run(model: Any, prompts: torch.Tensor, **arguments: Any) -> torch.Tensor:
        how = dict(arguments)
        cached, dual = how.pop("use_cache", False), how.pop("dual_cache", False)
        name = (
            "generate" if not cached else "generate_with_dual_cache" if dual else "generate_with_prefix_cache"
        )
        module = nvlabs if how.get("factor") is None else newer  # the older version has no factor
        return getattr(module, name)(model, prompts, mask_id=95, **how)[0]

    return dict(
        checkpoint="llada", preset="fast_dllm",
        reference="NVlabs/Fast-dLLM llada/generate.py @ 24cc59e; factor: v1/llada/generate.py",
        cases=golden_of(model, Counted(model, 95), run, FAST_CASES, 97, (95, 90)), draws=[],
    )  # fmt: skip


def fast_dllm_dream(folder: Path) -> dict[str, Any]:
    model = dream_model(folder)
    package = type(model).__module__.rpartition(".")[0]
    plain = importlib.import_module(f"{package}.generation_utils").DreamGenerationMixin
    blocks = importlib.import_module(f"{package}.generation_utils_block").DreamGenerationMixin

    def run(model: Any, prompts: torch.Tensor, **arguments: Any) -> torch.Tensor:
        how = dict(arguments)
        mixin = blocks if how.pop("use_cache", False) else plain  # as eval.py chooses
        model._sample = types.MethodType(mixin._sample, model)
        given = dict(temperature=0.0, top_p=None, top_k=None, alg_temp=None, eps=1e-3, mask_token_id=96) | how
        return types.MethodType(mixin.diffusion_generate, model)(prompts, **given)

    counted = Counted(model, 96)
    return dict(
        checkpoint="dream", preset="fast_dllm_dream", reference="NVlabs/Fast-dLLM dream/model @ 24cc59e",
        cases=golden_of(model, counted, run, FAST_DREAM_CASES, 101, (96, 93)), draws=[],
    )  # fmt: skip


MAKERS = {"llada": llada, "dream": dream, "fast_dllm": fast_dllm, "fast_dllm_dream": fast_dllm_dream}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--references", type=Path, required=True)
    parser.add_argument("names", nargs="*", default=list(MAKERS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names:
        found = {"sharpness": SHARPNESS, **MAKERS[name](args.references.resolve())}
        lines = ",\n  ".join(json.dumps(case) for case in found.pop("cases"))
        draws = ",\n  ".join(json.dumps(case) for case in found.pop("draws"))
        head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n " for key, value in found.items())
        text = f'{{{head}"cases": [\n  {lines}\n ],\n "draws": [\n  {draws}\n ]}}\n'
        json.loads(text)
        (TESTS / "conformance" / "goldens" / f"{name}.json").write_text(text)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
