"""Goldens of the block-causal families: what the references' own samplers return on our random checkpoints.

    python qa/parity/reference_blocks.py FOLDER [sdar llada2 llada21 fast_dllm_v2]

FOLDER holds the public code, which this script imports and never copies: `SDAR` (JetAstra/SDAR), `dllm` (ZHZisZZ/dllm)
and `fast_dllm_v2` (modeling.py and configuration.py of the checkpoint Efficient-Large-Model/Fast_dLLM_v2_7B). It needs
torch, transformers 4.57 and einops. Each family becomes tests/conformance/goldens/<family>.json, which
`test_conformance.py` reads.

What is changed for the run: the logit of the mask is -inf (these samplers can write the mask token, which a trained
model never predicts, and ours forbids it); SDAR's draw is the argmax where a case says `greedy` (its script divides by
the temperature and has no greedy mode; its evaluation has one, top_k=1 with the confidence before the cut, which is the
same); attention masks are fp32 and packages for GPUs are replaced by plain torch.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

TESTS = Path(__file__).parents[2] / "tests"
CHECKPOINTS = TESTS / "hub" / "goldens"


class Counted:
    """A reference model that counts its calls and never predicts the mask.

    Attributes:
        calls: One entry per call: the number of tokens that it was given, and whether it wrote to the cache.
    """

    def __init__(self, model: Any, mask: int):
        self.model, self.mask, self.calls = model.eval(), mask, []
        self.device = torch.device("cpu")

    def eval(self) -> Counted:
        return self

    def __call__(self, tokens: Any, **given: Any) -> Any:
        seen = given.get("attention_mask")
        if seen is not None and seen.is_floating_point():
            given["attention_mask"] = seen.float()
        stores = bool(given.get("store_kv") or given.get("update_past_key_values"))
        self.calls.append((tokens.shape[1], stores))
        out = self.model(tokens, **given)
        out.logits[..., self.mask] = -torch.inf
        return out

    def denoising_passes(self) -> int:
        """How many of the calls denoise; the others write finished blocks to the cache."""
        return sum(not stores for _, stores in self.calls)


def package(name: str, path: Path | None = None, **members: Any) -> types.ModuleType:
    """Registers a module without running the package's own `__init__`, which imports what a run does not need."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = [] if path is None else [str(path)]
    module.__dict__.update(members)
    sys.modules[name] = module
    return module


def prompt_of(length: int, seed: int, vocab: int = 70) -> list[int]:
    """A random prompt without special ids."""
    return np.random.default_rng(seed).integers(1, vocab, length).tolist()


def save(family: str, checkpoint: str, mask: int, reference: str, cases: list[dict[str, Any]]) -> None:
    """Writes goldens/<family>.json in the form that `test_conformance.py` reads, one case a line."""
    about = dict(reference=reference, preset=family, checkpoint=checkpoint, mask=mask)
    head = json.dumps(about).removesuffix("}")
    for number, case in enumerate(cases):
        case["name"] = f"{number} prompt of {len(case['prompt'])}"
        print(family, case["name"], case["arguments"], case["forwards"], case["tokens"][:12])
    lines = ",\n".join(json.dumps(case) for case in cases)
    (TESTS / "conformance" / "goldens" / f"{family}.json").write_text(f'{head}, "cases": [\n{lines}\n]}}\n')


# --- SDAR


