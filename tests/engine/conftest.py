"""Engines of these tests share compiled programs: what a config says bounds the scheduler, not the arrays.

A step takes seconds to compile for every size of its arrays, and its results depend on none: `test_engine`,
`test_batch_invariance` and others compare sizes, with the fixture `own_sizes`. The block manager's invariants, which
these tests check after every step, bound the ids of blocks.
"""

import dataclasses

import pytest

from tpu_offload.engine import runner
from tpu_offload.engine.batch import pack

_REAL = runner.cache_shapes, pack
_NUM_BLOCKS, _NUM_STATES, _NUM_SEQS, _NUM_TOKENS = 800, 64, 8, 32


def _shared_shapes(model_config, engine_config):
    sizes = {
        "num_blocks": max(engine_config.num_blocks, _NUM_BLOCKS),
        "num_states": max(engine_config.num_state_rows, _NUM_STATES),
    }
    return _REAL[0](model_config, dataclasses.replace(engine_config, **sizes))


def _shared_pack(spans, config, model_config):
    assert len(spans) <= config.max_num_seqs
    assert sum(len(span.tokens) for span in spans) <= config.max_num_batched_tokens
    sizes = {
        "max_num_seqs": max(config.max_num_seqs, _NUM_SEQS),
        "max_num_batched_tokens": max(config.max_num_batched_tokens, _NUM_TOKENS),
        "num_states": 0,
    }
    return _REAL[1](spans, dataclasses.replace(config, **sizes), model_config)


@pytest.fixture(scope="package", autouse=True)
def shared_sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "cache_shapes", _shared_shapes)
        patch.setattr(runner, "pack", _shared_pack)
        yield


@pytest.fixture(scope="module")
def own_sizes(shared_sizes):
    """The arrays have the sizes of the config."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "cache_shapes", _REAL[0])
        patch.setattr(runner, "pack", _REAL[1])
        yield
