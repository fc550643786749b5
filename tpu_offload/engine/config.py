"""Frozen, validated configs of model and engine, and sizes derived from both."""

import dataclasses
import math

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
      window_layers: layers with sliding-window attention, ascending; at least one layer is not among them.
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
        self._check_windows()

    def _check_windows(self) -> None:
        window, layers = self.sliding_window, self.window_layers
        if window < 0:
            raise ConfigError(f"sliding_window={window}; expected at least 1, or 0 for none")
        if bool(window) != bool(layers):
            raise ConfigError(f"sliding_window={window} with window_layers={layers}; expected both or neither")
        if list(layers) != sorted(set(layers)) or not set(layers) <= set(range(self.num_layers)):
            raise ConfigError(
                f"window_layers={layers}; expected layer ids from 0 to {self.num_layers - 1}, ascending, none twice"
            )
        if len(layers) == self.num_layers:
            raise ConfigError(f"window_layers={layers} are all the layers; expected at least one with full attention")

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
        """Layers that share block ids: those with full attention, then the windowed ones if there are any."""
        full = tuple(i for i in range(self.num_layers) if i not in self.window_layers)
        return (full, self.window_layers) if self.window_layers else (full,)

    def window_of(self, layer: int) -> int:
        """The last tokens that a token attends to in this layer; 0 for all of them."""
        return self.sliding_window if layer in self.window_layers else 0

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
      num_blocks: blocks in HBM for the layers with full attention.
      num_window_blocks: blocks in HBM for the windowed layers, if the model has any; 0 for a full ring
        for each of `max_num_seqs` requests.
      max_num_seqs: most requests that hold blocks at a time.
      max_model_len: longest prompt plus output, in tokens.
      max_num_batched_tokens: tokens computed in one step; longer prompts are computed in chunks.
      enable_prefix_caching: whether blocks in HBM are reused for equal prefixes. Always off with windowed layers.
      num_spare_blocks: an admission watermark: blocks that must stay free for each sequence that holds blocks when
        another one is admitted or swapped in; none for a full ring. With 0 as many sequences as possible run at a time,
        and some are soon preempted.
      async_scheduling: whether a step is dispatched before the tokens of the previous step are read, so that the device
        does not wait for the host.
    """

    block_size: int = 16
    num_blocks: int = 512
    num_window_blocks: int = 0
    max_num_seqs: int = 16
    max_model_len: int = 4096
    max_num_batched_tokens: int = 256
    enable_prefix_caching: bool = True
    num_spare_blocks: int = 1
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_seqs", "max_model_len", "max_num_batched_tokens"):
            _check_positive(name, getattr(self, name))
        if self.num_spare_blocks < 0:
            raise ConfigError(f"num_spare_blocks={self.num_spare_blocks}; expected 0 or more")
        if self.num_window_blocks < 0:
            raise ConfigError(
                f"num_window_blocks={self.num_window_blocks}; expected at least 1, or 0 to size it by max_num_seqs"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is under max_num_seqs={self.max_num_seqs}: "
                "a step could not hold one token of each request"
            )


def window_ring_blocks(model: ModelConfig, engine: EngineConfig) -> int:
    """Blocks in the ring that holds one request's KV of the windowed layers.

    Block `b` of the request is entry `b % window_ring_blocks`. The KV of a step is written before any of it is read, so
    the ring must hold the tokens of the largest step plus those that the step's first token attends to, at any offset
    within a block.

    Returns:
      At most the blocks of `max_model_len` tokens; 0 for a model without windowed layers.
    """
    if not model.sliding_window:
        return 0
    num_tokens = model.sliding_window - 1 + engine.max_num_batched_tokens
    ring_blocks = _num_blocks(num_tokens - 1, engine.block_size) + 1
    return min(ring_blocks, _num_blocks(engine.max_model_len, engine.block_size))


def num_blocks_of(model: ModelConfig, engine: EngineConfig) -> tuple[int, ...]:
    """Blocks in HBM of each group of layers, in the order of `ModelConfig.layer_groups`.

    Raises:
      ConfigError: there are fewer blocks for the windowed layers than one request needs.
    """
    if not model.window_layers:
        return (engine.num_blocks,)
    ring_blocks = window_ring_blocks(model, engine)
    num_window_blocks = engine.num_window_blocks or engine.max_num_seqs * ring_blocks
    if num_window_blocks < ring_blocks:
        raise ConfigError(
            f"num_window_blocks={num_window_blocks} is under the {ring_blocks} blocks of one request's ring "
            f"(sliding_window={model.sliding_window}, max_num_batched_tokens={engine.max_num_batched_tokens}); "
            f"set num_window_blocks to at least {ring_blocks}"
        )
    return engine.num_blocks, num_window_blocks


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}={value}; expected at least 1")