def sdar(folder: Path) -> None:
    """`block_diffusion_generate` of SDAR's generate.py."""

    def rms_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    def attention(q: Any, k: Any, v: Any, causal: bool, softmax_scale: float) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=softmax_scale, enable_gqa=True).transpose(1, 2)

    package("flash_attn", flash_attn_func=attention, flash_attn_varlen_func=None)
    for name in ("flash_attn.ops", "flash_attn.ops.triton"):
        package(name)
    package("flash_attn.ops.triton.layer_norm", rms_norm_fn=rms_norm)
    package("flash_attn.bert_padding", index_first_axis=None, pad_input=None, unpad_input=None)
    package("sdar", folder / "SDAR" / "training" / "model" / "SDAR-4B-Chat")
    package("sdar.fused_linear_diffusion_cross_entropy", FusedLinearDiffusionCrossEntropyLoss=None)
    import transformers  # pyright: ignore[reportMissingImports]
    from transformers import cache_utils, utils  # pyright: ignore[reportMissingImports]

    cache_utils.SlidingWindowCache = getattr(cache_utils, "SlidingWindowCache", cache_utils.StaticCache)
    utils.LossKwargs = getattr(utils, "LossKwargs", utils.TransformersKwargs)
    modeling = importlib.import_module("sdar.modeling_sdar")
    package("sdar_script", folder / "SDAR")
    generate = importlib.import_module("sdar_script.generate").block_diffusion_generate
    config = importlib.import_module("sdar.configuration_sdar").SDARConfig.from_pretrained(
        CHECKPOINTS / "sdar"
    )
    model = modeling.SDARForCausalLM.from_pretrained(CHECKPOINTS / "sdar", config=config, dtype=torch.float32)
    del transformers
    mask = config.mask_token_id
    cases = []
    for length, seed, call in SDAR_CASES:
        counted, prompt = Counted(model, mask), prompt_of(length, seed)
        greedy = call.get("temperature", 0.0) == 0.0
        argmax = lambda p, num_samples: p.argmax(-1, keepdim=True)
        given = {k: v for k, v in call.items() if not (greedy and k == "temperature")}
        with mock.patch.object(torch, "multinomial", argmax) if greedy else mock.MagicMock():
            ids = torch.tensor([prompt])
            stop = [config.eos_token_id]
            x = generate(counted, {"input_ids": ids}, mask, stopping_criteria_idx=stop, **given)
        new = x[0, length:].tolist()
        new = new[: new.index(mask)] if mask in new else new  # blocks after one that ended the text
        cases.append(dict(arguments=call, prompt=prompt, tokens=new, forwards=counted.denoising_passes()))
    save("sdar", "sdar", mask, "JetAstra/SDAR generate.py @ c2041a8", cases)


SDAR_CASES = [
    (9, 1, dict(gen_length=31, block_length=4, denoising_steps=4, temperature=0.0)),
    (101, 2, dict(gen_length=30, block_length=4, denoising_steps=4, temperature=0.0)),
    (9, 3, dict(gen_length=31, block_length=4, denoising_steps=4, temperature=0.0, confidence_threshold=0.3)),
    (102, 4, dict(gen_length=30, block_length=4, denoising_steps=4, temperature=0.0, confidence_threshold=0.2)),
    (8, 5, dict(gen_length=24, block_length=4, denoising_steps=2, temperature=0.0,
                remasking_strategy="low_confidence_static")),
    (100, 6, dict(gen_length=24, block_length=4, denoising_steps=3, temperature=0.0,
                  remasking_strategy="low_confidence_static")),
    (11, 7, dict(gen_length=21, block_length=4, denoising_steps=4, temperature=0.0,
                 remasking_strategy="sequential")),
    (96, 8, dict(gen_length=24, block_length=4, denoising_steps=3, temperature=0.0,
                 remasking_strategy="sequential")),
]  # fmt: skip


# --- LLaDA2.0 and LLaDA2.1


def llada2_model(folder: Path) -> tuple[Any, Any]:
    """The reference model of both, and what stands in for the tokenizer."""
    names = ["", "core", "core.samplers", "pipelines", "pipelines.llada2", "pipelines.llada2.models"]
    for name in [*names, "pipelines.llada21"]:
        full = f"dllm.{name}".rstrip(".")
        package(full, folder / "dllm" / full.replace(".", "/"))
    modeling = importlib.import_module("dllm.pipelines.llada2.models.modeling_llada2_moe")
    model = modeling.LLaDA2MoeModelLM.from_pretrained(
        CHECKPOINTS / "llada2", dtype=torch.float32, attn_implementation="sdpa"
    )
    return model, types.SimpleNamespace(mask_token_id=LLADA2_MASK, eos_token_id=0, pad_token_id=75)


LLADA2_MASK = 76


def run_dllm(
    sampler: Callable[..., Any], model: Any, tokenizer: Any, cases: list[Any]
) -> list[dict[str, Any]]:
    """Runs one of dllm's samplers; what follows an end of text is kept."""
    done = []
    for length, seed, call in cases:
        counted, prompt = Counted(model, tokenizer.mask_token_id), prompt_of(length, seed)
        x = sampler(model=counted, tokenizer=tokenizer).sample([prompt], **call)
        done.append(
            dict(arguments=call, prompt=prompt, tokens=x[0, length:].tolist(), forwards=len(counted.calls))
        )
    return done


