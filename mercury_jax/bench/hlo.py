"""Parses the output of compilers: optimised HLO, and the report of ptxas.

HLO gives collectives, matrix products, library and kernel calls, and the largest arrays. Instructions in a loop with a
known trip count are counted once per iteration. In a loop that ends by a condition (denoising steps, tiles of visible
keys) they are counted once, "per pass". All branches of a conditional are counted. Sizes are per device.

The report of ptxas gives registers, spills and shared memory of each Pallas kernel that Mosaic GPU compiles.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
# Instructions that allocate no array.
VIEWS = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "optimization-barrier",
    "after-all", "constant", "copy-done", "async-done", "async-update", "all-reduce-done", "all-gather-done",
    "collective-permute-done", "copy-start",
}  # fmt: skip


class HloArray(NamedTuple):
    """Dtype and dimensions of an array in HLO."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        # Dtypes that are not in the table, variants of f8 and f4, are counted as one byte.
        return int(math.prod(self.dims) * BYTES.get(self.dtype, 1))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


class Instruction(NamedTuple):
    """One line of HLO.

    Attributes:
        name: Its name.
        result: The arrays that it returns; several for a tuple.
        op: Its opcode.
        operands: Names of its operands.
        rest: The text of its attributes.
        root: Whether it is the result of its computation.
    """

    name: str
    result: tuple[HloArray, ...]
    op: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    def text(self, attribute: str) -> str:
        """Returns the quoted value of an attribute."""
        found = re.search(rf'{attribute}="([^"]*)"', self.rest)
        return found[1] if found else ""


Computation = dict[str, Instruction]


class HloModule(NamedTuple):
    """The computations of a program by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str


class Visit(NamedTuple):
    """An execution of an instruction.

    Attributes:
        one: The instruction.
        among: Its computation.
        times: How often it runs.
        looped: Whether it is in a loop without a known trip count.
        fused: Whether it is inside a fusion, so that its result is not allocated.
    """

    one: Instruction
    among: Computation
    times: int
    looped: bool
    fused: bool

    def operand(self, index: int) -> HloArray | None:
        """Returns the first array of an operand; None if it is not defined in this computation."""
        made = self.among.get(self.one.operands[index]) if index < len(self.one.operands) else None
        return made.result[0] if made is not None and made.result else None


def parse(text: str) -> HloModule:
    """Parses the text of a compiled program."""
    found: dict[str, Computation] = {}
    entry, now = "", ""
    for line in text.splitlines():
        if line.startswith((" ", "\t")):
            one = _instruction(line.strip()) if now else None
            if one is not None:
                found[now][one.name] = one
        elif line.rstrip().endswith("{") and (head := re.match(r"(ENTRY )?%?([\w.\-]+) ", line)):
            now = head[2]
            found[now] = {}
            entry = now if head[1] else entry
        elif line.startswith("}"):
            now = ""
    return HloModule(found, entry)


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    end = _closing(line, head.end()) if line[head.end()] == "(" else line.find(" ", head.end())
    shape, behind = line[head.end() : end], line[end:].lstrip()
    op = re.match(r"([\w\-]+)\(", behind)
    if op is None:
        return None
    close = _closing(behind, op.end() - 1)
    names = re.findall(r"%([\w.\-]+)", behind[op.end() : close])
    # All arrays of the shape, in order; a tuple has several.
    shapes = re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<= ]*)\]", shape)
    numbers = lambda dims: tuple(int(n.strip("<= ")) for n in dims.split(",") if n)
    result = tuple(HloArray(kind, numbers(dims)) for kind, dims in shapes)
    rest = behind[close:]
    if op[1] == "custom-call" and "__cublas$" not in rest:
        rest, _, program = rest.partition(", backend_config=")  # for Mosaic, it holds a whole program
        taken = re.search(r'"used_scoped_memory_configs":\[[^\]]*\]', program)
        rest += f", {taken[0]}" if taken else ""
    return Instruction(head[2], result, op[1], tuple(names), rest, head[1] is not None)


def _closing(text: str, start: int) -> int:
    """Returns the index after the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at + 1
    return len(text)


