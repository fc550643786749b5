"""From which bandwidth on is it faster to load KV than to compute it again? Arithmetic, without a device.

Computing a prompt's KV takes

    FLOPs = 2 x active parameters x tokens + 2 x layers x heads x (qk width + v width) x attended tokens

on chips that reach a part of their peak (MFU). Each token attends to all before it: on average half of the prefix.
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

MFU_RANGE = 0.4, 0.6
"""What prefill reaches of a chip's peak; an assumption. Sparse models on many chips reach less."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """An accelerator.

    Attributes:
      name: its name.
      flops_per_s: peak, dense, bf16.
      hbm_nbytes: device memory.
      source: of the figures.
    """

    name: str
    flops_per_s: float
    hbm_nbytes: int
    source: str


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the cost of a model's prefill and the size of its KV depend on.

    Attributes:
      name: its name.
      num_params: all parameters.
      num_active_params: those that one token uses; fewer in a mixture of experts.
      weight_nbytes: of one parameter.
      num_layers: layers with attention.
      num_heads: query heads.
      qk_width: width of a head of queries and keys, as prefill multiplies them.
      v_width: width of a head of values.
      kv_width: numbers that one layer caches for a token: keys and values of all KV heads, or a latent.
      kv_nbytes: bytes of one of them.
      source: of the figures.
    """

    name: str
    num_params: float
    num_active_params: float
    weight_nbytes: int
    num_layers: int
    num_heads: int
    qk_width: int
    v_width: int
    kv_width: int
    kv_nbytes: int
    source: str

    @property
    def token_nbytes(self) -> int:
        """KV of one token, all layers, one copy."""
        return self.num_layers * self.kv_width * self.kv_nbytes

    def prefill_flops(self, first: int, end: int) -> float:
        """FLOPs to compute the tokens `first` to `end - 1` of a prompt."""
        num_attended = (end - first) * (first + end) / 2
        attention = 2.0 * self.num_layers * self.num_heads * (self.qk_width + self.v_width) * num_attended
        return 2.0 * self.num_active_params * (end - first) + attention

    def fits(self, chip: Chip, num_chips: int) -> bool:
        """Whether the weights fit into the memory of so many chips, with a tenth of it for everything else."""
        return self.num_params * self.weight_nbytes <= 0.9 * chip.hbm_nbytes * num_chips


V6E = Chip(name="v6e", flops_per_s=918e12, hbm_nbytes=32 * 10**9, source="https://cloud.google.com/tpu/docs/v6e")

LLAMA_8B = ModelShape(
    name="Llama-3.1-8B",
    num_params=8.03e9,
    num_active_params=8.03e9,
    weight_nbytes=2,
    num_layers=32,
    num_heads=32,
    qk_width=128,
    v_width=128,
    kv_width=2 * 8 * 128,
    kv_nbytes=2,
    source="config.json of meta-llama/Llama-3.1-8B",
)
LLAMA_70B = ModelShape(
    name="Llama-3.1-70B",
    num_params=70.6e9,
    num_active_params=70.6e9,
    weight_nbytes=2,
    num_layers=80,
    num_heads=64,
    qk_width=128,
    v_width=128,
    kv_width=2 * 8 * 128,
    kv_nbytes=2,
    source="config.json of meta-llama/Llama-3.1-70B",
)
DEEPSEEK_V3 = ModelShape(
    name="DeepSeek-V3",
    num_params=671e9,
    num_active_params=37e9,
    weight_nbytes=1,
    num_layers=61,
    num_heads=128,
    qk_width=128 + 64,  # prefill decompresses the latent: heads of 128, and 64 with rotary positions
    v_width=128,
    kv_width=512 + 64,
    kv_nbytes=2,
    source="config.json of deepseek-ai/DeepSeek-V3",
)
MODELS = (LLAMA_8B, LLAMA_70B, DEEPSEEK_V3)


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


def prefill_s(model: ModelShape, chip: Chip, *, num_chips: int, mfu: float, first: int, end: int) -> float:
    """Seconds to compute the tokens `first` to `end - 1` of a prompt.

    Args:
      model: the model.
      chip: the kind of chip.
      num_chips: how many share the work.
      mfu: what they reach of their peak, above 0 up to 1.
      first: tokens before, whose KV is there.
      end: tokens of the prompt, more than `first`.
    Raises:
      InputError: an argument is out of range.
    """
    if not 0 < mfu <= 1:
        raise InputError(f"{mfu=}; expected a share of the peak, above 0 up to 1")
    if num_chips < 1:
        raise InputError(f"{num_chips=}; expected at least 1")
    if not 0 <= first < end:
        raise InputError(f"tokens {first} to {end} of a prompt; expected 0 <= first < end")
    return model.prefill_flops(first, end) / (mfu * num_chips * chip.flops_per_s)


def break_even(
    model: ModelShape,
    chip: Chip,
    *,
    num_chips: int,
    end: int,
    first: int = 0,
    mfu: tuple[float, float] = MFU_RANGE,
) -> Range:
    """Bytes per second, over all chips, from which on loading these tokens' KV is faster than computing it.

    Args:
      model: the model.
      chip: the kind of chip.
      num_chips: how many share the work.
      end: tokens of the prefix.
      first: tokens of it that are in HBM already.
      mfu: what the chips reach of their peak, from and to.
    Raises:
      InputError: an argument is out of range.
    """
    nbytes = (end - first) * model.token_nbytes
    low, high = (nbytes / prefill_s(model, chip, num_chips=num_chips, mfu=one, first=first, end=end) for one in mfu)
    return Range(low, high)


def least_prefix(
    model: ModelShape, chip: Chip, *, num_chips: int, nbytes_per_s: float, mfu: float, most: int = 131_072
) -> int | None:
    """The shortest prefix from which on a tier of this bandwidth is faster than prefill, which slows down with length.

    Args:
      model: the model.
      chip: the kind of chip.
      num_chips: how many share the work.
      nbytes_per_s: what the tier delivers, in all.
      mfu: what the chips reach of their peak.
      most: the longest prefix that counts.
    Returns:
      Its tokens; None if prefill is faster for all up to `most`.
    Raises:
      InputError: an argument is out of range.
    """

    def pays(end: int) -> bool:
        return break_even(model, chip, num_chips=num_chips, end=end, mfu=(mfu, mfu)).low <= nbytes_per_s

    if not pays(most):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle + 1, high)
    return low
