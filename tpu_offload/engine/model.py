"""A Llama-shaped decoder in Flax NNX: GQA, rotary positions, RMSNorm, SwiGLU; random weights from a seed.

Some layers may have a gated delta net in place of attention (`delta_net`).

The modules process tiles of rows, independent of requests, blocks and batches; `forward` combines them with the paged
cache.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_offload import FusedCopies
from tpu_offload.engine.attention import map_row_tiles, paged_attention, write_kv
from tpu_offload.engine.batch import StepInputs
from tpu_offload.engine.config import ModelConfig
from tpu_offload.engine.delta_net import GatedDeltaNet
from tpu_offload.engine.shards import Shards


def rotate(x: jax.Array, positions: jax.Array, *, theta: float) -> jax.Array:
    """Rotary position embedding, halves paired as in Llama.

    Args:
      x: f32[rows, heads, head_dim].
      positions: i32[rows].
      theta: base of the frequencies.

    References:
      Su et al., RoFormer, 2021.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class SwiGLU(nnx.Module):
    """The second half of every layer.

    Args:
      config: sizes.
      rngs: source of the random weights.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        self.gate = nnx.Linear(config.d_model, config.d_ff, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(config.d_model, config.d_ff, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(config.d_ff, config.d_model, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """What it adds to the residual stream, f32[rows, d_model]."""
        y = self.norm(x)
        return self.down(nnx.silu(self.gate(y)) * self.up(y))


class DecoderLayer(nnx.Module):
    """One layer with attention, cut in two where the paged attention sits between.

    Args:
      config: sizes.
      rngs: source of the random weights.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.attention_norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        self.q = nnx.Linear(config.d_model, width, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(config.d_model, kv_width, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(config.d_model, kv_width, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(width, config.d_model, use_bias=False, rngs=rngs)
        self.mlp = SwiGLU(config, rngs=rngs)

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries, and keys and values as the cache stores them.

        Args:
          x: f32[rows, d_model].
          positions: i32[rows].
        Returns:
          f32[rows, kv_heads, group, head_dim], scaled for attention, and
          kv_dtype[rows, 2 * kv_heads / packing, packing, head_dim].
        """
        c = self.config
        rows = x.shape[0]
        x = self.attention_norm(x)
        q = rotate(self.q(x).reshape(rows, c.num_heads, c.head_dim), positions, theta=c.rope_theta)
        k = rotate(self.k(x).reshape(rows, c.num_kv_heads, c.head_dim), positions, theta=c.rope_theta)
        v = self.v(x).reshape(rows, c.num_kv_heads, c.head_dim)
        kv = jnp.stack([k, v], axis=2).reshape(rows, *c.page_shape(1)[1:])
        q = (q * (c.attention_gain * c.head_dim**-0.5)).reshape(rows, c.num_kv_heads, c.group_size, c.head_dim)
        return q, kv.astype(c.kv_dtype)

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Adds the attention's output and the SwiGLU to the residual stream, f32[rows, d_model]."""
        x = x + self.o(attended.reshape(x.shape[0], -1))
        return x + self.mlp(x)


class StateLayer(nnx.Module):
    """One layer with linear attention, cut in two where its states sit between.

    Args:
      config: sizes.
      rngs: source of the random weights.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.mixer_norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        self.mixer = GatedDeltaNet(config, rngs=rngs)
        self.mlp = SwiGLU(config, rngs=rngs)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As `GatedDeltaNet.project`, of the residual stream."""
        return self.mixer.project(self.mixer_norm(x))

    def finish(self, x: jax.Array, mixed: jax.Array, gate: jax.Array) -> jax.Array:
        """Adds the mixer's output and the SwiGLU to the residual stream, f32[rows, d_model]."""
        x = x + self.mixer.output(mixed, gate)
        return x + self.mlp(x)


class Decoder(nnx.Module):
    """The model. `forward` computes one step.

    Args:
      config: sizes, and the seed of the weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        rngs = nnx.Rngs(config.seed)
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.d_model, rngs=rngs)
        kinds = [StateLayer if i in config.state_layers else DecoderLayer for i in range(config.num_layers)]
        self.layers = nnx.List([kind(config, rngs=rngs) for kind in kinds])
        self.norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        self.head = nnx.Linear(config.d_model, config.vocab_size, use_bias=False, rngs=rngs)

    def logits(self, x: jax.Array) -> jax.Array:
        """f32[rows, vocab_size] from f32[rows, d_model]."""
        return self.head(self.norm(x))

    def forward(
        self, kv_caches: list[jax.Array], inputs: StepInputs, copies: FusedCopies, shards: Shards
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Computes the step's tokens, and stores their KV and the states after them.

        Args:
          kv_caches: as `ModelRunner.kv_caches`; donate them, they are updated.
          inputs: the batch.
          copies: what the offload library moves under the layers' compute; the caller finishes it.
          shards: the devices among which the caches are divided; `kv_caches` are the parts of this one.
        Returns:
          f32[samples, vocab_size], the logits after each request's last token of this step, and the
          caches.
        """
        x = self.embed(inputs.tokens)
        caches = list(kv_caches)
        windows, num_arrays = self.config.group_windows, self.config.num_arrays
        groups = self.config.layer_groups[: len(windows)]
        places = {layer: (group_id, j) for group_id, layers in enumerate(groups) for j, layer in enumerate(layers)}
        last_uses = {max(layers) for layers in zip(*groups, strict=True)}  # of each array
        for i, layer in enumerate(self.layers):
            if isinstance(layer, StateLayer):
                at = num_arrays + 2 * self.config.state_layers.index(i)
                qkv, gates, gate = map_row_tiles(layer.project, inputs.num_tokens, x)
                conv, states = caches[at : at + 2]
                mixed, caches[at], caches[at + 1] = layer.mixer.recur(conv, states, qkv, gates, inputs, shards)
                x = map_row_tiles(layer.finish, inputs.num_tokens, x, mixed, gate)
                continue
            group_id, j = places[i]
            q, kv = map_row_tiles(layer.project, inputs.num_tokens, x, inputs.positions)
            caches[j] = write_kv(caches[j], shards.own(kv, 1), inputs, group_id=group_id)
            attended = paged_attention(shards.own(q, 1), caches[j], inputs, group_id=group_id, window=windows[group_id])
            x = map_row_tiles(layer.finish, inputs.num_tokens, x, shards.join(attended, 1))
            if i in last_uses:
                x, caches[j] = copies.after_layer(j, x, caches[j])
        return map_row_tiles(self.logits, inputs.num_samples, x[inputs.sample_rows]), caches
