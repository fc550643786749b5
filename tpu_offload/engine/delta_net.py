"""Linear attention with a state of a fixed size: a gated delta net, as Qwen3-Next and Qwen3.5 have in most layers.

A layer keeps two things of all tokens before: the last inputs of a short causal convolution over the projected queries,
keys and values, and per head a matrix that maps keys to values. Each token decays the matrix, then corrects what it
returns for the token's key by a step towards the token's value:

    S <- alpha * S;    S <- S + k (beta * (v - S^T k))^T;    output = S^T q

Both make up the state. It exists only where a step ended, in the row of the state arrays that the step wrote: a step
reads one row and writes one, which may be the same.

The bits of a token must not depend on how its request was cut into steps (see `attention`). So the projections are
computed in row tiles, everything else token by token with shapes that depend on the model only; the inputs of the
convolution are rounded to the dtype of its state before use; and the recurrent state is kept in the dtype in which it
is computed.

References:
  Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, ICLR 2025.
  transformers, `models/qwen3_next` (`torch_recurrent_gated_delta_rule`).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from tpu_offload.engine.batch import StepInputs
from tpu_offload.engine.block_manager import NULL_BLOCK
from tpu_offload.engine.config import ModelConfig
from tpu_offload.engine.shards import Shards

# At initialization a head forgets half of its state within this many tokens.
_HALF_LIVES = 8.0, 512.0
_EPSILON = 1e-6  # as in transformers


class GatedDeltaNet(nnx.Module):
    """The mixer of one layer with states, in three parts: `project` and `output` in row tiles, `recur` between them.

    Args:
      config: sizes.
      rngs: source of the random weights.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        heads, width = config.num_state_heads, config.num_state_heads * config.state_head_dim
        self.qkv = nnx.Linear(config.d_model, config.num_state_channels, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(config.d_model, width, use_bias=False, rngs=rngs)
        self.decay = nnx.Linear(config.d_model, heads, use_bias=False, rngs=rngs)
        self.beta = nnx.Linear(config.d_model, heads, use_bias=False, rngs=rngs)
        kernel = jax.random.normal(rngs.params(), (config.conv_kernel, config.num_state_channels))
        self.kernel = nnx.Param(kernel / math.sqrt(config.conv_kernel))
        rates = math.log(2) / jnp.geomspace(*_HALF_LIVES, heads, dtype=jnp.float32)
        self.decay_bias = nnx.Param(jnp.log(jnp.expm1(rates)))  # softplus inverts this
        self.norm = nnx.RMSNorm(config.state_head_dim, epsilon=config.norm_eps, rngs=rngs)
        self.o = nnx.Linear(width, config.d_model, use_bias=False, rngs=rngs)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What a token adds to the states, apart from other tokens.

        Args:
          x: f32[rows, d_model], normalized.
        Returns:
          kv_dtype[rows, channels], the inputs of the convolution; f32[rows, 2, heads], alpha (what is left of the
          recurrent state, 0 to 1) and beta (how far it is corrected, 0 to 1); and f32[rows, heads, head_dim], the gate
          of the output.
        """
        c = self.config
        alpha = jnp.exp(-nnx.softplus(self.decay(x) + self.decay_bias[...]))
        gates = jnp.stack([alpha, nnx.sigmoid(self.beta(x))], axis=1)
        gate = self.gate(x).reshape(x.shape[0], c.num_state_heads, c.state_head_dim)
        return self.qkv(x).astype(c.kv_dtype), gates, gate

    def recur(
        self,
        conv_cache: jax.Array,
        state_cache: jax.Array,
        qkv: jax.Array,
        gates: jax.Array,
        inputs: StepInputs,
        shards: Shards,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs the step's tokens through the states, each request's from its own row, in order.

        Args:
          conv_cache: kv_dtype[num_states + 1, conv_kernel - 1, channels]; updated in place when the caller donates it.
          state_cache: f32[num_states + 1, heads, key dim, value dim]; likewise.
          qkv: from `project`.
          gates: from `project`.
          inputs: the tokens of each request, and the rows to read and to write.
          shards: the devices among which channels and heads of the caches are divided.
        Returns:
          f32[rows, heads, head_dim], 0 in rows that hold no token; and the caches.
        """
        c = self.config
        out = jnp.zeros((qkv.shape[0], c.num_state_heads, c.state_head_dim), jnp.float32)

        def one_token(
            t: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            conv, state, out = carry
            window = jnp.concatenate([conv, lax.dynamic_index_in_dim(qkv, t)])
            mixed, state = self._one_token(window.astype(jnp.float32), gates[t], state)
            return window[1:], state, lax.dynamic_update_slice_in_dim(out, mixed[None], t, 0)

        def one_request(
            i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            conv_cache, state_cache, out = carry
            source, target = inputs.state_sources[i], inputs.state_targets[i]
            conv, state = shards.join(_read(conv_cache, source), 1), shards.join(_read(state_cache, source), 0)
            end = inputs.sample_rows[i] + 1
            conv, state, out = lax.fori_loop(inputs.first_rows[i], end, one_token, (conv, state, out))
            conv, state = shards.own(conv, 1), shards.own(state, 0)
            conv_cache = lax.dynamic_update_slice_in_dim(conv_cache, conv[None], target, 0)
            return conv_cache, lax.dynamic_update_slice_in_dim(state_cache, state[None], target, 0), out

        start = conv_cache, state_cache, out
        conv_cache, state_cache, out = lax.fori_loop(0, inputs.num_samples, one_request, start)
        return out, conv_cache, state_cache

    def _one_token(self, window: jax.Array, gates: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The output of one token, f32[heads, head_dim], and the state after it.

        Args:
          window: f32[conv_kernel, channels], its input of the convolution and those before it.
          gates: f32[2, heads].
          state: f32[heads, key dim, value dim], before the token.
        """
        c = self.config
        mixed = nnx.silu((window * self.kernel[...]).sum(axis=0))
        q, k, v = mixed.reshape(3, c.num_state_heads, c.state_head_dim)
        q, k = _normalize(q) * c.state_head_dim**-0.5, _normalize(k)
        alpha, beta = gates[:, :, None]
        state = state * alpha[:, :, None]
        known = (state * k[:, :, None]).sum(axis=1)
        state = state + k[:, :, None] * (beta * (v - known))[:, None, :]
        return (state * q[:, :, None]).sum(axis=1), state

    def output(self, mixed: jax.Array, gate: jax.Array) -> jax.Array:
        """What the layer adds to the residual stream, f32[rows, d_model], from `recur` and `project`."""
        gated = self.norm(mixed) * nnx.silu(gate)
        return self.o(gated.reshape(mixed.shape[0], -1))


def _read(cache: jax.Array, row: jax.Array) -> jax.Array:
    """One row; zeros in place of what the null block contains."""
    return jnp.where(row == NULL_BLOCK, 0, lax.dynamic_index_in_dim(cache, row, keepdims=False)).astype(cache.dtype)


def _normalize(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + _EPSILON)
