"""Models on disk and on the Hugging Face hub: load, describe, convert and save them. Nothing in a file is executed.

    load.py              `load`, `config_of`, `info`; opening a checkpoint
    function.py          `from_function`: a denoiser of one's own as a model, with parameters in memory
    export.py            `convert`, `save`, `save_hf`
    adapters.py          LoRA adapters in PEFT's file format
    folder.py            files of a checkpoint folder in Hugging Face's layout, and downloading one
    params.py            parameters: their memory, and their way from tensors onto devices
    family.py            what a checkpoint family is, and `register`; families/ has one file each
    tokenizer.py         tokenizers of checkpoints, from the files that tokenizer_files.py reads
    chat_template.py     chat templates, in the sandbox of template_sandbox.py

A new family is one file in families/, which passes its `Family` to `register`.
"""

from mercury_jax.hub import families as _families  # noqa: F401  every family registers itself
from mercury_jax.hub.adapters import save_adapter
from mercury_jax.hub.export import convert, save, save_hf
from mercury_jax.hub.family import register
from mercury_jax.hub.load import NANO, config_of, folder_of, info, is_native, load, takes_mask, tokenizer_of

__all__ = [
    "NANO", "config_of", "convert", "folder_of", "info", "is_native", "load", "register", "save", "save_adapter",
    "save_hf", "takes_mask", "tokenizer_of",
]  # fmt: skip
