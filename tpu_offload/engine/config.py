"""Sizes of the model and of the engine; both frozen, checked when they are built."""

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
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff"):
            _check_positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd; rotary embedding turns pairs, expected an even number")
        if self.kv_dtype not in _KV_DTYPES:
            raise ConfigError(f"kv_dtype={self.kv_dtype!r}; expected one of {', '.join(_KV_DTYPES)}")
        if 2 * self.num_kv_heads % self.kv_packing:
            raise ConfigError(
                f"{2 * self.num_kv_heads} key and value heads of {self.kv_dtype} cannot be packed {self.kv_packing} to "
                f"a 32-bit word; set num_kv_heads to a multiple of {math.lcm(2, self.kv_packing) // 2}"
            )

    @property
    def kv_packing(self) -> int:
        """KV elements that a 32-bit word holds."""
        return 4 // np.dtype(jnp.dtype(self.kv_dtype)).itemsize

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

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
      num_blocks: blocks in HBM; the whole cache.
      max_num_seqs: requests that hold blocks at one time.
      max_model_len: longest prompt plus output, in tokens.
      max_num_batched_tokens: tokens computed in one step; longer prompts are computed in chunks.
      enable_prefix_caching: whether blocks in HBM are found again by their contents.
    """

    block_size: int = 16
    num_blocks: int = 512
    max_num_seqs: int = 16
    max_model_len: int = 4096
    max_num_batched_tokens: int = 256
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_seqs", "max_model_len", "max_num_batched_tokens"):
            _check_positive(name, getattr(self, name))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is under max_num_seqs={self.max_num_seqs}: "
                "a step could not hold one token of each request"
            )


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}={value}; expected at least 1")
