"""Compiles the copy programs and checks the HBM that the compiler reports for them against a bound.

In some device layouts no program can copy one block without copying much more. The compiler reports that before
anything runs, so a program beyond the bound is refused when it is compiled, with the remedy: caches in which a block
is contiguous. Where blocks share tiles, the program that writes a block's pages one after another is tried before that.

On TPU the figure is the HBM that the program allocates beside its arguments. On GPU it includes buffers that programs
may share, so a program beyond the bound is logged and used. On CPU it is host memory and says nothing about HBM (it
includes a copy of float8 caches, see `programs`), so `hbm_nbytes` reports the bound instead.
"""

import dataclasses
import logging
from collections.abc import Callable, Hashable
from typing import Any, final

from tpu_offload.errors import CompileError
from tpu_offload.kernels.formats import row_major
from tpu_offload.kernels.programs import Program
from tpu_offload.kernels.spec import TransferSpec

_logger = logging.getLogger(__name__)

# Beside the one block that is gathered, the compiler takes about 40 KiB for each DMA, and on some generations (v5p) the
# page of each layer has its own, or is padded. With small blocks that is more than the blocks.
_MIN_NBYTES = 4 * 1024 * 1024


def bound_nbytes(spec: TransferSpec, *, num_blocks: int) -> int:
    """Bytes of HBM that a program may take on each device: `num_blocks` blocks, and on TPU at least 4 MiB."""
    num_blocks_nbytes = num_blocks * spec.block_nbytes_per_device
    return max(num_blocks_nbytes, _MIN_NBYTES) if spec.platform == "tpu" else num_blocks_nbytes


_WRITE_CACHES = ("direct_load", "scatter")  # what `TransferSpec.in_turn` changes


@final
class CompiledPrograms:
    """Compiles each program once, at start or on first use.

    Args:
      spec: what the programs copy.
      num_blocks: blocks of HBM that each program may take.
    """

    def __init__(self, spec: TransferSpec, *, num_blocks: int) -> None:
        self._spec = spec
        self._bound = bound_nbytes(spec, num_blocks=num_blocks)
        self._compiled: dict[Hashable, Any] = {}
        self._taken: list[int] = []

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that one of the programs takes, as compiled; before compilation and on CPU, the bound."""
        return max(self._taken, default=0) or self._bound

    def get(self, key: Hashable, build: Callable[[TransferSpec], Program]) -> Any:
        """The compiled program for `key`.

        Args:
          key: identifies the program.
          build: makes the program for a spec, if it is not compiled yet.
        Raises:
          CompileError: the compiler rejects it, or it exceeds the bound. The failure is cached: later calls raise it
            again without compiling.
        """
        if key not in self._compiled:
            try:
                self._compiled[key] = self._compile_within_bound(build)
            except CompileError as e:
                self._compiled[key] = e
        compiled = self._compiled[key]
        if isinstance(compiled, CompileError):
            raise compiled.with_traceback(None)
        return compiled

    def _compile_within_bound(self, build: Callable[[TransferSpec], Program]) -> Any:
        program = build(self._spec)
        compiled, taken = self._compile(program)
        if taken > self._bound and self._spec.blocks_together > 1 and program.name in _WRITE_CACHES:
            in_turn = self._compile(build(dataclasses.replace(self._spec, in_turn=True)))
            compiled, taken = min((compiled, taken), in_turn, key=lambda found: found[1])
        self._taken.append(taken)
        if taken > self._bound:
            message = (
                f"{program.name} takes {taken} bytes of HBM per device for {self._described()}, expected at most "
                f"{self._bound}, for blocks of {self._spec.block_nbytes_per_device}; {self._way_out()}"
            )
            if self._spec.platform == "tpu":
                raise CompileError(message)
            _logger.warning("%s", message)
        return compiled

    def _compile(self, program: Program) -> tuple[Any, int]:
        """The compiled program, and the bytes of HBM that it takes; 0 where the backend does not tell."""
        try:
            compiled = program.compile()
        except Exception as e:
            reason = next(iter(str(e).splitlines()), "")
            raise CompileError(
                f"the compiler refuses {program.name} for {self._described()}: {type(e).__name__}: {reason}; "
                f"{self._way_out()}"
            ) from e
        return compiled, self._taken_by(compiled)

    def _taken_by(self, compiled: Any) -> int:
        memory = None if self._spec.platform == "cpu" else compiled.memory_analysis()
        return 0 if memory is None else int(memory.temp_size_in_bytes)

    def _described(self) -> str:
        spec = self._spec
        order = f" in memory order {spec.cache_layout.major_to_minor}" if spec.cache_layout is not None else ""
        return f"{spec.num_layers} KV caches {spec.dtype.name}{[spec.num_blocks, *spec.page_shape]}{order}"

    def _way_out(self) -> str:
        last = self._spec.page_shape[-1]
        padded = f", or pad the last axis of the page from {last} to a multiple of 128" if last % 128 else ""
        if self._spec.blocks_together == 1:
            return f"set TPU_OFFLOAD_HOST_GB=0 and TPU_OFFLOAD_SWAP_GB=0 for no copies{padded}"
        return f"make the caches with {row_major(1 + len(self._spec.page_shape))}{padded}"
