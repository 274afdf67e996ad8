"""The tables of families in docs: `python -m qa.parity.tables` makes that of models.md, from the goldens, and with
`--settings` that of conformance.md, from the families' published settings.
"""

import sys

import numpy as np

from mercury_jax import models
from mercury_jax.hub.family import families
from mercury_jax.hub.generation import describe
from tests.hub.goldens_of import GOLDENS, NAMES, golden, logits_of
from tests.hub.test_diffusion_gemma import told
from tests.models.test_dit import apply, whole

HEAD = (
    "| family | checkpoints | noise | alignment | block | logits | its own | generation |\n"
    "|---|---|---|---|---|---|---|---|"
)


def difference(name: str) -> float:
    """Largest absolute difference of our fp32 logits from the reference's."""
    g = golden(name)
    if "canvas" in g.said:
        pairs = [
            (told(g, False)[1], g.said["logits"]),
            (told(g, True)[1], g.said["logits_conditioned"]),
        ]
        return max(float(np.abs(a - b).max()) for a, b in pairs)
    want = g.said["logits"]
    if (c := g.opened.config).alignment == "shifted" and c.pattern == "bidirectional":
        want = np.concatenate([want[:, :1], want[:, :-1]], axis=1)
    return float(np.abs(ours(name) - want).max())


def ours(name: str) -> np.ndarray:
    g = golden(name)
    if models.kind(g.opened.config) != "dit":
        return logits_of(g, g.said["tokens"])
    time = g.said["time"] if g.opened.config.timed else None
    return np.asarray(
        apply(g.opened.model, g.params, g.said["tokens"], *whole(g.opened.model, g.said["tokens"]), time)
    )


def rows() -> list[str]:
    found: dict[str, list[str]] = {}
    for name in NAMES:
        found.setdefault(golden(name).family.name, []).append(name)
    out = []
    for family in families():
        names = found.get(family.name, [])
        if not names:
            continue
        c = golden(names[0]).opened.config
        kind = golden(names[0]).opened.noise
        noise = "none" if kind is None else kind.kind
        block = "" if c.autoregressive else family.block
        alignment = "next token" if c.autoregressive else c.alignment.replace("_", " ")
        worst = max(difference(n) for n in names)
        own = max(float(golden(n).said["fp64_diff"].max()) for n in names)
        ids = ", ".join(f"`{x}`" for x in family.checkpoints[:3])
        whole = "exact" if any((GOLDENS / n / "generation.safetensors").exists() for n in names) else ""
        cells = (
            family.name, ids, noise, alignment, block, f"{worst:.1e}", f"{own:.1e}", whole,
        )  # fmt: skip
        out.append(f"| {' | '.join(cells)} |")
    return out


def settings() -> list[str]:
    """The published settings of each family, without a generation_config.json."""
    out = ["| family | settings | source |", "|---|---|---|"]
    for family in families():
        found = family.decoding({}, {}) if callable(family.decoding) else family.decoding
        if found:
            out.append(f"| {family.name} | {describe(found)} | {found['source']} |")
    return out


if __name__ == "__main__":
    if sys.argv[1:] == ["--settings"]:
        print("\n".join(settings()))
    else:
        print("\n".join([HEAD, *rows()]))
