"""Sizes of simulated tiers as a person gives them: shares, chunks, or GB of a model."""

import contextlib
import dataclasses
import enum
import math
import re
from typing import final

import ml_dtypes
import numpy as np
from click import BadParameter

from tpu_offload.errors import InputError

GB = 2**30
# Far above all there is, and far below what numbers cannot hold.
_MAX_GB = 10**9
_MAX_CHUNKS = 10**12
_MODEL_FLAGS = ("num_layers", "num_kv_heads", "head_size")


class Unit(enum.Enum):
    """What a size is given in; the value is what ends it."""

    SHARE = ""  # of the unique blocks
    CHUNKS = " chunks"
    GB = "GB"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How large a tier is."""

    value: float
    unit: Unit

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit.value}"

    def num_chunks(self, *, num_unique_blocks: int, chunk_nbytes: int | None) -> int:
        """How many chunks have room.

        Raises:
          InputError: it is in GB and no model is given, or there is no room for a chunk.
        """
        if self.unit is Unit.SHARE:
            return max(1, round(self.value * num_unique_blocks))
        if self.unit is Unit.CHUNKS:
            return int(self.value)
        if chunk_nbytes is None:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in _MODEL_FLAGS)
            raise InputError(f"a size of {self} needs a model: give {flags}")
        num_chunks = int(self.value * GB) // chunk_nbytes
        if num_chunks < 1:
            raise InputError(f"a size of {self} has no room for a chunk of {chunk_nbytes} bytes")
        return num_chunks


def share_flag(text: str) -> Size:
    """A share of the unique blocks."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= 1:
        raise BadParameter(f"{text!r}; expected a share of the unique blocks, above 0 and at most 1")
    return Size(value, Unit.SHARE)


def gb_flag(text: str) -> Size:
    """A size in GB, without the unit."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= _MAX_GB:
        raise BadParameter(f"{text!r}; expected at most {_MAX_GB} GB")
    return Size(value, Unit.GB)


def size_flag(text: str) -> Size:
    """A size in any unit: 0.05 is a share, 9000 a number of chunks, 40GB that."""
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


def chunk_nbytes(dtype: str, block_tokens: int, **sizes: int | None) -> int | None:
    """Bytes of a chunk, keys and values of all layers; None if no size of a model is given.

    Args:
      dtype: of the KV cache.
      block_tokens: tokens of a chunk.
      sizes: those of `_MODEL_FLAGS`.
    Raises:
      InputError: some sizes are missing, or the dtype is none of numbers.
    """
    num_bits = _num_bits(dtype)
    given = {name: size for name, size in sizes.items() if size is not None}
    if not given:
        return None
    if missing := [name for name in _MODEL_FLAGS if name not in given]:
        raise InputError(f"a model needs --{missing[0].replace('_', '-')} as well")
    return -(-2 * math.prod(given.values()) * block_tokens * num_bits // 8)


def _num_bits(dtype_name: str) -> int:
    """Bits of a value. Not by `itemsize`, which is a whole byte for types of 4 bits; packed, two of them share one."""
    try:
        dtype = np.dtype(dtype_name)
        if dtype.kind != "c":  # `finfo` says how large each part of a complex number is
            for info in (ml_dtypes.iinfo, ml_dtypes.finfo):
                with contextlib.suppress(ValueError):  # it is for the other kind
                    return int(info(dtype).bits)
        raise TypeError(f"{dtype} is no type of real numbers")
    except (TypeError, ValueError, SyntaxError) as e:
        raise InputError(
            f"--dtype {dtype_name!r}; expected the name of a type of real numbers, like bfloat16 or float8_e4m3fn"
        ) from e
