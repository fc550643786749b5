"""Sizes of simulated tiers, given as shares, chunks, or GB of a model's KV."""

import contextlib
import dataclasses
import enum
import math
import re
from typing import final

import ml_dtypes
import numpy as np
from click import BadParameter

from tpu_offload.config.storage_tiers import SEPARATOR
from tpu_offload.errors import InputError

GB = 2**30
# Far above any real size, and small enough not to overflow.
_MAX_GB = 10**9
_MAX_CHUNKS = 10**12
_MODEL_FLAGS = ("num_layers", "num_kv_heads", "head_size")


class Unit(enum.Enum):
    """The unit of a size; the value is its suffix."""

    SHARE = ""  # share of the unique blocks
    CHUNKS = " chunks"
    GB = "GB"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """The size of a tier."""

    value: float
    unit: Unit

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit.value}"

    def num_chunks(self, *, num_unique_blocks: int, chunk_nbytes: int | None) -> int:
        """The size in chunks.

        Raises:
          InputError: it is in GB and no model is given, or it is smaller than a chunk.
        """
        if self.unit is Unit.SHARE:
            return max(1, round(self.value * num_unique_blocks))
        if self.unit is Unit.CHUNKS:
            return int(self.value)
        if chunk_nbytes is None:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in _MODEL_FLAGS)
            raise InputError(f"a size of {self} needs a model: set {flags}")
        num_chunks = int(self.value * GB) // chunk_nbytes
        if num_chunks < 1:
            raise InputError(f"a size of {self} is smaller than a chunk of {chunk_nbytes} bytes")
        return num_chunks


def share_flag(text: str) -> Size:
    """Parses a share of the unique blocks."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= 1:
        raise BadParameter(f"{text!r}; expected a share of the unique blocks, above 0 and at most 1")
    return Size(value, Unit.SHARE)


def gb_flag(text: str) -> Size:
    """Parses a size in GB, given without the unit."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= _MAX_GB:
        raise BadParameter(f"{text!r}; expected at most {_MAX_GB} GB")
    return Size(value, Unit.GB)


def size_flag(text: str) -> Size:
    """Parses a size in any unit: `0.05` is a share, `9000` a number of chunks, `40GB` a size in GB."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(GB)?", text)
    if not match or not float(match[1]):
        raise BadParameter(
            f"{text!r}; expected a share of the unique blocks (0.05), a number of chunks (9000) or GB (40GB), above 0"
        )
    if match[2]:
        return gb_flag(match[1])
    if "." in text:
        return share_flag(text)
    if float(text) > _MAX_CHUNKS:
        raise BadParameter(f"{text!r}; expected at most {_MAX_CHUNKS} chunks")
    return Size(int(text), Unit.CHUNKS)


def stack_flag(text: str) -> tuple[Size, ...]:
    """Parses the sizes of a stack of tiers, nearest first: `0.05;0.5`."""
    return tuple(size_flag(part.strip()) for part in text.split(SEPARATOR))


def chunk_nbytes(dtype: str, block_tokens: int, **sizes: int | None) -> int | None:
    """Bytes of a chunk: keys and values of all layers. None if no size of a model is given.

    Args:
      dtype: element type of the KV cache.
      block_tokens: tokens in a chunk.
      sizes: sizes of the model, by the names in `_MODEL_FLAGS`.
    Raises:
      InputError: a size is missing, or `dtype` is not a type of real numbers.
    """
    num_bits = _num_bits(dtype)
    given = {name: size for name, size in sizes.items() if size is not None}
    if not given:
        return None
    if missing := [name for name in _MODEL_FLAGS if name not in given]:
        raise InputError(f"a model needs --{missing[0].replace('_', '-')} as well")
    return -(-2 * math.prod(given.values()) * block_tokens * num_bits // 8)


def _num_bits(dtype_name: str) -> int:
    """Bits of an element. `itemsize` is a whole byte for 4-bit types, two of which share a byte when packed."""
    try:
        dtype = np.dtype(dtype_name)
        if dtype.kind != "c":  # for a complex type, `finfo` describes one component
            for info in (ml_dtypes.iinfo, ml_dtypes.finfo):
                with contextlib.suppress(ValueError):  # not a type of this kind
                    return int(info(dtype).bits)
        raise TypeError(f"{dtype} is not a type of real numbers")
    except (TypeError, ValueError, SyntaxError) as e:
        raise InputError(
            f"--dtype {dtype_name!r}; expected the name of a type of real numbers, like bfloat16 or float8_e4m3fn"
        ) from e