def visits(
    module: HloModule, name: str | None = None, times: int = 1, looped: bool = False, fused: bool = False
) -> Iterator[Visit]:
    """Walks over all instructions that run, in program order, with the number of times that each runs."""
    among = module.computations.get(module.entry if name is None else name, {})
    for one in among.values():
        yield Visit(one, among, times, looped, fused)
        if one.op not in ("while", "fusion", "call", "conditional", "async-start", "custom-call"):
            continue
        trips = trip_count(one) if one.op == "while" else None
        often = times if trips is None else times * trips
        unknown = looped or (one.op == "while" and trips is None)
        inside = fused or one.op in ("fusion", "custom-call")
        for called in called_computations(one):
            yield from visits(module, called, often, unknown, inside)


def trip_count(one: Instruction) -> int | None:
    """Returns the known number of iterations of a loop; None if it ends by a condition."""
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.rest)
    return int(found[1]) if found else None


def called_computations(one: Instruction) -> list[str]:
    """Lists the computations that an instruction calls."""
    keys = (
        r"(?:calls|to_apply|body|true_computation|false_computation|branch_computations|called_computations)"
    )
    found = re.findall(rf"\b{keys}=(%[\w.\-]+|\{{[^}}]*\}})", one.rest)
    return [name for group in found for name in re.findall(r"%([\w.\-]+)", group)]


def collectives(module: HloModule) -> dict[str, dict[str, int]]:
    """Counts the collectives of one run of a program.

    Returns:
        Figures by kind of collective: `count`; `bytes`, the larger of input and output on one device; `per_pass`, the
        number in loops without a known trip count, each counted once; `in_layers`, the number in layers of the model.
    """
    seen: dict[Any, tuple[Visit, int]] = {}
    alike: dict[Any, list[str]] = {}
    for visit in visits(module):
        one = visit.one
        if one.op.removesuffix("-start") not in COLLECTIVES:
            continue
        channel = re.search(r"channel_id=(\d+)", one.rest)
        # A fused collective appears in several computations (start, overlapped work, end) with the same channel and
        # op_name, and must be counted once. The collectives of a shard_map share a channel as well; within one
        # computation their names tell them apart.
        key = (channel[1], one.text("op_name")) if channel else one.name
        names = alike.setdefault((id(visit.among), key, one.op), [])
        if one.name not in names:
            names.append(one.name)
        arguments = [visit.operand(i) for i in range(len(one.operands))]
        inputs = sum(array.bytes for array in arguments if array is not None)
        outputs = sum(array.bytes for array in one.result)
        if one.op.endswith("-start") and len(one.result) > 1:
            outputs -= inputs  # the start of an all-gather returns its operands beside its results
        seen[key, names.index(one.name)] = visit, max(inputs, outputs)
    total: dict[str, dict[str, int]] = {}
    for visit, size in seen.values():
        kind = visit.one.op.removesuffix("-start")
        row = total.setdefault(kind, {"count": 0, "bytes": 0, "per_pass": 0, "in_layers": 0})
        row["count"] += visit.times
        row["bytes"] += visit.times * size
        row["per_pass"] += visit.times * visit.looped
        row["in_layers"] += visit.times * bool(re.search(r"\bblock_\d+\b", visit.one.text("op_name")))
    return total


def products(module: HloModule) -> float:
    """Counts the FLOP of the matrix products in HLO: 2 x elements of the result x contracted length."""
    total = 0.0
    for visit in visits(module):
        one, left = visit.one, visit.operand(0)
        if one.op == "dot":
            pattern = r"\blhs_contracting_dims=\{([^}]*)\}"
        elif one.op == "custom-call" and one.text("custom_call_target").startswith("__cublas$"):
            pattern = r'"lhs_contracting_dimensions":\[([^\]]*)\]'
        else:
            continue
        found = re.search(pattern, one.rest)
        if left is not None and one.result:
            axes = [int(n) for n in re.findall(r"\d+", found[1])] if found else []
            total += visit.times * 2.0 * math.prod(one.result[0].dims) * math.prod(left.dims[i] for i in axes)
    return total


def calls(module: HloModule) -> Counter[str]:
    """Counts custom calls by target, such as libraries, Triton and Mosaic."""
    found: Counter[str] = Counter()
    for visit in visits(module):
        if visit.one.op == "custom-call":
            found[visit.one.text("custom_call_target")] += visit.times
    return found


