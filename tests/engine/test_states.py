"""Layers with states: equal to a dense reference, and the same bits for every schedule and choice of rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.dense import dense_logits
from tests.engine.helpers import STATEFUL, random_tokens
from tpu_offload.engine import EngineConfig, ModelConfig, SamplingParams
from tpu_offload.engine.batch import ROW_TILE, TokenSpan, pack
from tpu_offload.engine.block_manager import NULL_BLOCK
from tpu_offload.engine.runner import ModelRunner
from tpu_offload.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_sizes")

GREEDY = SamplingParams(max_tokens=1)
TOKENS = random_tokens(0, 150)
MIXED = dataclasses.replace(STATEFUL, kv_dtype="float32", sliding_window=20)
ENGINE = EngineConfig(block_size=16, num_blocks=60, max_num_seqs=3, max_model_len=320, max_num_batched_tokens=40)


class Lab:
    """Computes tokens in given chunks; before every step all states are NaN but the one that it continues from."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self.model, self.engine = model, engine
        self.runner = ModelRunner(model, engine)

    def compute(self, chunks, *, seed=None, tokens=TOKENS):
        """Bits of the states and of the logits after each chunk, by position.

        With a seed, in random rows, batched with another request.
        """
        rng = np.random.default_rng(seed)
        num_groups = len(self.model.group_windows)
        blocks = rng.permutation(self.engine.num_blocks) + 1
        tables = np.array_split(blocks, num_groups + 1)[: num_groups + 1]
        outputs, start, row = {}, 0, NULL_BLOCK
        for n in chunks:
            end = start + n
            target = self._next_row(rng, row, seed)
            self._poison(keep=row)
            runs = [] if seed is None else self._neighbours(rng, tables[-1], target, row, most=self._room(n))
            at = int(rng.integers(len(runs) + 1))
            used = [table[: -(-end // self.engine.block_size)].tolist() for table in tables[:-1]]
            runs.insert(at, TokenSpan(tokens[start:end], start, used, GREEDY, state_rows=(row, target)))
            output = self.runner.step(runs)
            states = [np.asarray(cache[target]) for cache in self._states()]
            outputs[end] = bits(output.logits[at]), *map(bits, states)
            start, row = end, target
        assert start == len(tokens)
        return outputs

    def _room(self, n):
        return self.engine.max_num_batched_tokens - n

    def _next_row(self, rng, row, seed):
        if seed is None or (row != NULL_BLOCK and rng.random() < 0.5):
            return row or 1  # in place
        return int(rng.integers(1, self.engine.num_state_rows + 1))

    def _states(self):
        return self.runner.kv_caches[self.model.num_arrays :]

    def _poison(self, *, keep):
        num_arrays = self.model.num_arrays
        poisoned = [jnp.full_like(cache, jnp.nan) for cache in self._states()]
        if keep != NULL_BLOCK:
            poisoned = [new.at[keep].set(cache[keep]) for new, cache in zip(poisoned, self._states(), strict=True)]
        caches = self.runner.kv_caches[:num_arrays] + poisoned
        self.runner.kv_caches = [jax.device_put(cache, jax.devices()[0]) for cache in caches]

    def _neighbours(self, rng, blocks, target, source, *, most):
        """Another request, from its first token on or continuing from the same state."""
        n = int(rng.integers(most + 1))
        if n == 0:
            return []
        own = next(row for row in range(1, self.engine.num_state_rows + 1) if row not in (target, source))
        tokens = rng.integers(0, self.model.vocab_size, n).tolist()
        tables = [blocks.tolist()] * len(self.model.group_windows)
        return [TokenSpan(tokens, 0, tables, GREEDY, state_rows=(int(rng.choice([NULL_BLOCK, source])), own))]


def bits(x):
    x = np.asarray(x).astype(np.float32)
    assert np.isfinite(x).all()
    return x.view(np.uint32)


def random_chunks(rng, total, largest):
    chunks = []
    while total:
        chunks.append(int(min(total, rng.integers(1, largest + 1))))
        total -= chunks[-1]
    return chunks


def assert_same_bits(result, reference):
    assert len(result) > 1
    for position, arrays in result.items():
        for got, expected in zip(arrays, reference[position], strict=True):
            np.testing.assert_array_equal(got, expected, err_msg=f"after {position} tokens")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def lab(request):
    return Lab(dataclasses.replace(MIXED, kv_dtype=request.param), ENGINE)


@pytest.fixture(scope="module")
def one_by_one(lab):
    """Every token decoded alone: the reference for all other schedules."""
    return lab.compute([1] * len(TOKENS))


def test_logits_agree_with_the_dense_reference(lab, one_by_one):
    expected = dense_logits(lab.model, TOKENS)
    got = np.stack([logits.view(np.float32) for logits, *_ in one_by_one.values()])
    tolerance = {"float32": 1e-4, "bfloat16": 3e-2}[lab.model.kv_dtype]
    np.testing.assert_allclose(got, expected, atol=tolerance * np.abs(expected).max())


def test_largest_steps_have_the_bits_of_decoding(lab, one_by_one):
    assert_same_bits(lab.compute([40, 40, 40, 30]), one_by_one)
    assert_same_bits(lab.compute([1, 2, 3, 40, 40, 40, 24]), one_by_one)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_neighbours_and_rows_change_no_bits(lab, one_by_one, seed):
    chunks = random_chunks(np.random.default_rng(seed), len(TOKENS), [3, 20, 40][seed])
    assert_same_bits(lab.compute(chunks, seed=seed), one_by_one)


@pytest.mark.wide
def test_other_block_sizes_and_budgets_change_no_bits():
    """At the widths of the default model, because XLA's code depends on them."""
    wide = dataclasses.replace(ModelConfig(), num_layers=2, state_layers=(0,))
    reference = Lab(wide, ENGINE).compute([1] * len(TOKENS))
    sizes: dict[str, Any] = {"block_size": 8, "num_blocks": 90, "max_num_batched_tokens": 100, "max_num_seqs": 5}
    other = Lab(wide, dataclasses.replace(ENGINE, **sizes))
    assert_same_bits(other.compute([100, 13, 1, 36], seed=0), reference)
    assert_same_bits(other.compute(random_chunks(np.random.default_rng(1), len(TOKENS), 30), seed=1), reference)


def test_steps_of_one_tile_of_rows_change_no_bits(lab, one_by_one):
    """There XLA could drop the loop over the tiles, and fuse the layers otherwise."""
    engine = dataclasses.replace(ENGINE, max_num_batched_tokens=9)
    assert len(pack([], engine, lab.model).tokens) == ROW_TILE
    assert_same_bits(Lab(lab.model, engine).compute([9] * 16 + [6]), one_by_one)


@pytest.mark.parametrize("array", range(4), ids=["conv 0", "state 0", "conv 1", "state 1"])
def test_one_wrong_bit_of_a_state_changes_what_follows(array):
    """Even the lowest one that the dtype of the conv state has, 20 tokens later."""
    lab = Lab(dataclasses.replace(MIXED, kv_dtype="bfloat16"), ENGINE)
    table = list(range(1, 11))
    logits = []
    for harm in (False, True):
        run = TokenSpan(TOKENS[:30], 0, [table, table[::-1]], GREEDY, state_rows=(NULL_BLOCK, 5))
        lab.runner.step([run])
        if harm:
            at = lab.model.num_arrays + array
            cache = np.array(lab.runner.kv_caches[at])
            raw = cache.view(np.uint16 if cache.itemsize == 2 else np.uint32)
            raw[5, -1, raw.shape[2] // 2] ^= 1 if cache.itemsize == 2 else 1 << 12
            lab.runner.kv_caches[at] = jax.device_put(cache, jax.devices()[0])
        output = lab.runner.step([TokenSpan(TOKENS[30:50], 30, [table, table[::-1]], GREEDY, state_rows=(5, 5))])
        logits.append(bits(output.logits[0]))
    assert (logits[0] != logits[1]).mean() > 0.9


def test_the_arrays_of_states_follow_those_of_attention():
    model = dataclasses.replace(MIXED, kv_dtype="bfloat16")
    assert model.layer_groups == ((3,), (1,), (0, 2))
    assert model.group_windows == (0, 20)
    runner = ModelRunner(model, dataclasses.replace(ENGINE, num_states=7))
    assert [(cache.shape, cache.dtype.name) for cache in runner.kv_caches] == [
        ((61, 16, 2, 2, 8), "bfloat16"), *[((8, 3, 48), "bfloat16"), ((8, 2, 8, 8), "float32")] * 2
    ]  # fmt: skip


def test_a_state_without_a_row_is_an_assertion():
    with pytest.raises(AssertionError, match="a state has no row"):
        pack([TokenSpan(TOKENS[:3], 0, [[1], [2]], GREEDY)], ENGINE, MIXED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state_layers": (2, 0)}, r"state_layers=\(2, 0\); expected layer ids from 0 to 3, ascending, none twice"),
        ({"state_layers": (0, 4)}, r"state_layers=\(0, 4\); expected layer ids from 0 to 3"),
        ({"state_layers": (0, 1)}, r"layers \[1\] are in window_layers and in state_layers; expected one of them"),
        ({"state_layers": (0, 2, 3)}, r"state_layers=\(0, 2, 3\) are all the layers; expected at least one with full"),
        ({"state_layers": (0, 1, 2, 3)}, r"state_layers=\(0, 1, 2, 3\) are all the layers; expected at least one"),
        ({"state_layers": (0,)}, "1 window_layers beside 2 layers with full attention cannot be divided"),
        ({"num_state_heads": 0}, "num_state_heads=0; expected at least 1"),
        ({"state_head_dim": 0}, "state_head_dim=0; expected at least 1"),
        ({"conv_kernel": 1}, "conv_kernel=1; expected at least 2"),
    ],
)
def test_impossible_states_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(MIXED, **change)


def test_too_few_rows_are_refused():
    with pytest.raises(ConfigError, match=r"num_states=5; expected at least 2 \* max_num_seqs=6"):
        dataclasses.replace(ENGINE, num_states=5)
    assert (ENGINE.num_state_rows, dataclasses.replace(ENGINE, num_states=6).num_state_rows) == (12, 6)
