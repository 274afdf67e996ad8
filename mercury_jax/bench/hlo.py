"""Reads what compilers print: optimised HLO and the report of ptxas.

From HLO: collectives, matrix products, library and kernel calls, the largest arrays. Work in a loop with a known trip
count counts that many times; in a loop that ends by a condition (denoising steps, tiles of visible keys) it counts
once, "per pass". Every branch of a conditional counts. Sizes are of one device. From ptxas: registers, spills and
shared memory of each Pallas kernel that Mosaic GPU compiles.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
# Instructions that make no array of their own.
VIEWS = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "optimization-barrier",
    "after-all", "constant", "copy-done", "async-done", "async-update", "all-reduce-done", "all-gather-done",
    "collective-permute-done", "copy-start",
}  # fmt: skip


class HloArray(NamedTuple):
    """dtype and dimensions of one result."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        # Every kind of f8 and f4 takes at most one byte.
        return int(math.prod(self.dims) * BYTES.get(self.dtype, 1))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


class Instruction(NamedTuple):
    """One line of HLO.

    Attributes:
        result: The arrays it makes.
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
        """The quoted value of an attribute, such as `custom_call_target`, or `op_name`, the JAX operation it was made
        from; empty if it is not set."""
        found = re.search(rf'{attribute}="([^"]*)"', self.rest)
        return found[1] if found else ""


Computation = dict[str, Instruction]


class HloModule(NamedTuple):
    """The computations of a program by name, and the name of the one it starts with."""

    computations: dict[str, Computation]
    entry: str


class Visit(NamedTuple):
    """An instruction as it runs: how often, whether in a loop of unknown length, whether inside a fusion."""

    one: Instruction
    among: Computation
    times: int
    looped: bool
    fused: bool

    def operand(self, index: int) -> HloArray | None:
        """The first array of an operand; None where it was not made in this computation."""
        made = self.among.get(self.one.operands[index]) if index < len(self.one.operands) else None
        return made.result[0] if made is not None and made.result else None


def parse(text: str) -> HloModule:
    """Parses the text of `compiled.as_text()`."""
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
    # All arrays of the shape in order; of a tuple its elements.
    shapes = re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<= ]*)\]", shape)
    numbers = lambda dims: tuple(int(n.strip("<= ")) for n in dims.split(",") if n)
    result = tuple(HloArray(kind, numbers(dims)) for kind, dims in shapes)
    rest = behind[close:]
    if op[1] == "custom-call" and "__cublas$" not in rest:
        rest, _, program = rest.partition(", backend_config=")  # Mosaic's is a whole program in bytes
        taken = re.search(r'"used_scoped_memory_configs":\[[^\]]*\]', program)
        rest += f", {taken[0]}" if taken else ""
    return Instruction(head[2], result, op[1], tuple(names), rest, head[1] is not None)


def _closing(text: str, start: int) -> int:
    """The index behind the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at + 1
    return len(text)


def visits(
    module: HloModule, name: str | None = None, times: int = 1, looped: bool = False, fused: bool = False
) -> Iterator[Visit]:
    """Every instruction that runs, in the order of the program, with how often it runs.

    Args:
        module: The program.
        name: The computation to begin with. Default: the whole program.
        times: How often this computation runs.
        looped: Whether it is in a loop of unknown length.
        fused: Whether it is inside a fusion.

    Yields:
        The instructions of the computation, each followed by those of the computations that it calls.
    """
    among = module.computations.get(module.entry if name is None else name, {})
    for one in among.values():
        yield Visit(one, among, times, looped, fused)
        if one.op not in ("while", "fusion", "call", "conditional", "async-start", "custom-call"):
            continue
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.rest) if one.op == "while" else None
        often = times * int(trips[1]) if trips else times
        unknown = looped or (one.op == "while" and trips is None)
        inside = fused or one.op in ("fusion", "custom-call")
        for called in _called(one):
            yield from visits(module, called, often, unknown, inside)


def _called(one: Instruction) -> list[str]:
    """The computations an instruction runs; not those that a reduction applies to each element."""
    keys = (
        r"(?:calls|to_apply|body|true_computation|false_computation|branch_computations|called_computations)"
    )
    found = re.findall(rf"\b{keys}=(%[\w.\-]+|\{{[^}}]*\}})", one.rest)
    return [name for group in found for name in re.findall(r"%([\w.\-]+)", group)]


def collectives(module: HloModule) -> dict[str, dict[str, int]]:
    """Collectives of one run.

    Returns:
        kind -> `count`; `bytes`, the larger of input and output on one device; `per_pass`, those in a loop of unknown
        length, counted once each; `in_layers`, those that come from a layer of the model.
    """
    seen: dict[Any, tuple[Visit, int]] = {}
    alike: dict[Any, list[str]] = {}
    for visit in visits(module):
        one = visit.one
        if one.op.removesuffix("-start") not in COLLECTIVES:
            continue
        channel = re.search(r"channel_id=(\d+)", one.rest)
        # A fused collective appears in several computations (start, overlapped work, end) with one channel and one
        # origin. Those of a shard_map share one channel; within a computation their names tell them apart.
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
    """FLOP of all matrix products that XLA sees: 2 x results x contracted length; those of Pallas kernels are
    hidden."""
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
    """Custom calls by target, such as libraries, Triton and Mosaic."""
    found: Counter[str] = Counter()
    for visit in visits(module):
        if visit.one.op == "custom-call":
            found[visit.one.text("custom_call_target")] += visit.times
    return found


def tpu_kernels(module: HloModule) -> list[dict[str, Any]]:
    """Pallas kernels for TPUs: name, count, and the most VMEM in bytes that one call uses, where the compiler says."""
    found: dict[str, dict[str, Any]] = {}
    for visit in visits(module):
        if visit.one.text("custom_call_target") != "tpu_custom_call":
            continue
        called = re.search(r"([^/]+)/pallas_call$", visit.one.text("op_name"))
        name = called[1] if called else re.sub(r"\.\d+$", "", visit.one.name)
        row = found.setdefault(name, {"name": name, "count": 0, "vmem_bytes": 0})
        row["count"] += visit.times
        # VMEM is memory space 1 of the memories that a call lists.
        sizes = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', visit.one.rest)
        row["vmem_bytes"] = max(row["vmem_bytes"], sum(map(int, sizes)))
    return list(found.values())


def largest(module: HloModule, most: int = 24) -> list[dict[str, Any]]:
    """The largest arrays that the program makes.

    Each shape and origin is listed once, all layers as one; arrays that are updated in place are left out.

    Args:
        module: The program.
        most: How many are listed.

    Returns:
        Records with `shape`, `bytes`, `count`, `op` and `of`, the JAX operation; the largest first.
    """
    update = ("dynamic-update-slice", "scatter")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for visit in visits(module):
        one = visit.one
        if visit.fused or one.op in VIEWS or one.op in update:
            continue
        if one.op == "fusion":
            inside = [x for name in _called(one) for x in module.computations.get(name, {}).values()]
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

# Environment variables by which Mosaic GPU prints the PTX, the report of ptxas, and the host code, which contains how
# a kernel is launched.
PTXAS_ENV = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_HOST_LLVM": "1"}
_HEAD = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_DYNAMIC = re.compile(r"@mosaic_gpu_get_function\(.*@(\w+)_name, i32 (\d+)")
_ENTRY = re.compile(r"\.visible \.entry (\w+)")
_PRODUCT = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)")


def gpu_kernels(text: str) -> list[dict[str, Any]]:
    """Kernels in what Mosaic GPU and ptxas print.

    Args:
        text: The output of a process that compiled with `PTXAS_ENV`.

    Returns:
        A record for each kernel in the order of compilation: `name`, `arch`, `registers`, `spill_bytes`,
        `stack_bytes`, `shared_bytes` (static, and dynamic as the launch asks for it), and `products`, the tensor-core
        instructions in its PTX as kind -> count.
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
    return [one | {"shared_bytes": one["shared_bytes"] + dynamic.get(one["name"], 0)} for one in found]