def tpu_kernels(module: HloModule) -> list[dict[str, Any]]:
    """Lists the Pallas kernels of a TPU program.

    Returns:
        One record per kernel: `name`, `count`, and `vmem_bytes`, the largest VMEM of a call (0 if not reported).
    """
    found: dict[str, dict[str, Any]] = {}
    for visit in visits(module):
        if visit.one.text("custom_call_target") != "tpu_custom_call":
            continue
        called = re.search(r"([^/]+)/pallas_call$", visit.one.text("op_name"))
        name = called[1] if called else re.sub(r"\.\d+$", "", visit.one.name)
        row = found.setdefault(name, {"name": name, "count": 0, "vmem_bytes": 0})
        row["count"] += visit.times
        # A call lists its memories; VMEM is memory space 1.
        sizes = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', visit.one.rest)
        row["vmem_bytes"] = max(row["vmem_bytes"], sum(map(int, sizes)))
    return list(found.values())


def largest(module: HloModule, most: int = 24) -> list[dict[str, Any]]:
    """Lists the largest arrays that a program allocates.

    Arrays with the same shape and JAX operation are one entry, over all layers. Arrays that are updated in place are
    left out.

    Returns:
        Records with `shape`, `bytes`, `count`, `op` and `of` (the JAX operation), the largest first.
    """
    update = ("dynamic-update-slice", "scatter")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for visit in visits(module):
        one = visit.one
        if visit.fused or one.op in VIEWS or one.op in update:
            continue
        if one.op == "fusion":
            inside = [
                x for name in called_computations(one) for x in module.computations.get(name, {}).values()
            ]
            if any(x.root and x.op in update for x in inside):
                continue
        for array in one.result:
            key = (str(array), re.sub(r"block_\d+", "block_*", one.text("op_name")))
            row = found.setdefault(
                key, {"shape": key[0], "bytes": array.bytes, "count": 0, "op": one.op, "of": key[1]}
            )
            row["count"] += 1
    return sorted(found.values(), key=lambda row: -row["bytes"])[:most]


# --- the report of ptxas

# These environment variables make Mosaic GPU print the PTX, the report of ptxas, and the host code, in which the launch
# of a kernel names its dynamic shared memory.
PTXAS_ENV = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_HOST_LLVM": "1"}
_HEAD = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_DYNAMIC = re.compile(r"@mosaic_gpu_get_function\(.*@(\w+)_name, i32 (\d+)")
_ENTRY = re.compile(r"\.visible \.entry (\w+)")
_PRODUCT = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)")


@contextlib.contextmanager
def captured_output() -> Iterator[Callable[[], str]]:
    """Captures what C and C++ code writes to standard output and error; yields a function that returns the text."""
    libc = ctypes.CDLL(None)
    with tempfile.TemporaryFile() as sink:
        saved = {fd: os.dup(fd) for fd in (1, 2)}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

        def read() -> str:
            libc.fflush(None)
            sink.seek(0)
            return sink.read().decode(errors="replace")

        try:
            for fd in saved:
                os.dup2(sink.fileno(), fd)
            yield read
        finally:
            libc.fflush(None)
            for fd, old in saved.items():
                os.dup2(old, fd)
                os.close(old)


def gpu_kernels(text: str) -> list[dict[str, Any]]:
    """Parses the output of Mosaic GPU and ptxas.

    Returns:
        One record per kernel, in the order of compilation: `name`, `arch`, `registers`, `spill_bytes`, `stack_bytes`,
        `shared_bytes` (static plus dynamic), and `products`, the number of tensor-core instructions in its PTX by kind.
    """
    found: list[dict[str, Any]] = []
    products: dict[str, Counter[str]] = {}
    entry = ""
    for line in text.splitlines():
        if head := _ENTRY.search(line):
            entry = head[1]
            products[entry] = Counter()
        elif entry and (product := _PRODUCT.search(line)):
            products[entry][product[1]] += 1
        elif head := _HEAD.search(line):
            found.append({"name": head[1], "arch": head[2], "registers": None, "spill_bytes": 0, "stack_bytes": 0,
                          "shared_bytes": 0, "products": dict(products.get(head[1], {}))})  # fmt: skip
        elif found and (spills := _SPILLS.search(line)):
            found[-1]["stack_bytes"] = int(spills[1])
            found[-1]["spill_bytes"] = int(spills[2]) + int(spills[3])
        elif found and (used := _USED.search(line)):
            shared = _SHARED.search(line)
            found[-1] |= {"registers": int(used[1]), "shared_bytes": int(shared[1]) if shared else 0}
    dynamic = {name: int(size) for name, size in _DYNAMIC.findall(text)}
    for one in found:
        one["shared_bytes"] += dynamic.get(one["name"], 0)
    return found
