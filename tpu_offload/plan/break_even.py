"""From which bandwidth on is it faster to load KV than to compute it again? Arithmetic, without a device.

Computing a prompt's KV takes

    FLOPs = 2 x active parameters x tokens + 2 x layers x heads x (qk width + v width) x attended tokens

on chips that reach a part of their peak (MFU). Each token attends to all before it, on average half of the prefix, or
to those in its window; linear attention adds a little. What is loaded is the KV of the layers with full attention, the
last tokens of those with a window, and one state.
The break-even bandwidth is the bytes of the KV over that time. A tier that delivers more, up to HBM, brings the first
token earlier; one that delivers less still frees a busy device of the FLOPs.

What it leaves out: parameters that a prefill hardly uses (the embedding, and the head, of which a prompt needs one row)
count, so a model of 8B is up to 13 % faster than this; softmax, norms and collectives are in the MFU; a tier's latency
and queue are not here (`core.load_costs` measures both). Weights in 8 bits are assumed to be multiplied at the bf16
peak, as with activations in bf16.
"""

import dataclasses
from typing import final

from tpu_offload.errors import InputError
from tpu_offload.plan.machines import Chip
from tpu_offload.plan.model import ModelShape

MFU_RANGE = 0.4, 0.6
"""What prefill reaches of a chip's peak; an assumption. Sparse models on many chips reach less."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """A figure for the ends of `MFU_RANGE`.

    Attributes:
      low: with the lower utilization.
      high: with the higher one.
    """

    low: float
    high: float


def prefill_s(model: ModelShape, chip: Chip, *, num_chips: float, mfu: float, first: int, end: int) -> float:
    """Seconds to compute the tokens `first` to `end - 1` of a prompt.

    Args:
      model: the model.
      chip: the kind of chip.
      num_chips: how many share the work; half of one is a core of a chip with two.
      mfu: what they reach of their peak, above 0 up to 1.
      first: tokens before, whose KV is there.
      end: tokens of the prompt, more than `first`.
    Raises:
      InputError: an argument is out of range.
    """
    if not 0 < mfu <= 1:
        raise InputError(f"{mfu=}; expected a share of the peak, above 0 up to 1")
    if not num_chips > 0:
        raise InputError(f"{num_chips=}; expected a number above 0")
    if not 0 <= first < end:
        raise InputError(f"tokens {first} to {end} of a prompt; expected 0 <= first < end")
    return model.prefill_flops(first, end) / (mfu * num_chips * chip.flops_per_s)


def prefix_nbytes(model: ModelShape, *, end: int, first: int = 0, kv_nbytes: int = 2, kv_copies: float = 1.0) -> float:
    """Bytes to load for the tokens `first` to `end - 1` of a prompt, over all chips.

    Args:
      model: the model.
      end: tokens of the prefix.
      first: tokens of it that are in HBM already.
      kv_nbytes: bytes of a cached number.
      kv_copies: how often the KV is stored: more than once if there are fewer KV heads than devices.
    """
    tokens, nbytes = end - first, 0.0
    for layers in model.attention:
        most = layers.window - 1 if layers.window and not model.ignores_windows else tokens
        nbytes += kv_copies * kv_nbytes * layers.count * layers.cached_width * min(tokens, most)
    return nbytes + (model.states.nbytes if model.states else 0)


def break_even(
    model: ModelShape,
    chip: Chip,
    *,
    num_chips: float,
    end: int,
    first: int = 0,
    mfu: tuple[float, float] = MFU_RANGE,
    kv_nbytes: int = 2,
    kv_copies: float = 1.0,
) -> Range:
    """Bytes per second, over all chips, from which on loading these tokens' KV is faster than computing it.

    Args:
      model: the model.
      chip: the kind of chip.
      num_chips: how many share the work; half of one is a core of a chip with two.
      end: tokens of the prefix.
      first: tokens of it that are in HBM already.
      mfu: what the chips reach of their peak, from and to.
      kv_nbytes, kv_copies: as in `prefix_nbytes`.
    Raises:
      InputError: an argument is out of range.
    """
    nbytes = prefix_nbytes(model, first=first, end=end, kv_nbytes=kv_nbytes, kv_copies=kv_copies)
    low, high = (nbytes / prefill_s(model, chip, num_chips=num_chips, mfu=one, first=first, end=end) for one in mfu)
    return Range(low, high)


def least_prefix(
    model: ModelShape,
    chip: Chip,
    *,
    num_chips: float,
    nbytes_per_s: float,
    mfu: float,
    most: int = 131_072,
    kv_nbytes: int = 2,
    kv_copies: float = 1.0,
) -> int | None:
    """The shortest prefix from which on a tier of this bandwidth is faster than prefill, which slows down with length.

    Args:
      model: the model.
      chip: the kind of chip.
      num_chips: how many share the work; half of one is a core of a chip with two.
      nbytes_per_s: what the tier delivers, in all.
      mfu: what the chips reach of their peak.
      most: the longest prefix that counts.
      kv_nbytes, kv_copies: as in `prefix_nbytes`.
    Returns:
      Its tokens; None if prefill is faster for all up to `most`.
    Raises:
      InputError: an argument is out of range.
    """

    def pays(end: int) -> bool:
        found = break_even(
            model, chip, num_chips=num_chips, end=end, mfu=(mfu, mfu), kv_nbytes=kv_nbytes, kv_copies=kv_copies
        )
        return found.low <= nbytes_per_s

    if not pays(most):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle + 1, high)
    return low
