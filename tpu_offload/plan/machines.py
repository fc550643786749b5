"""TPU machines: what one chip, one virtual machine and one slice have, with the source of each figure.

A slice is named as in Google Cloud: `v6e-8` has eight chips, `v5p-8` and `tpu7x-8` have eight cores, which are four
chips. A slice that no single machine has is several hosts of four chips, a power of two of them.
"""

import dataclasses
import re
from typing import final

from tpu_offload.errors import InputError

_GIB = 2**30
_GB = 10**9
_LINK = (
    "PCIe, 15 GB/s a chip in Google's jax-ml.github.io/scaling-book; no published limit: measure with tpu-offload bench"
)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A kind of TPU chip.

    Attributes:
      name: its name, with which its slices begin.
      flops_per_s: peak of a chip, dense, bf16.
      hbm_nbytes: what a jax device reports as its limit.
      num_devices: jax devices of a chip.
      num_cores: cores by which its slices are named; a slice `NAME-N` has `N / num_cores` chips.
      link_nbytes_per_s: between a chip and host memory, in one direction.
      hosts: by chips of a virtual machine, bytes of its memory.
      network_nbytes_per_s: a chip's part of the network of its virtual machine.
      source: of the figures.
    """

    name: str
    flops_per_s: float
    hbm_nbytes: int
    num_devices: int
    num_cores: int
    link_nbytes_per_s: float
    hosts: dict[int, int]
    network_nbytes_per_s: float
    source: str


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            flops_per_s=197e12,
            hbm_nbytes=int(15.75 * _GIB),
            num_devices=1,
            num_cores=1,
            link_nbytes_per_s=15e9,
            hosts={1: 48 * _GB, 4: 192 * _GB, 8: 384 * _GB},
            network_nbytes_per_s=3.125e9,
            source=f"docs.cloud.google.com/tpu/docs/v5e, machine types ct5lp-hightpu-*; {_LINK}",
        ),
        Chip(
            name="v5p",
            flops_per_s=459e12,
            hbm_nbytes=95 * _GIB,
            num_devices=1,
            num_cores=2,
            link_nbytes_per_s=15e9,
            hosts={4: 448 * _GB},
            network_nbytes_per_s=6.25e9,
            source=f"docs.cloud.google.com/tpu/docs/tpu7x (generations), machine type ct5p-hightpu-4t; {_LINK}",
        ),
        Chip(
            name="v6e",
            flops_per_s=918e12,
            hbm_nbytes=int(31.25 * _GIB),
            num_devices=1,
            num_cores=1,
            link_nbytes_per_s=15e9,
            hosts={1: 180 * _GB, 4: 720 * _GB, 8: 1440 * _GB},
            network_nbytes_per_s=12.5e9,
            source=f"docs.cloud.google.com/tpu/docs/v6e, machine types ct6e-standard-*; {_LINK}",
        ),
        Chip(
            name="tpu7x",
            flops_per_s=2307e12,
            hbm_nbytes=96 * _GIB,
            num_devices=2,
            num_cores=2,
            link_nbytes_per_s=15e9,
            hosts={4: 960 * _GB},
            network_nbytes_per_s=12.5e9,
            source=f"docs.cloud.google.com/tpu/docs/tpu7x, machine type tpu7x-standard-4t; {_LINK}",
        ),
    )
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A slice: one virtual machine or several.

    Attributes:
      name: its name.
      chip: the kind of chip.
      num_chips: chips in all.
      num_hosts: virtual machines.
    """

    name: str
    chip: Chip
    num_chips: int
    num_hosts: int

    @property
    def num_devices(self) -> int:
        """Jax devices in all."""
        return self.num_chips * self.chip.num_devices

    @property
    def host_nbytes(self) -> int:
        """Memory of one host."""
        return self.chip.hosts[self.num_chips // self.num_hosts]

    @property
    def hbm_nbytes(self) -> int:
        """HBM of all devices."""
        return self.num_devices * self.chip.hbm_nbytes


def find_machine(name: str) -> Machine:
    """The slice of that name; those of v5e may also be called `v5litepod-N`.

    Raises:
      InputError: there is no such slice.
    """
    match = re.fullmatch(r"([a-z0-9]+)-([1-9]\d{0,4})", name.lower().replace("v5litepod", "v5e"))
    chip = CHIPS.get(match[1]) if match else None
    if match is None or chip is None:
        kinds = ", ".join(f"{chip.name}-N" for chip in CHIPS.values())
        raise InputError(f"--machine {name!r}; expected one of {kinds}, as v6e-8 or v6e-16")
    number = int(match[2])
    sizes = _slice_sizes(chip)
    if number not in sizes:
        found = ", ".join(f"{chip.name}-{size}" for size in sizes)
        raise InputError(f"--machine {name!r} is no slice; expected one of {found}")
    num_chips = number // chip.num_cores
    num_hosts = 1 if num_chips in chip.hosts else num_chips // 4
    return Machine(name=f"{chip.name}-{number}", chip=chip, num_chips=num_chips, num_hosts=num_hosts)


def _slice_sizes(chip: Chip) -> list[int]:
    """Numbers in the names of a chip's slices: those of one host, and on several powers of two up to 256 chips."""
    largest = max(chip.hosts)
    several = [num for num in (8, 16, 32, 64, 128, 256) if num > largest]
    return [num * chip.num_cores for num in (*chip.hosts, *several)]


def machines_by_size() -> list[Machine]:
    """Slices of up to 64 chips, the smaller ones first, for a suggestion."""
    found = [find_machine(f"{chip.name}-{size}") for chip in CHIPS.values() for size in _slice_sizes(chip)]
    return sorted((one for one in found if one.num_chips <= 64), key=lambda one: (one.hbm_nbytes, one.num_chips))
