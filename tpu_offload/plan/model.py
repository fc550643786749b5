"""What a model costs: its parameters, the KV that each kind of layer keeps, and the FLOPs of a prefill.

`model_config` makes one from a `config.json`. Everything else here is arithmetic on it, without a device.
"""

import dataclasses
import math
from typing import final

LANES = 128
"""To multiples of this, heads and latents are padded in a page."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayers:
    """Layers of attention that are alike.

    Attributes:
      count: how many there are.
      num_heads: query heads.
      qk_width: width of a head of queries and keys, as a prefill multiplies them.
      v_width: width of a head of values.
      num_kv_heads: heads of keys and values that are cached; of latent attention 1.
      head_dim: width of a cached head; of latent attention unused.
      window: tokens that a token attends to, itself included; 0 for all.
      latent_widths: of latent attention, the widths of what is cached: the latent, and its part with positions.
    """

    count: int
    num_heads: int
    qk_width: int
    v_width: int
    num_kv_heads: int
    head_dim: int
    window: int = 0
    latent_widths: tuple[int, ...] = ()

    @property
    def cached_width(self) -> int:
        """Numbers that one layer caches for a token, padded as in a page: keys and values of all heads, or a latent."""
        if self.latent_widths:
            return sum(align(width, LANES) for width in self.latent_widths)
        # Heads of 64 are not padded: the key and the value of one share a row.
        return 2 * self.num_kv_heads * (64 if self.head_dim == 64 else align(self.head_dim, LANES))

    def num_attended(self, first: int, end: int) -> float:
        """How many tokens before them the tokens `first` to `end - 1` attend to, each in the middle of its step."""
        if not self.window:
            return (end - first) * (first + end) / 2
        inside = min(max(first, self.window), end)  # from here on the window limits
        return (inside - first) * (first + inside) / 2 + (end - inside) * self.window

    def flops(self, first: int, end: int) -> float:
        """FLOPs of attention itself, in all of these layers."""
        return 2.0 * self.count * self.num_heads * (self.qk_width + self.v_width) * self.num_attended(first, end)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateLayers:
    """Layers of linear attention (gated delta nets), which keep a state in place of KV.

    Attributes:
      count: how many there are.
      conv_shape: of the state of the convolution.
      ssm_shape: of the recurrent state.
      conv_nbytes: bytes of an element of the first.
      ssm_nbytes: of the second.
    """

    count: int
    conv_shape: tuple[int, ...]
    ssm_shape: tuple[int, ...]
    conv_nbytes: int
    ssm_nbytes: int

    @property
    def layer_nbytes(self) -> int:
        """Bytes of the state of one layer, over all devices."""
        return math.prod(self.conv_shape) * self.conv_nbytes + math.prod(self.ssm_shape) * self.ssm_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the state of one request, in all of these layers."""
        return self.count * self.layer_nbytes

    def flops(self, first: int, end: int) -> float:
        """FLOPs of updating and reading the state, a token at a time; a chunked kernel takes somewhat more."""
        return 6.0 * self.count * math.prod(self.ssm_shape) * (end - first)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Numbers of parameters, by what their precision depends on and how they are divided over devices.

    Attributes:
      embedding: embedding and head.
      attention: projections of the attention and linear-attention layers.
      dense: multilayer perceptrons that every token uses, shared experts and routers included.
      experts: those of all routed experts.
      active_experts: those of the routed experts that one token uses.
    """

    embedding: float
    attention: float
    dense: float
    experts: float = 0.0
    active_experts: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.embedding + self.attention + self.dense + self.experts

    @property
    def active(self) -> float:
        """Those that one token uses; the embedding counts, though a prefill hardly uses it."""
        return self.embedding + self.attention + self.dense + self.active_experts


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightBits:
    """Bits of a parameter, by its kind; 4-bit formats with their scales.

    Attributes:
      embedding: of the embedding and the head.
      others: of attention and of perceptrons that are no routed experts.
      experts: of routed experts.
      name: how the report calls them.
    """

    embedding: float
    others: float
    experts: float
    name: str


# By name. With its scale, a value of a 4-bit format takes 4.25 bits.
WEIGHT_BITS = {
    "bf16": WeightBits(embedding=16, others=16, experts=16, name="bf16"),
    "fp8": WeightBits(embedding=16, others=8, experts=8, name="fp8"),
    "int8": WeightBits(embedding=16, others=8, experts=8, name="int8"),
    "mxfp4": WeightBits(embedding=16, others=16, experts=4.25, name="experts in mxfp4"),
    "int4": WeightBits(embedding=16, others=4.25, experts=4.25, name="int4"),
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model.

    Attributes:
      name: as the report calls it.
      repo: what `vllm serve` gets.
      params: numbers of parameters.
      weight_bits: their precision.
      attention: layers of attention, by kind: full attention first, then windows.
      states: layers of linear attention; None without.
      max_tokens: longest context that the model was made for.
      ignores_windows: whether vLLM-TPU gives layers with a window KV of full length.
      weights_changed: whether `weight_bits` are not those of the repository.
    """

    name: str
    repo: str
    params: Parameters
    weight_bits: WeightBits
    attention: tuple[AttentionLayers, ...]
    states: StateLayers | None
    max_tokens: int
    ignores_windows: bool = False
    weights_changed: bool = False

    @property
    def is_latent(self) -> bool:
        """Whether it has latent attention."""
        return bool(self.attention[0].latent_widths)

    def weight_nbytes(self, *, attention_copies: int = 1) -> float:
        """Bytes of the weights over all devices; with data-parallel ranks each has a copy of the attention's."""
        params, bits = self.params, self.weight_bits
        others = params.attention * attention_copies + params.dense
        return (params.embedding * bits.embedding + others * bits.others + params.experts * bits.experts) / 8

    def prefill_flops(self, first: int, end: int) -> float:
        """FLOPs to compute the tokens `first` to `end - 1` of a prompt."""
        flops = 2.0 * self.params.active * (end - first) + sum(layers.flops(first, end) for layers in self.attention)
        return flops + (self.states.flops(first, end) if self.states else 0.0)


def align(number: int, to: int) -> int:
    """The next multiple."""
    return -(-number // to) * to
