"""The paths of a chunk between the host tier and a payload, which I/O threads may use.

Which one is faster depends on the machine, see `payload_choice`.
"""

import abc
from typing import final

from tpu_offload.config import StorageCopyPath
from tpu_offload.kernels import payload_programs
from tpu_offload.kernels.programs import Program
from tpu_offload.kernels.spec import TransferSpec


class SlotPath(abc.ABC):
    """A pair of programs that copy a chunk's slot to and from a payload (see `payload_programs`)."""

    path: StorageCopyPath
    """Its setting."""
    max_hbm_blocks: int
    """Blocks of HBM that each program may take."""

    @staticmethod
    @abc.abstractmethod
    def read(spec: TransferSpec, num_blocks: int) -> Program:
        """`(segment, first) -> (payload, token)`; the segment is not donated."""

    @staticmethod
    @abc.abstractmethod
    def write(spec: TransferSpec, num_blocks: int) -> Program:
        """`(segment, payload, first) -> (segment, token)`; the segment is donated and updated in place."""


@final
class HostPath(SlotPath):
    """Both copies are made by the host's CPU."""

    path = StorageCopyPath.HOST
    max_hbm_blocks = 1
    read = staticmethod(payload_programs.read_slot)
    write = staticmethod(payload_programs.write_slot)


@final
class HbmPath(SlotPath):
    """Both copies go block by block through HBM, by DMA."""

    path = StorageCopyPath.HBM
    max_hbm_blocks = 2
    read = staticmethod(payload_programs.read_slot_hbm)
    write = staticmethod(payload_programs.write_slot_hbm)


SLOT_PATHS: tuple[type[SlotPath], ...] = (HostPath, HbmPath)