def llada2(folder: Path) -> None:
    """`LLaDA2Sampler` of dllm."""
    model, tokenizer = llada2_model(folder)
    sampler = importlib.import_module("dllm.pipelines.llada2.sampler").LLaDA2Sampler
    cases = run_dllm(sampler, model, tokenizer, LLADA2_CASES)
    save("llada2", "llada2", LLADA2_MASK, "ZHZisZZ/dllm dllm/pipelines/llada2/sampler.py @ ca17675", cases)


LLADA2_CASES = [
    (7, 44, dict(max_new_tokens=50)),
    (100, 12, dict(max_new_tokens=40, threshold=0.4)),
    (40, 45, dict(max_new_tokens=56, steps_per_block=5, threshold=0.4)),
    (21, 14, dict(max_new_tokens=40, steps_per_block=8, threshold=0.95)),
    (90, 15, dict(max_new_tokens=12, steps_per_block=32, threshold=0.5)),
    (7, 11, dict(max_new_tokens=50)),  # ends its text in the fifth token
]


def llada21(folder: Path) -> None:
    """`LLaDA21Sampler` of dllm: joint thresholds with editing."""
    model, tokenizer = llada2_model(folder)
    sampler = importlib.import_module("dllm.pipelines.llada21.sampler").LLaDA21Sampler
    cases = run_dllm(sampler, model, tokenizer, LLADA21_CASES)
    save("llada21", "llada2", LLADA2_MASK, "ZHZisZZ/dllm dllm/pipelines/llada21/sampler.py @ ca17675", cases)


LLADA21_CASES = [
    (7, 21, dict(max_new_tokens=50)),
    (100, 22, dict(max_new_tokens=40, threshold=0.4, editing_threshold=0.3)),
    (40, 23, dict(max_new_tokens=56, threshold=0.5, editing_threshold=0.1)),
    (21, 24, dict(max_new_tokens=40, threshold=0.6, editing_threshold=0.0, max_post_steps=3)),
    (90, 25, dict(max_new_tokens=30, threshold=0.5, editing_threshold=0.2, num_to_transfer=3)),
]


# --- Fast-dLLM v2


def fast_dllm_v2(folder: Path) -> None:
    """`generate` of the checkpoint's own modeling.py."""
    package("fast_dllm_v2", folder / "fast_dllm_v2")
    modeling = importlib.import_module("fast_dllm_v2.modeling")
    model = modeling.Fast_dLLM_QwenForCausalLM.from_pretrained(CHECKPOINTS / "fast_dllm", dtype=torch.float32)
    forward, mask, cases = type(model).forward, 98, []
    for length, seed, call in FAST_DLLM_CASES:
        prompt, calls = prompt_of(length, seed), []

        def counted(self: Any, input_ids: Any, calls: list[Any] = calls, **given: Any) -> Any:
            calls.append((input_ids.shape[1], bool(given.get("update_past_key_values"))))
            given["block_size"] = 8  # some calls of `generate` leave it to a default of 32
            out = forward(self, input_ids=input_ids, **given)
            out.logits[..., mask] = -torch.inf
            return out

        with mock.patch.object(type(model), "forward", counted):
            x = model.eval().generate(
                torch.tensor([prompt]), mask_id=mask, stop_token=95, block_size=8, **call
            )[0]
        passes = sum(not stores for _, stores in calls)
        new = x[0, length:].tolist()
        # It counts blocks from the one that the prompt ends in, and adds a token.
        case = dict(arguments=call, prompt=prompt, tokens=new, forwards=passes, max_tokens=len(new))
        cases.append(case)
    save("fast_dllm_v2", "fast_dllm", mask, "Efficient-Large-Model/Fast_dLLM_v2_7B modeling.py", cases)


FAST_DLLM_CASES = [
    (5, 31, dict(max_new_tokens=24, small_block_size=8, threshold=0.9)),
    (101, 32, dict(max_new_tokens=24, small_block_size=8, threshold=0.4)),
    (13, 33, dict(max_new_tokens=24, small_block_size=2, threshold=0.3)),
    (96, 34, dict(max_new_tokens=24, small_block_size=4, threshold=0.2)),
    (48, 35, dict(max_new_tokens=32, small_block_size=4, threshold=1)),
]

FAMILIES = {f.__name__: f for f in (sdar, llada2, llada21, fast_dllm_v2)}

if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.no_grad():
        for chosen in sys.argv[2:] or FAMILIES:
            FAMILIES[chosen](Path(sys.argv[1]))
