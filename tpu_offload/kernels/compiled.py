"""Compiles the copy programs and checks the HBM that the compiler reports for them against a bound.

In some device layouts no program can copy one block without copying much more. The compiler reports that before
anything runs, so a program beyond the bound is refused when it is compiled, with the remedy: caches in which a block
is contiguous. Where blocks share tiles, the program that writes a block's pages one after another is tried before that.

On TPU the figure is the HBM that the program allocates beside its arguments. On GPU it includes buffers that programs
may share, so a program beyond the bound is logged and used. On CPU it is host memory and says nothing about HBM (it
includes a copy of float8 caches, see `programs`), so `hbm_nbytes` reports the bound instead.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Hashable
from typing import Any, final

from tpu_offload.errors import CompileError
from tpu_offload.kernels.formats import row_major
from tpu_offload.kernels.programs import Program
from tpu_offload.kernels.spec import TransferSpec
from tpu_offload.values import error_line

_logger = logging.getLogger(__name__)

# Beside the one block that is gathered, the compiler takes about 40 KiB for each DMA, and on some generations (v5p) the
# page of each layer has its own, or is padded. With small blocks that is more than the blocks.
_MIN_NBYTES = 4 * 1024 * 1024


_WRITE_CACHES = ("direct_load", "scatter")  # what `TransferSpec.in_turn` changes


def bound_nbytes(spec: TransferSpec, *, num_blocks: int) -> int:
    """Bytes of HBM that a program may take on each device: `num_blocks` blocks, and on TPU at least 4 MiB."""
    num_blocks_nbytes = num_blocks * spec.block_nbytes_per_device
    return max(num_blocks_nbytes, _MIN_NBYTES) if spec.platform == "tpu" else num_blocks_nbytes


def compile_program(spec: TransferSpec, build: Callable[[TransferSpec], Program], *, bound: int) -> tuple[Any, int]:
    """Compiles a program; if it takes more than it may, also with `TransferSpec.in_turn` where that can take less.

    Args:
      spec: what the program copies.
      build: makes the program for a spec.
      bound: bytes of HBM that it may take on each device.
    Returns:
      The compiled program and the bytes of HBM that it takes, which may be more than `bound`; 0 where the backend does
      not tell.
    Raises:
      CompileError: the compiler rejects it.
    """
    program = build(spec)
    compiled, taken = _compile(program, spec)
    if taken > bound and spec.blocks_together > 1 and program.name in _WRITE_CACHES:
        with contextlib.suppress(CompileError):
            in_turn = _compile(build(dataclasses.replace(spec, in_turn=True)), spec)
            return min((compiled, taken), in_turn, key=lambda found: found[1])
    return compiled, taken


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
        spec = self._spec
        compiled, taken = compile_program(spec, build, bound=self._bound)
        self._taken.append(taken)
        if taken > self._bound:
            program = build(spec)
            message = (
                f"{program.name} takes {taken} bytes of HBM per device for {_described(spec)}, expected at most "
                f"{self._bound}, for blocks of {spec.block_nbytes_per_device}; {_way_out(program, spec)}"
            )
            if spec.platform == "tpu":
                raise CompileError(message)
            _logger.warning("%s", message)
        return compiled


def _compile(program: Program, spec: TransferSpec) -> tuple[Any, int]:
    try:
        compiled = program.compile()
    except Exception as e:
        raise CompileError(
            f"the compiler refuses {program.name} for {_described(spec)}: {error_line(e)}; {_way_out(program, spec)}"
        ) from e
    memory = None if spec.platform == "cpu" else compiled.memory_analysis()
    return compiled, 0 if memory is None else int(memory.temp_size_in_bytes)


def _described(spec: TransferSpec) -> str:
    order = f" in memory order {spec.cache_layout.major_to_minor}" if spec.cache_layout is not None else ""
    return f"{spec.num_layers} KV caches {spec.dtype.name}{[spec.num_blocks, *spec.page_shape]}{order}"


def _way_out(program: Program, spec: TransferSpec) -> str:
    last = spec.page_shape[-1]
    padded = f", or pad the last axis of the page from {last} to a multiple of 128" if last % 128 else ""
    if spec.blocks_together == 1:
        return f"set TPU_OFFLOAD_HOST_GB=0 and TPU_OFFLOAD_SWAP_GB=0 for no copies{padded}"
    direct = {"gather": "TPU_OFFLOAD_SAVE_PATH=direct or ", "scatter": "TPU_OFFLOAD_LOAD_PATH=direct or "}
    return (
        f"use {direct.get(program.name, '')}blocks of 128 tokens, or make the caches with "
        f"{row_major(1 + len(spec.page_shape))}{padded}"
    )
