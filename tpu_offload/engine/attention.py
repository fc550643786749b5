"""Batch-invariant paged attention: the result for a token never depends on what else is in the batch.

The engine serves a workload twice, with and without offloading, and compares every token. The two runs schedule
differently: other prefill chunks, other requests in a batch. Floating-point sums depend on their order, and a matrix
multiplication chooses its order by the shape of its operands, so equal tokens need equal shapes. Hence two rules:

* every matrix multiplication has one fixed shape: work is cut into tiles of a fixed number of rows,
  and a step runs as many tiles as it needs (`map_row_tiles` for the dense layers, the outer loop
  here for queries). A row's position in its tile does not change its bits; rows past the end are computed and
    ignored.
* the keys of a sequence are visited in tiles, in ascending order, with the running softmax of flash
  attention. Where a tile is cut depends on absolute positions only, and a tile that is masked for a
  row is an exact no-op for it: exp(-inf) adds 0 and the running maximum stays. So it does not
  matter which masked tiles a loop visits, before a row's first key or after its last.

In layers with a sliding window the loop starts at the tile with the first key that any of its
queries sees. Blocks before it have been freed: the table has the null block in their places, and
what is read from there is ignored.

The loops have dynamic trip counts: cost follows the real context, and one program serves every step.

References:
  Dao et al., FlashAttention, 2022 (running softmax).
  Kwon et al., PagedAttention, SOSP 2023 (block tables).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_offload.engine.batch import Q_TILE, ROW_TILE, StepInputs, kv_tile_blocks

# Of one head, per query row: the largest score so far, f32[rows, 1]; the sum of exp(score - peak), f32[rows, 1];
# and the sum of exp(score - peak) * value, f32[rows, head_dim].
type _Running = tuple[jax.Array, jax.Array, jax.Array]


def map_row_tiles(fn: Callable[..., Any], num_rows: jax.Array, *arrays: jax.Array) -> Any:
    """Applies `fn` to the first `num_rows` rows, `ROW_TILE` at a time.

    Args:
      fn: takes a tile `[ROW_TILE, ...]` of each array, returns a pytree of such tiles.
      num_rows: i32 scalar; rows past it, up to the next tile, are computed too.
      *arrays: `[rows, ...]`, rows a multiple of `ROW_TILE`.
    Returns:
      The pytree of `fn`, with `rows` rows; those of tiles not reached are 0.
    """
    rows = arrays[0].shape[0]
    if rows == ROW_TILE:
        # XLA would drop the slice, and compile `fn` to other code than in a loop over many tiles.
        padded = (jnp.pad(a, [(0, ROW_TILE), *[(0, 0)] * (a.ndim - 1)]) for a in arrays)
        return jax.tree.map(lambda o: o[:rows], map_row_tiles(fn, num_rows, *padded))
    tile = jax.eval_shape(fn, *(a[:ROW_TILE] for a in arrays))
    out = jax.tree.map(lambda s: jnp.zeros((rows, *s.shape[1:]), s.dtype), tile)

    def one_tile(i: jax.Array, out: Any) -> Any:
        start = i * ROW_TILE
        result = fn(*(lax.dynamic_slice_in_dim(a, start, ROW_TILE) for a in arrays))
        return jax.tree.map(lambda o, r: lax.dynamic_update_slice_in_dim(o, r, start, 0), out, result)

    return lax.fori_loop(0, (num_rows + ROW_TILE - 1) // ROW_TILE, one_tile, out)


def write_kv(cache: jax.Array, kv: jax.Array, inputs: StepInputs, *, group_id: int = 0) -> jax.Array:
    """Stores the step's keys and values in their blocks.

    One small update a token, in place, and only for real tokens: a scatter of bfloat16 would convert
    the whole cache to float32 and back on CPU.

    Args:
      cache: `[num_blocks, *page_shape]`, updated in place when the caller donates it.
      kv: `[rows, *page_shape[1:]]` of the same dtype.
      inputs: says which block and offset each row belongs to.
      group_id: the layer group.
    """
    write_blocks = inputs.write_blocks[group_id]

    def one_token(t: jax.Array, cache: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(kv, t, keepdims=True)[None]
        return lax.dynamic_update_slice(cache, row, (write_blocks[t], inputs.write_offsets[t], 0, 0, 0))

    written: jax.Array = lax.fori_loop(0, inputs.num_tokens, one_token, cache)
    return written


def paged_attention(
    q: jax.Array, cache: jax.Array, inputs: StepInputs, *, group_id: int = 0, window: int = 0
) -> jax.Array:
    """Causal attention of the step's tokens over their sequences' blocks.

    Reads back what `write_kv` stored, for this step's tokens too: a key that was rounded to the
    cache's dtype acts the same whether it was just computed or loaded from the host.

    Args:
      q: f32[rows, kv_heads, group, head_dim], rotated and scaled.
      cache: `[num_blocks, *page_shape]`, holding the KV of this step.
      inputs: the tiles and block tables.
      group_id: the layer group.
      window: the last tokens that a token attends to, itself included; 0 for all of them.
    Returns:
      f32[rows, kv_heads, group, head_dim]; rows that hold no token are garbage.
    """
    _, kv_heads, group, head_dim = q.shape
    block_tables = inputs.block_tables[group_id]

    def one_q_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        tile = lax.dynamic_slice_in_dim(q, inputs.tile_starts[i], Q_TILE)
        queries = [tile[:, h].reshape(Q_TILE * group, head_dim) for h in range(kv_heads)]
        block_table = block_tables[inputs.tile_rows[i]]
        position, num_queries = inputs.tile_positions[i], inputs.tile_lens[i]
        attended = _attend_tile(queries, cache, block_table, position, num_queries, window=window)
        tile = jnp.stack([a.reshape(Q_TILE, group, head_dim) for a in attended], axis=1)
        # Rows past the end of this tile belong to the next one, which overwrites them.
        return lax.dynamic_update_slice_in_dim(out, tile, inputs.tile_starts[i], 0)

    attended: jax.Array = lax.fori_loop(0, inputs.num_tiles, one_q_tile, jnp.zeros_like(q))
    return attended


def _attend_tile(
    queries: list[jax.Array],
    cache: jax.Array,
    block_table: jax.Array,
    position: jax.Array,
    num_queries: jax.Array,
    *,
    window: int,
) -> list[jax.Array]:
    """Attention of one tile of queries, a list over KV heads of f32[Q_TILE * group, head_dim]."""
    rows, head_dim = queries[0].shape
    block_size = cache.shape[1]
    num_tile_blocks = kv_tile_blocks(block_size)
    num_keys = num_tile_blocks * block_size
    context_len = position + num_queries
    row_positions = position + jnp.arange(rows) // (rows // Q_TILE)
    first_key = jnp.maximum(position - window + 1, 0) if window else 0

    def one_kv_tile(j: jax.Array, carry: list[_Running]) -> list[_Running]:
        block_ids = lax.dynamic_slice_in_dim(block_table, j * num_tile_blocks, num_tile_blocks)
        pages = jnp.concatenate([lax.dynamic_index_in_dim(cache, block_ids[n]) for n in range(num_tile_blocks)])
        kv = pages.reshape(num_keys, len(queries), 2, head_dim).astype(jnp.float32)
        key_positions = j * num_keys + jnp.arange(num_keys)
        visible = key_positions[None, :] <= row_positions[:, None]
        held = key_positions < context_len
        if window:
            visible &= key_positions[None, :] > row_positions[:, None] - window
            held &= key_positions >= first_key
        # Blocks may contain NaNs from an earlier owner, and 0 * NaN would pass the mask.
        kv = jnp.where(held[:, None, None, None], kv, 0.0)
        return [
            _accumulate(q, kv[:, h, 0], kv[:, h, 1], visible, c)
            for h, (q, c) in enumerate(zip(queries, carry, strict=True))
        ]

    # A window may mask the first tile for some rows. Were the peak -inf before and after it, -inf - -inf would
    # make a NaN; the lowest finite number stays, and counts as -inf does once a score is seen.
    start = (jnp.full((rows, 1), np.finfo(np.float32).min), jnp.zeros((rows, 1)), jnp.zeros((rows, head_dim)))
    num_kv_tiles = (context_len + num_keys - 1) // num_keys
    ends = lax.fori_loop(first_key // num_keys, num_kv_tiles, one_kv_tile, [start] * len(queries))
    return [acc / total for _, total, acc in ends]


def _accumulate(
    queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, running: _Running
) -> _Running:
    """Adds one tile of keys and values of one head to the running softmax."""
    peak, total, acc = running
    scores = jnp.where(visible, queries @ keys.T, -jnp.inf)
    new_peak = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
    weights, scale = jnp.exp(scores - new_peak), jnp.exp(peak - new_peak)
    return new_peak, total * scale + weights.sum(axis=-1, keepdims=True), acc * scale + weights @ values
