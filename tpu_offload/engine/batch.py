"""What one step computes, as arrays of fixed shape: tokens of many requests end to end, and their tiles."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from tpu_offload.engine.config import EngineConfig
from tpu_offload.engine.request import SamplingParams

ROW_TILE = 32  # rows of a dense matmul; at 64 a decode step takes a third longer and a prefill no less
Q_TILE = 16  # queries of one sequence in a tile; a decoding sequence wastes all but one
KV_TILE = 128  # keys in a tile, rounded up to whole blocks


def kv_tile_blocks(block_size: int) -> int:
    """Blocks in one tile of keys."""
    return -(-KV_TILE // block_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """A ragged batch. Shapes depend on `EngineConfig` only; entries past the counts are 0.

    Attributes:
      num_tokens: i32 scalar, tokens to compute.
      tokens: i32[rows], token ids; a request's tokens are consecutive.
      positions: i32[rows], position of each token in its request.
      write_blocks: i32[rows], block that takes the token's KV.
      write_offsets: i32[rows], place in that block.
      num_tiles: i32 scalar, query tiles; each is up to `Q_TILE` tokens of one request, in row order.
      tile_starts: i32[tiles], first row of the tile.
      tile_positions: i32[tiles], position of that row's token.
      tile_lens: i32[tiles], tokens in the tile.
      tile_rows: i32[tiles], the request's row in `block_tables`.
      block_tables: i32[max_num_seqs, max_blocks], blocks of each request.
      num_samples: i32 scalar, requests in the batch.
      sample_rows: i32[samples], row of each request's last token.
      sample_positions: i32[samples], position of the token to be sampled.
      top_ks: i32[samples], 0 for all tokens.
      seeds: u32[samples].
      temperatures: f32[samples], 0 for greedy.
    """

    num_tokens: np.ndarray | jax.Array
    tokens: np.ndarray | jax.Array
    positions: np.ndarray | jax.Array
    write_blocks: np.ndarray | jax.Array
    write_offsets: np.ndarray | jax.Array
    num_tiles: np.ndarray | jax.Array
    tile_starts: np.ndarray | jax.Array
    tile_positions: np.ndarray | jax.Array
    tile_lens: np.ndarray | jax.Array
    tile_rows: np.ndarray | jax.Array
    block_tables: np.ndarray | jax.Array
    num_samples: np.ndarray | jax.Array
    sample_rows: np.ndarray | jax.Array
    sample_positions: np.ndarray | jax.Array
    top_ks: np.ndarray | jax.Array
    seeds: np.ndarray | jax.Array
    temperatures: np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens of one request to compute in a step: a chunk of its prompt, or one new token.

    Attributes:
      tokens: token ids.
      position: position of the first one; KV of all before it is in the blocks.
      block_ids: the request's blocks, enough for `position + len(tokens)` tokens.
      sampling: how the token after the run is chosen.
    """

    tokens: Sequence[int]
    position: int
    block_ids: Sequence[int]
    sampling: SamplingParams


def pack(runs: Sequence[TokenRun], config: EngineConfig) -> StepInputs:
    """Lays the runs out end to end.

    Args:
      runs: at most `max_num_seqs`, together at most `max_num_batched_tokens` tokens; none is empty.
      config: gives the shapes.
    """
    rows = round_up(config.max_num_batched_tokens + Q_TILE, ROW_TILE)  # a query tile may reach past the last token
    num_tiles = config.max_num_batched_tokens // Q_TILE + config.max_num_seqs
    samples = round_up(config.max_num_seqs, ROW_TILE)
    width = round_up(-(-config.max_model_len // config.block_size), kv_tile_blocks(config.block_size))
    row_ints = np.zeros((4, rows), np.int32)
    tile_ints = np.zeros((4, num_tiles), np.int32)
    tables = np.zeros((config.max_num_seqs, width), np.int32)
    sample_ints = np.zeros((3, samples), np.int32)
    seeds, temperatures = np.zeros(samples, np.uint32), np.zeros(samples, np.float32)

    row = tile = 0
    for i, run in enumerate(runs):
        n = len(run.tokens)
        positions = np.arange(run.position, run.position + n)
        tables[i, : len(run.block_ids)] = run.block_ids
        row_ints[:, row : row + n] = (
            run.tokens, positions, tables[i, positions // config.block_size], positions % config.block_size
        )  # fmt: skip
        offsets = np.arange(0, n, Q_TILE)
        tile_ints[:, tile : tile + len(offsets)] = (
            row + offsets, run.position + offsets, np.minimum(Q_TILE, n - offsets), np.full(len(offsets), i)
        )  # fmt: skip
        row, tile = row + n, tile + len(offsets)
        sample_ints[:, i] = (row - 1, run.position + n, run.sampling.top_k)
        seeds[i], temperatures[i] = run.sampling.seed, run.sampling.temperature
    return StepInputs(
        np.int32(row), *row_ints, np.int32(tile), *tile_ints, tables,
        np.int32(len(runs)), *sample_ints, seeds=seeds, temperatures=temperatures,
    )  # fmt: skip


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple
