"""Kernels and bytes of one pass of a compiled GPU program, from its optimised HLO.

At small batch sizes a denoising pass takes as long as its memory traffic and its kernel launches. `pass_cost` counts
both in the body of the program's main loop: for sampling, one forward pass and the decisions of the rule. The roofline
of the datasheet (`chips.datasheet_roofline`) assumes that each parameter is read once and nothing else is moved; the
difference shows what fusion misses.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from mercury_jax.bench.hlo import VIEWS, Computation, HloModule, Instruction, called_computations, trip_count

ALIASED = re.compile(r"\{\d*\}: \((\d+), \{\}")  # number of an operand that shares the memory of a result
SMALL = 4 * 2**20  # a kernel that moves fewer bytes takes about as long as its launch
LAUNCH = 3e-6  # seconds between the starts of two small kernels, 2 to 4 us
# Denoising steps of a block and the pass that encodes it, for the tokens per second of `implied`. One row on a GPU
# takes 16, one of them twice as wide (`decode.methods.fused_commit`).
PASSES = 17
EXPERTS = re.compile(
    r"\bexpert_tiles/"
)  # in the JAX operation of a loop over tiles of experts (`models.moe`)
SLICES = ("dynamic-slice", "gather", "slice")
ELEMENTWISE = (
    "abs", "add", "and", "clamp", "compare", "convert", "divide", "exponential", "log", "maximum", "minimum",
    "multiply", "negate", "not", "or", "select", "subtract", "tanh",
)  # fmt: skip
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place -> index of the operand with the new values


class PassCost(NamedTuple):
    """Costs of a sequence of kernels on one device.

    Attributes:
        kernels: Number of kernel launches.
        small: Those of them that move less than SMALL bytes.
        read: Bytes read.
        written: Bytes written.
        open_loops: Loops whose number of iterations is not known. Each counts as one iteration, so that the other
            figures are lower bounds if there are any.
    """

    kernels: int = 0
    small: int = 0
    read: int = 0
    written: int = 0
    open_loops: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def times(self, count: int) -> PassCost:
        """Returns the cost of `count` repetitions."""
        return PassCost(*(count * x for x in self))


def implied(cost: PassCost, bandwidth: float, tokens: int, compute: float = 0.0) -> dict[str, float]:
    """Estimates the time of a pass and the rate of decoding from the bytes, products and launches of a pass.

    Returns:
        `memory_seconds`; `compute_seconds`; `launch_seconds` of the small kernels; `seconds`, the launches and the
        longer of the other two; and `tokens_per_second` if a block takes PASSES passes.
    """
    memory, launch = cost.bytes / bandwidth, cost.small * LAUNCH
    seconds = max(memory, compute) + launch
    return {
        "memory_seconds": memory, "compute_seconds": compute, "launch_seconds": launch, "seconds": seconds,
        "tokens_per_second": tokens / (PASSES * seconds),
    }  # fmt: skip


def total(costs: Iterable[PassCost]) -> PassCost:
    """Adds costs."""
    return PassCost(*map(sum, zip(PassCost(), *costs, strict=True)))


def chosen_experts(count: int, active: int, tokens: int) -> int:
    """Estimates how many experts of a layer have tokens."""
    return max(round(count * (1 - (1 - active / count) ** tokens)), 1)


def pass_cost(module: HloModule, experts: int | None = None) -> PassCost | None:
    """Counts kernels and bytes of one iteration of the main loop.

    The main loop is the outermost loop without a known trip count that moves most bytes per iteration. In its body, a
    loop with a known trip count counts that often, a loop over tiles of experts `experts` times, and another loop once;
    of a conditional, the branch that moves most counts. A slice or gather reads as many bytes as it returns, also
    inside a fusion; an update in place writes as many as it is given. Library calls and Pallas kernels count their
    whole operands, so that an attention kernel counts all slots of the cache, visible or not; one that updates operands
    in place does not read these, and counts at most as many bytes written as it reads.

    Args:
        experts: Iterations of a loop over the tiles of a mixture of experts (`models.moe`), where no grouped kernel
            multiplies them: one tile for each expert that was chosen. None: such a loop is like others.
    """
    loops = [_computation(module, name, experts) for name in _bodies(module, module.entry)]
    return max(loops, key=lambda cost: cost.bytes, default=None)


def _bodies(module: HloModule, name: str) -> list[str]:
    """Finds the bodies of the outermost loops without a known trip count."""
    found = []
    for one in module.computations.get(name, {}).values():
        if one.op == "while" and trip_count(one) is None:
            found.append(_attribute(one, "body"))
        elif one.op in ("while", "call", "conditional", "async-start"):
            found += [body for inner in called_computations(one) for body in _bodies(module, inner)]
    return found


def _computation(module: HloModule, name: str, experts: int | None) -> PassCost:
    """Counts the instructions of a computation that run as kernels, and those that it calls."""
    among = module.computations.get(name, {})
    return total(instruction_cost(module, among, one, experts) for one in among.values())


def instruction_cost(
    module: HloModule, among: Computation, one: Instruction, experts: int | None = None
) -> PassCost:
    """Counts one instruction, with the computations that it runs."""
    if one.op == "while":
        parts = total(_computation(module, _attribute(one, key), experts) for key in ("body", "condition"))
        count = trip_count(one) or (experts if EXPERTS.search(one.text("op_name")) else None)
        return parts.times(count) if count else parts._replace(open_loops=parts.open_loops + 1)
    if one.op == "conditional":
        branches = [_computation(module, name, experts) for name in called_computations(one)]
        return max(branches, key=lambda cost: cost.bytes, default=PassCost())
    if one.op in ("call", "async-start") and called_computations(one):
        return total(_computation(module, name, experts) for name in called_computations(one))
    if one.op in VIEWS or one.op.endswith("-done"):
        return PassCost()
    if one.op == "fusion":
        read, written = _fusion(module.computations.get(_attribute(one, "calls"), {}))
    elif one.op in SLICES:
        read = written = _size(one)
    elif one.op in UPDATES and one.operands[UPDATES[one.op]] in among:
        read = written = _size(among[one.operands[UPDATES[one.op]]])
    else:
        shared = {int(i) for i in ALIASED.findall(one.rest)}
        operands = [(i, among[name]) for i, name in enumerate(one.operands) if name in among]
        read = sum(_size(operand) for i, operand in operands if i not in shared)
        updated = sum(_size(operand) for i, operand in operands if i in shared)
        written = max(_size(one) - updated, min(_size(one), read)) if shared else _size(one)
    return PassCost(1, int(read + written < SMALL), read, written)


def _fusion(body: Computation) -> tuple[int, int]:
    """Counts the bytes that a fused kernel reads and writes."""
    users: dict[str, list[Instruction]] = {name: [] for name in body}
    for one in body.values():
        for name in set(one.operands) & users.keys():
            users[name].append(one)

    @functools.cache
    def read(name: str) -> int:
        """Bytes of a value that its users read: less than all of them if all users take slices."""
        whole, taken = _size(body[name]), 0
        if not users[name]:
            return whole
        for user in users[name]:
            if user.op in ("bitcast", "reshape"):
                taken += read(user.name)
            elif user.op in ELEMENTWISE and _size(user):
                # Computed for the elements that are read of it, which are few if a gather follows.
                taken += -(-read(user.name) * whole // _size(user))
            elif user.op in SLICES and user.operands[0] == name:
                taken += _size(user)
            elif user.op not in UPDATES or user.operands[0] != name:  # updated in place: not read
                return whole
        return min(taken, whole)

    def written(one: Instruction) -> int:
        if one.op in UPDATES:
            return _size(body[one.operands[UPDATES[one.op]]])
        if one.op == "bitcast" and one.operands and one.operands[0] in body:
            return written(body[one.operands[0]])
        if one.op == "tuple":
            return sum(written(body[name]) for name in one.operands)
        return _size(one)

    inputs = sum(read(one.name) for one in body.values() if one.op == "parameter")
    return inputs, sum(written(one) for one in body.values() if one.root)


def _size(one: Instruction) -> int:
    return sum(array.bytes for array in one.result)


def _attribute(one: Instruction, key: str) -> str:
    """Returns the name of the computation that an attribute refers to; "" if it is not set."""
    found = re.search(rf"\b{key}=%([\w.\-]+)", one.rest)
    return found[1] if found else ""
