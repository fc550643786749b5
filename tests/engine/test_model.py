"""The paged, tiled model compared with the dense one."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

from tests.engine.dense import dense_logits
from tests.engine.helpers import TINY, random_tokens
from tests.grids import few
from tpu_offload.engine import EngineConfig, SamplingParams
from tpu_offload.engine.batch import TokenSpan
from tpu_offload.engine.model import Decoder
from tpu_offload.engine.runner import ModelRunner
from tpu_offload.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_sizes")

GREEDY = SamplingParams(max_tokens=1)


# A value between two numbers of the cache's dtype may round differently in float32.
@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"),
    few(
        [("float32", 1e-4), ("float16", 2e-3), ("bfloat16", 2e-2), ("float8_e4m3fn", 0.2)],
        ("bfloat16", 2e-2),
        ("float8_e4m3fn", 0.2),
    ),
)
def test_logits_agree_with_dense_reference(kv_dtype, tolerance):
    config = dataclasses.replace(TINY, kv_dtype=kv_dtype)
    engine_config = EngineConfig(
        block_size=8, num_blocks=24, max_num_seqs=2, max_model_len=192, max_num_batched_tokens=64
    )
    runner = ModelRunner(config, engine_config)
    tokens = random_tokens(1, 150)
    expected = dense_logits(config, tokens)
    blocks = np.random.default_rng(0).permutation(np.arange(1, 25))[:19].tolist()
    # Chunks that end inside query tiles, row tiles, blocks and key tiles, then decoding.
    for start, end in [(0, 64), (64, 101), (101, 145), (145, 146), (146, 147), (147, 150)]:
        logits = np.asarray(runner.step([TokenSpan(tokens[start:end], start, [blocks], GREEDY)]).logits[0])
        np.testing.assert_allclose(logits, expected[end - 1], atol=tolerance * np.abs(expected).max())


def test_every_layer_and_position_matters():
    """The reference depends on its first token, so the comparison above is not trivial."""
    tokens = random_tokens(1, 40)
    other = ((tokens[0] + 1) % TINY.vocab_size, *tokens[1:])
    assert np.abs(dense_logits(TINY, tokens)[-1] - dense_logits(TINY, other)[-1]).max() > 1e-3


def test_weights_come_from_the_seed():
    state = nnx.to_pure_dict(nnx.state(Decoder(TINY)))
    same = nnx.to_pure_dict(nnx.state(Decoder(TINY)))
    other = nnx.to_pure_dict(nnx.state(Decoder(dataclasses.replace(TINY, seed=1))))
    np.testing.assert_array_equal(state["head"]["kernel"], same["head"]["kernel"])
    assert (np.asarray(state["head"]["kernel"]) != np.asarray(other["head"]["kernel"])).any()
    assert TINY.name != dataclasses.replace(TINY, seed=1).name


@pytest.mark.parametrize(
    ("kv_dtype", "page_shape"),
    [("float32", (16, 4, 1, 8)), ("bfloat16", (16, 2, 2, 8)), ("float8_e5m2", (16, 1, 4, 8))],
)
def test_page_shape_packs_heads_into_words(kv_dtype, page_shape):
    assert dataclasses.replace(TINY, kv_dtype=kv_dtype).page_shape(16) == page_shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers=0; expected at least 1"),
        ({"num_kv_heads": 3}, "not a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"kv_dtype": "int4"}, "kv_dtype='int4'; expected one of"),
        ({"num_kv_heads": 1, "kv_dtype": "float8_e4m3fn"}, "set num_kv_heads to a multiple of 2"),
    ],
)
def test_impossible_models_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **change)


def test_impossible_engines_are_refused():
    with pytest.raises(ConfigError, match="num_blocks=0"):
        EngineConfig(num_blocks=0)
    with pytest.raises(ConfigError, match="under max_num_seqs=8"):
        EngineConfig(max_num_batched_tokens=4, max_num_seqs=8)
