"""Reads the TPU compiler's schedule: which DMAs cross to host memory, and what is computed while they do.

In the text of a compiled TPU program the instructions of a computation stand in the order in which they
are issued. A DMA between HBM and host memory (memory space 5) is a pair `...-start` and `...-done`.
Whatever stands between the two runs while it is under way.
"""

import dataclasses
import functools
import math
import re

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b[a-z]+\d+\w*\[([\d,]*)\]")
_CALLS = re.compile(r"(?:calls|to_apply|body)=%([\w.\-]+)")
_HOST = "S(5)"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of scheduled HLO."""

    name: str
    result: str
    op: str
    rest: str

    @property
    def called(self) -> list[str]:
        """Computations that it runs."""
        return _CALLS.findall(self.rest)

    @property
    def operands(self) -> list[str]:
        """Names of what it reads, among others."""
        return re.findall(r"%([\w.\-]+)", self.rest)


@dataclasses.dataclass(frozen=True)
class HostDMA:
    """A transfer between HBM and host memory.

    Attributes:
      to_host: the direction.
      num_elements: what it moves.
      flops: matrix arithmetic issued between its start and its end.
    """

    to_host: bool
    num_elements: int
    flops: float


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a program does with host memory.

    Attributes:
      dmas: every host DMA of the entry computation and of loop bodies; those of a body are counted once.
      max_in_flight: the most host DMAs that are under way at once.
      flops: matrix arithmetic of the entry computation.
    """

    dmas: list[HostDMA]
    max_in_flight: int
    flops: float

    def share_under_compute(self, *, to_host: bool) -> float:
        """Share of the elements moved in one direction with some matrix product between start and end."""
        dmas = [dma for dma in self.dmas if dma.to_host is to_host]
        return sum(d.num_elements for d in dmas if d.flops) / sum(d.num_elements for d in dmas) if dmas else math.nan


def read_schedule(hlo: str) -> Schedule:
    """Reads the text of a compiled program."""
    computations, entry = _parse(hlo)

    @functools.cache
    def flops_of(name: str) -> float:
        return sum(_matmul_flops(computations[name])) + sum(
            flops_of(called) for i in computations[name] for called in i.called if called in computations
        )

    dmas, most = [], 0
    for name, instructions in computations.items():
        found, in_flight = _host_dmas(instructions, flops_of)
        dmas += found
        most = max(most, in_flight)
        assert name  # every computation has one
    return Schedule(dmas, most, flops_of(entry))


def _parse(hlo: str) -> tuple[dict[str, list[Instruction]], str]:
    computations: dict[str, list[Instruction]] = {}
    name = entry = ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            name = match.group(2)
            computations[name] = []
            entry = name if match.group(1) else entry
        elif name and (match := _INSTRUCTION.match(line)):
            computations[name].append(Instruction(*match.groups()))
    return computations, entry


def _elements(shape: str) -> int:
    match = _SHAPE.search(shape)
    return math.prod(int(d) for d in match.group(1).split(",") if d) if match else 0


def _matmul_flops(instructions: list[Instruction]) -> list[float]:
    """An estimate a matrix product: for [m, k] x [k, n] the root of the three sizes' product is m k n."""
    sizes = {i.name: _elements(i.result) for i in instructions}
    return [
        2 * math.sqrt(math.prod(sizes.get(name, 1) for name in i.operands[:2]) * _elements(i.result))
        for i in instructions
        if i.op in ("convolution", "dot")
    ]


def _host_dmas(instructions: list[Instruction], flops_of) -> tuple[list[HostDMA], int]:
    under_way: dict[str, list] = {}
    dmas, most = [], 0
    for i in instructions:
        if i.op.endswith("-start") and _HOST in i.result:
            # The tuple's types: for a write the pool and then the update, for a read the pool, ids, the slice.
            to_host = "update" in i.op or (i.op == "copy-start" and _HOST in i.result.split(",", 1)[0])
            shapes = [_elements(s) for s in re.findall(r"[a-z]+\d+\w*\[[\d,]*\]", i.result)]
            under_way[i.name] = [to_host, min(s for s in shapes if s > 1), 0.0]
            most = max(most, len(under_way))
        elif i.op.endswith("-done") and i.operands[0] in under_way:
            dmas.append(HostDMA(*under_way.pop(i.operands[0])))
        else:
            flops = sum(_matmul_flops([i])) + sum(flops_of(c) for c in i.called)
            for dma in under_way.values():
                dma[2] += flops
    return dmas, most
