import dataclasses

import jax
import numpy as np
import pytest

from tests.engine.helpers import TINY
from tpu_offload.engine import EngineConfig, SamplingParams
from tpu_offload.engine.batch import TokenSpan, pack
from tpu_offload.engine.sampling import logprobs, sample

pytestmark = pytest.mark.usefixtures("own_sizes")

compiled_sample = jax.jit(sample)
CONFIG = EngineConfig(max_num_seqs=4, num_blocks=8, max_model_len=64, max_num_batched_tokens=32)


def draw(logits, params: list[SamplingParams], *, positions=None):
    """Samples one token for each row of `logits`, f32[rows, vocab_size]."""
    positions = positions or [0] * len(params)
    runs = [TokenSpan([0], position, [[1, 2, 3, 4]], p) for p, position in zip(params, positions, strict=True)]
    inputs = pack(runs, CONFIG, TINY)
    padded = np.zeros((len(inputs.seeds), logits.shape[-1]), np.float32)
    padded[: len(logits)] = logits
    return np.asarray(compiled_sample(padded, inputs))[: len(params)].tolist()


LOGITS = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32)


def random_params(seed, **changes):
    return dataclasses.replace(SamplingParams(max_tokens=1, temperature=1.0, seed=seed), **changes)


def test_greedy_takes_the_largest():
    assert draw(LOGITS, [SamplingParams(max_tokens=1)]) == [LOGITS.argmax()]
    # Also batched with a sampling request.
    assert draw(LOGITS.repeat(2, 0), [SamplingParams(max_tokens=1), random_params(3)])[0] == LOGITS.argmax()


def test_draw_depends_on_seed_and_position_only():
    alone = draw(LOGITS, [random_params(7)], positions=[5])
    beside = draw(
        LOGITS.repeat(3, 0), [random_params(1), SamplingParams(max_tokens=1), random_params(7)], positions=[9, 9, 5]
    )
    assert beside[2] == alone[0]
    by_seed = {draw(LOGITS, [random_params(seed)], positions=[5])[0] for seed in range(20)}
    by_position = {draw(LOGITS, [random_params(7)], positions=[p])[0] for p in range(20)}
    assert len(by_seed) > 5
    assert len(by_position) > 5


def test_frequencies_follow_softmax():
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    drawn = [t for s in range(0, 1200, 4) for t in draw(logits.repeat(4, 0), [random_params(s + i) for i in range(4)])]
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 1200, [0.5, 0.25, 0.125, 0.125], atol=0.05)


def test_top_k_leaves_only_the_k_largest():
    top3 = set(np.argsort(LOGITS[0])[-3:].tolist())
    drawn = {draw(LOGITS, [random_params(seed, top_k=3, temperature=5.0)])[0] for seed in range(60)}
    assert drawn == top3
    assert draw(LOGITS, [random_params(0, top_k=10_000)]) == draw(LOGITS, [random_params(0)])


def test_low_temperature_approaches_greedy():
    assert {draw(LOGITS, [random_params(s, temperature=1e-3)])[0] for s in range(10)} == {int(LOGITS.argmax())}


def test_logprobs_ignore_temperature_and_neighbours():
    logits = np.random.default_rng(1).normal(size=(40, 50)).astype(np.float32) * 5
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    tokens = np.arange(40, dtype=np.int32)
    config = dataclasses.replace(CONFIG, max_num_seqs=40, max_num_batched_tokens=40)
    inputs = pack([TokenSpan([0], 0, [[1]], random_params(s, temperature=s, top_k=3)) for s in range(40)], config, TINY)
    logits, tokens = np.resize(logits, (len(inputs.seeds), 50)), np.resize(tokens, len(inputs.seeds))
    got = np.asarray(jax.jit(logprobs)(logits, tokens, inputs))[:40]
    np.testing.assert_allclose(got, expected[np.arange(40), tokens[:40]], rtol=1e-5)
    alone = pack([TokenSpan([0], 0, [[1]], SamplingParams(max_tokens=1))], CONFIG, TINY)
    for row in (0, 7, 39):
        first = np.asarray(jax.jit(logprobs)(logits[row].repeat(32).reshape(50, 32).T, tokens[row].repeat(32), alone))
        assert first[0] == got[row]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"max_tokens": 0}, "max_tokens=0"), ({"temperature": -1.0}, "temperature=-1.0"), ({"top_k": -1}, "top_k=-1"),
     ({"seed": 2**32}, "seed=4294967296"), ({"temperature": float("nan")}, "temperature=nan")],
)  # fmt: skip
def test_impossible_parameters_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SamplingParams(max_tokens=1), **change)
