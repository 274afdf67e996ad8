"""Writes tests/hub/config_keys.json: what transformers' configuration classes write into config.json, by architecture.

`base` are the keys of the base class, those of transformers 4 included, which classes outside of transformers inherit:
LLaDA, Dream, SDAR and others, whose own keys are in the config.json of the goldens. Run it again with a new release of
transformers: `python qa/parity/config_keys.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers  # pyright: ignore[reportMissingImports]
from transformers.models.auto.configuration_auto import (  # pyright: ignore[reportMissingImports]
    CONFIG_MAPPING,
)

ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe", "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4", "DiffusionGemmaForBlockDiffusion": "diffusion_gemma",
}  # fmt: skip


def written(architecture: str) -> dict:
    """The defaults of the class, as `save_pretrained` would write them, each key included."""
    made = CONFIG_MAPPING[ARCHITECTURES[architecture]]()
    found = json.loads(json.dumps(made.to_dict(), default=str))
    return {**found, "architectures": [architecture], "dtype": "bfloat16"}


# Of transformers 4's PretrainedConfig.to_dict(), with the defaults there.
OLDER: dict[str, Any] = dict(
    output_hidden_states=False, output_attentions=False, return_dict=True, torchscript=False, use_bfloat16=False,
    tf_legacy_loss=False, pruned_heads={}, chunk_size_feed_forward=0, is_encoder_decoder=False, is_decoder=False,
    cross_attention_hidden_size=None, add_cross_attention=False, tie_encoder_decoder=False, finetuning_task=None,
    id2label={"0": "LABEL_0", "1": "LABEL_1"}, label2id={"LABEL_0": 0, "LABEL_1": 1}, task_specific_params=None,
    problem_type=None, tokenizer_class=None, prefix=None, bos_token_id=None, sep_token_id=None,
    decoder_start_token_id=None, _name_or_path="", _commit_hash=None, _attn_implementation_autoset=True,
    transformers_version="4.53.2", max_length=20, min_length=0, do_sample=False, early_stopping=False, num_beams=1,
    num_beam_groups=1, diversity_penalty=0.0, temperature=1.0, top_k=50, top_p=1.0, typical_p=1.0,
    repetition_penalty=1.0, length_penalty=1.0, no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0,
    bad_words_ids=None, num_return_sequences=1, output_scores=False, return_dict_in_generate=False,
    forced_bos_token_id=None, forced_eos_token_id=None, remove_invalid_values=False,
    exponential_decay_length_penalty=None, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip

if __name__ == "__main__":
    base = json.loads(json.dumps(transformers.PreTrainedConfig().to_dict(), default=str))
    unsaid = {
        key: x for key, x in {**OLDER, **base}.items() if key not in ("architectures", "model_type", "dtype")
    }
    table = {"transformers": transformers.__version__, "base": unsaid}
    table["classes"] = {name: written(name) for name in ARCHITECTURES}
    out = Path(__file__).parents[2] / "tests/hub/config_keys.json"
    out.write_text(json.dumps(table, separators=(",", ":")) + "\n")
