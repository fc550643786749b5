"""Frozen, validated configs of model and engine."""

import dataclasses
import math
import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_offload import ConfigError

_KV_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-shaped decoder. The default computes a prompt token in about 0.1 ms on two CPU cores.

    Attributes:
      vocab_size: 256 byte values, then special tokens, padded to a round number.
      num_layers: decoder layers.
      d_model: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key and value heads; divides `num_heads`.
      head_dim: width of a head, even.
      d_ff: width of the SwiGLU.
      rope_theta: base of the rotary frequencies.
      norm_eps: added to the mean square in RMSNorm.
      attention_gain: factor on the attention scores. Above 1, attention picks out few keys, so that
        one wrong block of KV shows in the output; at 1 a random model averages it away.
      kv_dtype: element type of the KV cache; the arithmetic itself is float32.
      sliding_window: in `window_layers`, the last tokens that a token attends to, itself included;
        0 for a model without such layers.
      window_layers: layers with sliding-window attention, ascending; a multiple of the number of the layers with full
        attention, so that they can be divided into groups of as many layers (see `layer_groups`).
      state_layers: layers with linear attention (a gated delta net), ascending: they keep a state of a fixed size in
        place of keys and values.
      num_state_heads: heads of these layers.
      state_head_dim: width of their keys and of their values.
      conv_kernel: inputs that a token's convolution sees in these layers, its own included.
      seed: of the random weights.
    """

    vocab_size: int = 320
    num_layers: int = 4
    d_model: int = 256
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    d_ff: int = 704
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    attention_gain: float = 4.0
    kv_dtype: str = "bfloat16"
    sliding_window: int = 0
    window_layers: tuple[int, ...] = ()
    state_layers: tuple[int, ...] = ()
    num_state_heads: int = 8
    state_head_dim: int = 32
    conv_kernel: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff"):
            _check_positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd; rotary embedding turns pairs, expected an even number")
        if self.kv_dtype not in _KV_DTYPES:
            raise ConfigError(f"kv_dtype={self.kv_dtype!r}; expected one of {', '.join(_KV_DTYPES)}")
        if 2 * self.num_kv_heads % self.kv_packing:
            raise ConfigError(
                f"{2 * self.num_kv_heads} key and value heads of {self.kv_dtype} cannot be packed {self.kv_packing} to "
                f"a 32-bit word; set num_kv_heads to a multiple of {math.lcm(2, self.kv_packing) // 2}"
            )
        self._check_states()
        self._check_windows()

    def _check_states(self) -> None:
        for name in ("num_state_heads", "state_head_dim"):
            _check_positive(name, getattr(self, name))
        if self.conv_kernel < 2:
            raise ConfigError(f"conv_kernel={self.conv_kernel}; expected at least 2")
        self._check_layers("state_layers")
        both = set(self.state_layers) & set(self.window_layers)
        if both:
            raise ConfigError(f"layers {sorted(both)} are in window_layers and in state_layers; expected one of them")

    def _check_layers(self, name: str) -> None:
        layers = getattr(self, name)
        if list(layers) != sorted(set(layers)) or not set(layers) <= set(range(self.num_layers)):
            raise ConfigError(
                f"{name}={layers}; expected layer ids from 0 to {self.num_layers - 1}, ascending, none twice"
            )
        if len(layers) == self.num_layers:
            raise ConfigError(f"{name}={layers} are all the layers; expected at least one with full attention")

    def _check_windows(self) -> None:
        window, layers = self.sliding_window, self.window_layers
        if window < 0:
            raise ConfigError(f"sliding_window={window}; expected at least 1, or 0 for none")
        if bool(window) != bool(layers):
            raise ConfigError(f"sliding_window={window} with window_layers={layers}; expected both or neither")
        self._check_layers("window_layers")
        num_full = self.num_layers - len(layers) - len(self.state_layers)
        if not num_full:
            raise ConfigError(
                f"window_layers={layers} and state_layers={self.state_layers} are all the layers; expected at least "
                "one with full attention"
            )
        if len(layers) % num_full:
            raise ConfigError(
                f"{len(layers)} window_layers beside {num_full} layers with full attention cannot be divided into "
                f"groups of {num_full}, which share arrays; expected a multiple of {num_full} window_layers"
            )

    @property
    def kv_packing(self) -> int:
        """KV elements that a 32-bit word holds."""
        return 4 // np.dtype(jnp.dtype(self.kv_dtype)).itemsize

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers that share a block table: full attention, then as many windowed ones per group, then all with states.

        Layer `j` of every group with attention uses KV cache array `j`. A block belongs to one of them at a time.
        """
        others = {*self.window_layers, *self.state_layers}
        full = tuple(i for i in range(self.num_layers) if i not in others)
        num_window_groups = len(self.window_layers) // len(full)
        windows = (self.window_layers[g::num_window_groups] for g in range(num_window_groups))
        return full, *windows, *([self.state_layers] if self.state_layers else [])

    @property
    def group_windows(self) -> tuple[int, ...]:
        """Per layer group with attention, the last tokens that a token attends to; 0 for all of them."""
        return 0, *[self.sliding_window] * (len(self.layer_groups) - 1 - bool(self.state_layers))

    @property
    def num_arrays(self) -> int:
        """KV cache arrays: layers per group with attention."""
        return len(self.layer_groups[0])

    @property
    def num_state_channels(self) -> int:
        """Channels of the convolution in a layer with states: queries, keys and values of all heads."""
        return 3 * self.num_state_heads * self.state_head_dim

    @property
    def state_shapes(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shapes and dtypes of one row of the arrays of the layers with states, in the order of the arrays.

        Per layer the last inputs of the convolution, `[conv_kernel - 1, channels]`, and the recurrent state, `[heads,
        key dim, value dim]`. The latter is a sum over all tokens, so it is kept in float32.
        """
        conv = (self.conv_kernel - 1, self.num_state_channels), self.kv_dtype
        recurrent = (self.num_state_heads, self.state_head_dim, self.state_head_dim), "float32"
        return (conv, recurrent) * len(self.state_layers)

    def page_shape(self, block_size: int) -> tuple[int, int, int, int]:
        """One layer's slice of a block, as tpu-inference lays it out.

        The heads are interleaved k0, v0, k1, v1, ... and each `packing` consecutive ones sit in one
        sublane of a TPU tile, so that the last two axes need no padding there.
        """
        return (block_size, 2 * self.num_kv_heads // self.kv_packing, self.kv_packing, self.head_dim)

    @property
    def name(self) -> str:
        """Names the weights, for the fingerprint of the KV layout: equal names mean equal weights."""
        return repr(self)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine. Output tokens depend on none of them.

    Attributes:
      block_size: tokens in a KV block.
      num_blocks: blocks in HBM, for all layer groups together; the null block, which no request holds, is not counted.
      max_num_seqs: most requests that hold blocks at a time.
      max_model_len: longest prompt plus output, in tokens.
      max_num_batched_tokens: tokens computed in one step; longer prompts are computed in chunks.
      enable_prefix_caching: whether blocks in HBM are reused for equal prefixes.
      num_spare_blocks: an admission watermark: blocks that must stay free for each sequence that holds blocks when
        another one is admitted or swapped in, in each layer group whose window it does not fill yet. With 0 as many
        sequences as possible run at a time, and some are soon preempted.
      async_scheduling: whether a step is dispatched before the tokens of the previous step are read, so that the device
        does not wait for the host.
      num_states: rows for the states of linear attention, if the model has any; the null row is not counted. A request
        that runs holds up to two, the others are a prefix cache. 0 stands for four times `max_num_seqs`.
    """

    block_size: int = 16
    num_blocks: int = 512
    max_num_seqs: int = 16
    max_model_len: int = 4096
    max_num_batched_tokens: int = 256
    enable_prefix_caching: bool = True
    num_spare_blocks: int = 1
    async_scheduling: bool = False
    num_states: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_seqs", "max_model_len", "max_num_batched_tokens"):
            _check_positive(name, getattr(self, name))
        if self.num_spare_blocks < 0:
            raise ConfigError(f"num_spare_blocks={self.num_spare_blocks}; expected 0 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is under max_num_seqs={self.max_num_seqs}: "
                "a step could not hold one token of each request"
            )
        if self.num_states and self.num_states < 2 * self.max_num_seqs:
            raise ConfigError(
                f"num_states={self.num_states}; expected at least 2 * max_num_seqs={2 * self.max_num_seqs}, two for "
                "each running request, or 0"
            )

    @property
    def num_state_rows(self) -> int:
        """Rows for states, without the null row."""
        return self.num_states or 4 * self.max_num_seqs


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name}={value!r:.60}; expected an integer")
    if value < 1:
        raise ConfigError(f"{name}={value}; expected at least 1")
