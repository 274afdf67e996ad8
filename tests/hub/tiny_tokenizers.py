"""Small tokenizers in the forms that checkpoints have, trained on the spot, and chat templates in miniature.

`byte_level` is Qwen's and Llama 3's form, `sentencepiece` Gemma's and Llama 2's. Each is a folder's files by
name. The templates do with messages what those of the families do; they stand in `templates/`.
"""

import functools
import json
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

WORDS = [
    "def", "return", "value", "print", "user", "model", "system", "thought", "the", "quick", "brown", "fox",
]  # fmt: skip
TEXTS = [f"{a} {b}({i}):\n    {b} = {a}  # {i}\n\n" for i, a in enumerate(WORDS) for b in WORDS]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>", "<|user|>", "<|assistant|>", "<|mask|>"]  # fmt: skip
CONTROL = ["<think>", "</think>", "<tool_call>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
GEMMA = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<|channel>",
    "<channel|>",
]  # fmt: skip
PLAIN = ["\n\n", "    ", "<table>"]  # added for the sake of length, not of control


FOLDER = Path(__file__).parent / "templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.iterdir())}
BYTE_LEVEL = [name for name in TEMPLATES if name != "turns"]


@functools.cache
def byte_level(template: str | None = "chatml", normal: bool = True) -> dict[str, bytes]:
    """BPE over bytes; special tokens behind the vocabulary. normal: composed to NFC first, as Qwen's."""
    tok = Tokenizer(BPE())
    tok.normalizer = normalizers.NFC() if normal else None
    cut = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated")
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(TEXTS, BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    tok.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tok.add_tokens([AddedToken(t, normalized=False) for t in [*CONTROL, *PLAIN]])
    about = {
        "bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "mask_token": "<|mask|>",
    }  # fmt: skip
    return _files(tok.to_str(), about, TEMPLATES.get(template or ""))


@functools.cache
def sentencepiece(template: str | None = "turns", form: str = "gemma") -> dict[str, bytes]:
    """BPE over characters with bytes to fall back to; special tokens are entries of the vocabulary.

    form: what becomes of spaces. "llama" puts one before each text and takes it away again; "metaspace" says
    the same in one step.
    """
    tok = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tok.normalizer = normalizers.Replace(" ", "▁")
    tok.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_previous")
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    names = [*GEMMA, *PLAIN, *(f"<0x{b:02X}>" for b in range(256))]
    tok.train_from_iterator(TEXTS, BpeTrainer(vocab_size=420, special_tokens=names, show_progress=False))
    end = [decoders.Strip(" ", 1, 0)]
    if form == "llama":
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tok.pre_tokenizer = None  # pyright: ignore[reportAttributeAccessIssue]
        tok.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
        )
    if form == "metaspace":
        tok.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
        )
        tok.normalizer = None  # pyright: ignore[reportAttributeAccessIssue]
        tok.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    bos = ("<bos>", tok.token_to_id("<bos>"))
    tok.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    data = json.loads(tok.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if not t["content"].startswith("<0x")]
    for t in data["added_tokens"]:
        t["special"] = t["content"] in GEMMA[:7]
    about = {
        "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
        "mask_token": "<mask>",
    }  # fmt: skip
    return _files(json.dumps(data), about, TEMPLATES.get(template or ""))


def _files(tokenizer: str, about: dict[str, str], template: str | None) -> dict[str, bytes]:
    made = {"tokenizer.json": tokenizer.encode(), "tokenizer_config.json": json.dumps(about).encode()}
    return made if template is None else made | {"chat_template.jinja": template.encode()}


def reference(source: str, messages, **variables) -> str:
    """The same by jinja2 alone, set up as transformers does."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    source = source.replace("{%- generation %}", "{%- if true %}").replace(
        "{%- endgeneration %}", "{%- endif %}"
    )
    return env.from_string(source).render(messages=messages, **variables)
