"""Loads, describes, converts and saves models, on disk and on the Hugging Face hub. No code in a file is executed.

    load.py              `load`, `config_of`, `info`; opening a checkpoint
    function.py          `from_function`: the user's own denoiser as an `LM`, with parameters in memory
    export.py            `convert`, `save`, `save_hf`
    adapters.py          LoRA adapters in PEFT's file format
    drafters.py          block drafters, beside the model that they draft for
    folder.py            downloads a checkpoint folder in Hugging Face's layout, and reads its headers
    params.py            parameters: layout conversion, placement on devices, memory estimates
    family.py            `Family` and `register`; families/ has one file per architecture
    generation.py        published sampling settings, and generation_config.json
    tokenizer.py         tokenizers of checkpoints, built from the files that tokenizer_files.py reads
    chat_template.py     chat templates, in a sandbox with limits of time and memory

To add a family, write one file in families/ that passes a `Family` to `register`.
"""

from mercury_jax.hub import families as _families  # noqa: F401  every family registers itself
from mercury_jax.hub.adapters import save_adapter
from mercury_jax.hub.drafters import drafter_of, load_drafter, save_drafter
from mercury_jax.hub.export import convert, save, save_hf, tiny_random
from mercury_jax.hub.family import register
from mercury_jax.hub.load import NANO, config_of, folder_of, info, is_native, load, takes_mask, tokenizer_of

__all__ = [
    "NANO", "config_of", "convert", "drafter_of", "folder_of", "info", "is_native", "load", "load_drafter",
    "register", "save", "save_adapter", "save_drafter", "save_hf", "takes_mask", "tiny_random", "tokenizer_of",
]  # fmt: skip
