"""The configuration of a diffusion transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mercury_jax.config import ModelConfig, at_least, one_of, refuse

Level = Literal["log_linear", "clipped", "time"]

# What a DiT does not have; a config that asks for it is refused instead of ignored.
_FIXED = {
    "rope_fraction": 1.0, "rope_scaling": None, "qk_norm": False, "qkv_bias": False, "out_bias": False,
    "mlp_bias": False, "window": None, "experts": None, "tied": False,
    "zero_centred": False, "scale_embed": False, "alignment": "same_position", "predicts_next": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DiTConfig(ModelConfig):
    """A DiT as masked diffusion uses it (arXiv 2212.09748; MDLM, arXiv 2406.07524).

    LayerNorm without a bias, shifted, scaled and gated by a function of the noise level; GELU; q, k and v
    from one matrix. pattern is bidirectional, or block_causal (BD3-LM, arXiv 2503.09573).
    level says what number the model is told where the noise has time t, with e = `level_eps`:
        log_linear  -log(1 - (1 - e) t)             (MDLM, DUO)
        clipped     min(-log(1 - t), -log(e))       (BD3-LM)
        time        e + (1 - 2 e) t                 (GIDD)
    With timed False it is told 0 instead, always: of such a model the published weights know no other.
    """

    pattern: Literal["bidirectional", "block_causal", "causal_encoder"] = "bidirectional"
    qk_norm: bool = False
    tied: bool = False
    zero_centred: bool = False
    scale_embed: bool = False
    norm_eps: float = 1e-5
    cond: int = 128  # width of the embedded noise level
    frequencies: int = 256  # cosines and sines that the level is first turned into
    level: Level = "log_linear"
    level_eps: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, cond=self.cond)
        one_of(Level, level=self.level)
        for name, value in _FIXED.items():
            if getattr(self, name) != value:
                raise refuse(name, getattr(self, name), f"{value!r}: a DiT has no other")
        if self.pattern == "causal_encoder":
            raise refuse("pattern", self.pattern, "bidirectional or block_causal, for a DiT")
        if self.kv_heads != self.heads:
            raise refuse("kv_heads", self.kv_heads, f"heads = {self.heads}: q, k and v are one matrix")
        if self.frequencies < 2 or self.frequencies % 2:
            raise refuse("frequencies", self.frequencies, "an even number: a cosine and a sine of each")
        if not 0 < self.level_eps < 0.5:
            raise refuse("level_eps", self.level_eps, "0 < level_eps < 0.5")
