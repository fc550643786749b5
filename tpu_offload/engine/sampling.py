"""Choosing the next token inside the step program."""

import jax
import jax.numpy as jnp

from tpu_offload.engine.attention import map_row_tiles
from tpu_offload.engine.batch import StepInputs


def sample(logits: jax.Array, inputs: StepInputs) -> jax.Array:
    """Greedy or seeded random choice, row by row.

    The random key of a token is made from its request's seed and its position alone, so a request
    draws the same tokens whatever it is batched with and however often it is preempted.

    Args:
      logits: f32[samples, vocab_size].
      inputs: the batch; only its per-sample arrays are used.
    Returns:
      i32[samples].
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        # Gumbel noise turns argmax into a draw from softmax(logits / temperature).
        temperatures = jnp.where(inputs.temperatures > 0, inputs.temperatures, 1.0)
        scores = _keep_top_k(logits, inputs.top_ks) / temperatures[:, None]
        scores += jax.vmap(noise)(inputs.seeds, inputs.sample_positions)
        return jnp.where(inputs.temperatures > 0, jnp.argmax(scores, axis=-1).astype(jnp.int32), greedy)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), logits.shape[-1:])

    # Sorting the vocabulary costs more than the rest of a small step; all-greedy batches skip it.
    tokens: jax.Array = jax.lax.cond(jnp.any(inputs.temperatures > 0), draw, lambda: greedy)
    return tokens


def logprobs(logits: jax.Array, tokens: jax.Array, inputs: StepInputs) -> jax.Array:
    """Log-probabilities of tokens under softmax(logits), without temperature or top-k.

    Args:
      logits: f32[samples, vocab_size].
      tokens: i32[samples].
      inputs: the batch; only `num_samples` is used.
    Returns:
      f32[samples]; rows past the samples are garbage.
    """

    def one_tile(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    # In tiles, as the dense layers: the sum over the vocabulary has one shape for every engine.
    result: jax.Array = map_row_tiles(one_tile, inputs.num_samples, logits, tokens)
    return result


def _keep_top_k(logits: jax.Array, top_ks: jax.Array) -> jax.Array:
    """Sets all but each row's `top_ks` largest logits to -inf; 0 keeps all, ties with the last one stay."""
    vocab_size = logits.shape[-1]
    smallest_first = jnp.sort(logits, axis=-1)
    rank = jnp.where(top_ks > 0, jnp.maximum(vocab_size - top_ks, 0), 0)
    threshold = jnp.take_along_axis(smallest_first, rank[:, None], axis=-1)
    return jnp.where(logits >= threshold, logits, -jnp.inf)
