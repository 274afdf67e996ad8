"""The cases of `mercury bench gpu check | speed | model`, in order: the forms that models need first, small before
large.

Only data: the child process finds the work by its name (`worker.WORK`). Lists with `small` run the same code with small
shapes on any machine. Imports no JAX.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from mercury_jax.bench.gpu.runner import GpuCase

BF16, FP16, INT8, FP8 = "bfloat16", "float16", "int8", "float8_e4m3fn"
HOPPER = "sm_90a"  # as in `kernels.device`, which would import JAX
KERNELS = (("MERCURY_KERNELS", "1"),)  # a check runs every form, whatever an earlier check found
WIDTHS = (64, 128, 256, 512)  # head sizes
EXPERTS = {"up": (2816, 1408), "down": (704, 2816)}  # of DiffusionGemma: [inputs, outputs] of a matrix
GEMMA, MODEL_100M = "diffusiongemma-26b-a4b", "mercury-100m"
# By default XLA's command buffers leave loops out; with these flags the bodies of loops become CUDA graphs too.
GRAPHS = (
    "XLA_FLAGS",
    "--xla_gpu_enable_command_buffer="
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
)
OFF = ("MERCURY_KERNELS", "0")


# --- check


def about(small: bool, env: tuple[tuple[str, str], ...] = ()) -> list[GpuCase]:
    """The first cases of every command: versions and the device, then the roofline that everything is compared with.

    Args:
        small: Whether to use small arrays.
        env: Environment variables of the process.

    Returns:
        Two cases.
    """
    size = {"megabytes": 64, "width": 512} if small else {"megabytes": 2048, "width": 8192}
    return [
        GpuCase("about", "about", {}, limit=90.0, env=env),
        GpuCase("ceilings", "ceilings", size, limit=60.0, env=env),
    ]


def check(chip: str | None, seed: int, small: bool = False) -> list[GpuCase]:
    """The cases of every kernel form, those that models need first, each from its smallest shape up.

    Args:
        chip: "sm_90a", "sm_100a" or "tpu", as in `kernels.device`; None where no kernel is for this device.
        seed: Draws the inputs.
        small: Few small shapes, for the interpreter.

    Returns:
        The cases in the order in which they run, with NVIDIA's memory checker at the end.
    """
    if small:
        found = [*_small()]
    elif chip is None:
        return []
    else:
        found = [*_attention(()), *_grouped(False)]
        more = (("int8",), ("page",), ("page", "int8"), ("softcap",), ("fp16",))
        found += [*itertools.chain.from_iterable(_attention(m) for m in more), *_grouped(True)]
        if chip != HOPPER:  # grouped products and paged attention exist for Hopper only
            found = [c for c in found if c.work == "attention" and not c.asked["shape"].get("page")]
    draws = 1 if small else 2
    found = [c._replace(asked=c.asked | {"seed": seed, "draws": draws}, env=KERNELS) for c in found]
    first = [next(c for c in found if c.work == work) for work in ("attention", "grouped") if any(
        c.work == work for c in found)]  # fmt: skip
    told = {"cases": [{"work": c.work, "asked": c.asked} for c in first]}
    return [
        *found,
        GpuCase("compute-sanitizer", "sanitizer", told, limit=120.0, least=30.0, env=KERNELS, alone=True),
    ]


def _case(work: str, form: str, shape: dict[str, Any], limit: float) -> GpuCase:
    name = f"{form} " + " ".join(f"{k}={v}" for k, v in shape.items() if k not in ("width", "dtype"))
    return GpuCase(name.strip(), work, {"shape": shape}, limit=limit, form=form)


def _attention(what: tuple[str, ...]) -> Iterator[GpuCase]:
    """The cases of one kind of form for each head size.

    Args:
        what: Any of "int8" (keys), "page" (paged keys), "softcap" and "fp16"; () for plain bf16.
    """
    for width in WIDTHS:
        if width == 512 and "int8" in what:
            continue  # the kernel's shared memory has no room to convert them
        dtype = FP16 if "fp16" in what else BF16
        shape: dict[str, Any] = {"width": width, "dtype": dtype}
        shape |= {"int8": True} if "int8" in what else {}
        shape |= {"page": 64 if width == 256 else 128} if "page" in what else {}
        shape |= {"softcap": 30.0} if "softcap" in what else {}
        parts = ["attention", str(width), dtype, *(["int8"] * ("int8" in what)), *(["paged"] * ("page" in what)),
                 *(["softcap"] * ("softcap" in what))]  # fmt: skip
        groups = {256: 8, 512: 2}.get(width, 4)
        sizes = [
            dict(b=1, t=8, h=4, g=2, s=256, r=1),  # few rows, so that the keys are split
            # Gaps, three ranges, and a last tile of rows that is not full.
            dict(b=2, t=40, h=16, g=groups, s=1152, r=3),
        ]
        if not what:
            # A batch of canvases, where nothing is split.
            sizes.append(dict(b=8, t=256, h=16, g=groups, s=2048, r=2))
        limit = 45.0 if width == 512 else 25.0  # the widest takes several times as long to compile
        yield from (_case("attention", "-".join(parts), shape | size, limit) for size in sizes)


def _grouped(gradient: bool) -> Iterator[GpuCase]:
    """The cases of the grouped product, or of the gradient of its rows, for each dtype of the matrices."""
    for dtype in (BF16, INT8, FP8):
        form = f"grouped-{dtype}" + "-gradient" * gradient
        more = {"gradient": True} if gradient else {}
        for rows, experts, (inputs, outputs) in ((200, 10, (128, 64)), (2048, 128, EXPERTS["down"]),
                                                (2048, 128, EXPERTS["up"])):  # fmt: skip
            shape = dict(dtype=dtype, rows=rows, experts=experts, inputs=inputs, outputs=outputs) | more
            yield _case("grouped", form, shape, limit=30.0)


def _small() -> Iterator[GpuCase]:
    """Forms that the interpreter runs in some seconds each."""
    tiny = dict(b=1, t=3, h=2, g=1, s=128, r=2)
    for width, more in ((64, {}), (64, {"int8": True, "page": 128}), (512, {})):
        parts = [
            "attention",
            str(width),
            BF16,
            *("int8" for k in more if k == "int8"),
            *("paged" for k in more if k == "page"),
        ]
        yield _case("attention", "-".join(parts), {"width": width, "dtype": BF16} | more | tiny, limit=60.0)
    for gradient in (False, True):
        shape = dict(dtype=BF16, rows=90, experts=10, inputs=64, outputs=64) | (
            {"gradient": True} if gradient else {}
        )
        yield _case("grouped", f"grouped-{BF16}" + "-gradient" * gradient, shape, limit=60.0)


# --- speed


def speed(small: bool = False) -> list[GpuCase]:
    """Attention and grouped products beside cuDNN and XLA; a model with kernels and CUDA graphs on and off."""
    shapes = SMALL_SHAPES if small else SHAPES
    found = []
    for shape, way in itertools.product(shapes, ("cudnn", "xla", "ours")):
        if way == "ours" or not shape.get("int8"):  # cuDNN and XLA read no int8 keys
            found.append(_timed("time_attention", shape, way, 60.0))
    kinds = {BF16: ("ragged_dot", "tiles", "ours"), INT8: ("tiles", "ours")}
    routings = ("skewed",) if small else ("even", "random", "skewed")
    tiny, large = (
        dict(rows=90, experts=10, width=64, inner=64),
        dict(rows=2048, experts=128, width=2816, inner=704),
    )
    for (dtype, ways), routing in itertools.product(kinds.items(), routings):
        shape = (tiny if small else large) | {"dtype": dtype, "routing": routing}
        # XLA's ragged_dot multiplies every row by every expert: its time does not depend on the routing.
        some = [way for way in ways if way != "ragged_dot" or routing == routings[-1]]
        found += [_timed("time_grouped", shape, way, 60.0) for way in some]
    model = "tiny" if small else MODEL_100M
    asked = {"model": model, "batch": 1, "prefix": 64 if small else 1024, "turns": 3 if small else 5}
    # On a CPU there are no graphs, and its XLA does not know the flag.
    for kernels, graphs in itertools.product((True, False), (False,) if small else (False, True)):
        words = [
            "kernels on" if kernels else "kernels off",
            "loops as graphs" if graphs else "loops as XLA chooses",
        ]
        env = (() if kernels else (OFF,)) + ((GRAPHS,) if graphs else ())
        name = f"decoding {model}, {', '.join(words)}"
        found.append(GpuCase(name, "decoding", asked, limit=100.0, least=20.0, env=env, alone=not small))
    return found


def _timed(work: str, shape: dict[str, Any], way: str, limit: float) -> GpuCase:
    what = " ".join(f"{k}={v}" for k, v in shape.items())
    return GpuCase(
        f"{work.removeprefix('time_')} {what}, {way}", work, {"shape": shape, "way": way}, limit=limit
    )


def _canvas(t: int, s: int, heads: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    return dict(b=1, t=t, s=s, h=heads[0], g=heads[1], width=heads[2]) | more


_LOCAL, _GLOBAL, _LLADA = (16, 8, 256), (16, 2, 512), (32, 8, 128)
SHAPES = [
    _canvas(256, 1024, _LOCAL), _canvas(256, 8192, _LOCAL), _canvas(256, 8192, _LOCAL, int8=True),
    _canvas(256, 8192, _GLOBAL), _canvas(32, 1024, _LLADA), _canvas(32, 8192, _LLADA),
    _canvas(256, 1024, _LOCAL, b=8), _canvas(32, 1024, _LLADA, b=8), _canvas(256, 1024, (12, 4, 64)),
    _canvas(4096, 4096, _LLADA, causal=True),
]  # fmt: skip
SMALL_SHAPES = [_canvas(32, 320, (4, 2, 64)), _canvas(256, 256, (4, 2, 64), causal=True)]


# --- model


def model(small: bool = False) -> list[GpuCase]:
    """A slice of the 26B model with kernels and without, the whole model, transformers beside it, then training."""
    name = "tiny" if small else GEMMA
    few = {"prefix": 64, "turns": 3} if small else {"prefix": 1024, "turns": 3}
    how: dict[str, Any] = dict(alone=not small, least=10.0 if small else 30.0)
    found = [_slice(name, INT8, 2 if small else 4, how)]
    for kind in (INT8,) if small else (INT8, None):
        asked = {"model": name, "quantise": kind, "batch": 1} | few
        found.append(GpuCase(f"decoding {name}, {kind or BF16}", "decoding", asked, limit=240.0, **how))
    told = {"model": name, "prefix": few["prefix"], "device": "cpu" if small else "cuda"}
    found.append(GpuCase(f"transformers, {name}", "transformers", told, limit=150.0, **how))
    trained = (("tiny-causal", 2, 128),) if small else ((MODEL_100M, 32, 2048), ("mercury-350m", 16, 2048),
                                                       ("mercury-1b", 8, 2048))  # fmt: skip
    turns = 1 if small else 5
    found += [
        GpuCase(
            f"training {name}, {rows} x {row}", "training",
            {"model": name, "rows": rows, "row": row, "turns": turns}, limit=120.0, **how,
        )
        for name, rows, row in trained
    ]  # fmt: skip
    return found if small else [*found, _slice(name, None, 4, how)]


def _slice(name: str, quantise: str | None, layers: int, how: dict[str, Any]) -> GpuCase:
    asked = {"model": name, "quantise": quantise, "layers": layers}
    return GpuCase(
        f"logits of a slice of {name}, {quantise or BF16}", "slice_logits", asked, limit=150.0, **how
    )
