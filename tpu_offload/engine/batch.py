"""The inputs of a step as arrays of fixed shape: the tokens of many requests end to end, and their tiles."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tpu_offload.engine.block_manager import NULL_BLOCK
from tpu_offload.engine.config import EngineConfig, ModelConfig
from tpu_offload.engine.request import SamplingParams

ROW_TILE = 32  # rows of a dense matmul; at 64 a decode step takes a third longer and a prefill no less
Q_TILE = 16  # queries of one sequence in a tile; a decoding sequence wastes all but one
KV_TILE = 128  # keys in a tile, rounded up to whole blocks


_PER_ROW = ("tokens", "positions", "write_offsets")
_PER_TILE = ("tile_starts", "tile_positions", "tile_lens", "tile_rows")
_PER_SAMPLE = {
    "first_rows": np.int32,
    "sample_rows": np.int32,
    "sample_positions": np.int32,
    "temperatures": np.float32,
    "top_ks": np.int32,
    "seeds": np.uint32,
    "state_sources": np.int32,
    "state_targets": np.int32,
}


def kv_tile_blocks(block_size: int) -> int:
    """Blocks in one tile of keys."""
    return -(-KV_TILE // block_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """A ragged batch. Shapes depend on the configs only; entries past the counts are 0.

    Made of numpy arrays; the step program sees them as jax arrays.

    Attributes:
      num_tokens: i32 scalar, tokens to compute.
      tokens: i32[rows], token ids; a request's tokens are consecutive.
      last_rows: i32[rows], the row of the previous step's sampled tokens to take the token from; -1 to use `tokens`.
      positions: i32[rows], position of each token in its request.
      write_blocks: i32[groups, rows], per layer group with attention the block that takes the token's KV.
      write_offsets: i32[rows], place in that block.
      num_tiles: i32 scalar, query tiles; each is up to `Q_TILE` tokens of one request, in row order.
      tile_starts: i32[tiles], first row of the tile.
      tile_positions: i32[tiles], position of that row's token.
      tile_lens: i32[tiles], tokens in the tile.
      tile_rows: i32[tiles], the request's row in `block_tables`.
      block_tables: i32[groups, max_num_seqs, max_blocks], per layer group with attention the blocks of each request by
        position.
      num_samples: i32 scalar, requests in the batch.
      first_rows: i32[samples], row of each request's first token.
      sample_rows: i32[samples], row of each request's last token.
      sample_positions: i32[samples], position of the token to be sampled.
      temperatures: f32[samples], 0 for greedy.
      top_ks: i32[samples], 0 for all tokens.
      seeds: u32[samples].
      state_sources: i32[samples], row of the state arrays with the state before each request's first token; the null
        block for a state of zeros.
      state_targets: i32[samples], row that takes the state after its last token.
    """

    num_tokens: jax.Array
    tokens: jax.Array
    last_rows: jax.Array
    positions: jax.Array
    write_blocks: jax.Array
    write_offsets: jax.Array
    num_tiles: jax.Array
    tile_starts: jax.Array
    tile_positions: jax.Array
    tile_lens: jax.Array
    tile_rows: jax.Array
    block_tables: jax.Array
    num_samples: jax.Array
    first_rows: jax.Array
    sample_rows: jax.Array
    sample_positions: jax.Array
    temperatures: jax.Array
    top_ks: jax.Array
    seeds: jax.Array
    state_sources: jax.Array
    state_targets: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of one request to compute in a step: a chunk of its prompt, or one new token.

    Attributes:
      tokens: token ids.
      position: position of the first one; KV of all before it is in the blocks.
      block_tables: per layer group with attention, the request's blocks by position, enough for `position +
        len(tokens)` tokens; with a window, the null block for those that the span does not see.
      sampling: how the token after the span is chosen.
      last_row: if the last token was sampled by the previous step and may still be in flight: its row in that step's
        output; the id in `tokens` is ignored then. Else -1.
      state_rows: in a model with states, the row with the state before the span, the null block for that of no tokens;
        and the row that takes the state after it, which may be the same.
    """

    tokens: Sequence[int]
    position: int
    block_tables: Sequence[Sequence[int]]
    sampling: SamplingParams
    last_row: int = -1
    state_rows: tuple[int, int] = (NULL_BLOCK, NULL_BLOCK)


def pack(spans: Sequence[TokenSpan], config: EngineConfig, model_config: ModelConfig) -> StepInputs:
    """Packs token spans end to end.

    Args:
      spans: at most `max_num_seqs`, together at most `max_num_batched_tokens` tokens; none is empty.
      config: gives the shapes.
      model_config: gives the layer groups.
    """
    rows = round_up(config.max_num_batched_tokens + Q_TILE, ROW_TILE)  # a query tile may reach past the last token
    num_tiles = config.max_num_batched_tokens // Q_TILE + config.max_num_seqs
    samples = round_up(config.max_num_seqs, ROW_TILE)
    width = round_up(-(-config.max_model_len // config.block_size), kv_tile_blocks(config.block_size))
    num_groups = len(model_config.group_windows)
    tables: Any = np.full((num_groups, config.max_num_seqs, width), NULL_BLOCK, np.int32)
    write_blocks: Any = np.full((num_groups, rows), NULL_BLOCK, np.int32)
    a: dict[str, Any] = {name: np.zeros(rows, np.int32) for name in _PER_ROW}
    a["last_rows"] = np.full(rows, -1, np.int32)
    a |= {name: np.zeros(num_tiles, np.int32) for name in _PER_TILE}
    a |= {name: np.zeros(samples, dtype) for name, dtype in _PER_SAMPLE.items()}

    row = tile = 0
    for i, span in enumerate(spans):
        n = len(span.tokens)
        for table, block_ids in zip(tables[:, i], span.block_tables, strict=True):
            table[: len(block_ids)] = block_ids
        at, positions = slice(row, row + n), np.arange(span.position, span.position + n)
        a["tokens"][at], a["positions"][at] = span.tokens, positions
        a["last_rows"][row + n - 1] = span.last_row
        write_blocks[:, at] = tables[:, i, positions // config.block_size]
        a["write_offsets"][at] = positions % config.block_size

        offsets = np.arange(0, n, Q_TILE)
        at = slice(tile, tile + len(offsets))
        a["tile_starts"][at], a["tile_positions"][at] = row + offsets, span.position + offsets
        a["tile_lens"][at], a["tile_rows"][at] = np.minimum(Q_TILE, n - offsets), i
        a["first_rows"][i], a["sample_rows"][i], a["sample_positions"][i] = row, row + n - 1, span.position + n
        row, tile = row + n, tile + len(offsets)

        a["state_sources"][i], a["state_targets"][i] = span.state_rows
        a["temperatures"][i], a["top_ks"][i], a["seeds"][i] = (
            span.sampling.temperature, span.sampling.top_k, span.sampling.seed
        )  # fmt: skip
    assert (write_blocks[:, :row] != NULL_BLOCK).all(), "a token has no block"
    if model_config.state_layers:
        assert (a["state_targets"][: len(spans)] != NULL_BLOCK).all(), "a state has no row"
    counts: dict[str, Any] = {
        "num_tokens": np.int32(row),
        "num_tiles": np.int32(tile),
        "num_samples": np.int32(len(spans)),
    }
    return StepInputs(block_tables=tables, write_blocks=write_blocks, **counts, **a)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple
