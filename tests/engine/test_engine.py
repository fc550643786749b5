"""The whole engine: outputs do not depend on its sizes, and every request ends correctly."""

import dataclasses
from typing import Any

import pytest

from tests.engine.helpers import SMALL_ENGINE, TINY, make_request, random_tokens, serve, tokens_of
from tests.grids import few
from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine, FinishReason, SamplingParams
from tpu_offload.errors import ConfigError, RequestError

pytestmark = pytest.mark.usefixtures("own_sizes")

SHARED = random_tokens(99, 30)


def some_requests():
    """Requests with shared prefixes and different lengths, half greedy and half sampled."""
    return [
        make_request(
            f"r{i}", SHARED[: 4 * i] + random_tokens(i, 3 + 7 * i), max_tokens=10 + 5 * i, temperature=float(i % 2),
            top_k=10 * (i % 3), seed=i,
        )
        for i in range(8)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def roomy_outputs():
    config = dataclasses.replace(SMALL_ENGINE, num_blocks=512, max_num_seqs=8, max_num_batched_tokens=128)
    return serve(Engine(TINY, config), some_requests())


@pytest.mark.parametrize(
    "changes",
    few(
        [
            {"num_blocks": 32},
            {"num_blocks": 40, "max_num_batched_tokens": 7},
            {"num_blocks": 64, "max_num_seqs": 1, "enable_prefix_caching": False},
            {"block_size": 16, "num_blocks": 9, "max_num_seqs": 8},
        ],
        {"num_blocks": 32},
    ),
    ids=str,
)
def test_outputs_do_not_depend_on_sizes(roomy_outputs, changes):
    engine = Engine(TINY, dataclasses.replace(SMALL_ENGINE, **changes))
    outputs = serve(engine, some_requests())
    assert tokens_of(outputs) == tokens_of(roomy_outputs)
    if changes["num_blocks"] == 32:
        assert engine.stats().num_preemptions > 0, "HBM should be too small"


def test_every_prompt_token_is_accounted_for(roomy_outputs):
    for request in some_requests():
        stats = roomy_outputs[request.request_id].stats
        sources = stats.prompt_tokens
        assert sources.computed + sources.hbm + sources.host == len(request.prompt_tokens)
        assert stats.num_preemptions == 0


def test_a_repeated_prompt_hits_hbm_and_gives_the_same_tokens():
    engine = Engine(TINY, SMALL_ENGINE)
    prompt = random_tokens(3, 50)
    first = serve(engine, [make_request("a", prompt)])["a"]
    second = serve(engine, [make_request("b", prompt)])["b"]
    assert second.tokens == first.tokens
    assert (first.stats.prompt_tokens.hbm, second.stats.prompt_tokens.hbm) == (0, 48)


def test_generated_tokens_are_reused_by_the_next_turn():
    engine = Engine(TINY, SMALL_ENGINE)
    prompt = random_tokens(4, 20)
    first = serve(engine, [make_request("a", prompt, max_tokens=20)])["a"]
    serve(engine, [make_request("b", prompt + first.tokens)])
    third = serve(engine, [make_request("c", prompt + first.tokens + random_tokens(5, 6))])["c"]
    assert third.stats.prompt_tokens.hbm == 40


def test_stop_token_ends_a_request():
    engine = Engine(TINY, SMALL_ENGINE)
    full = serve(engine, [make_request("a", random_tokens(6, 9), max_tokens=20)])["a"]
    assert full.finish_reason is FinishReason.LENGTH
    assert len(full.tokens) == 20
    stop = full.tokens[7]
    request = make_request("b", random_tokens(6, 9), max_tokens=20, stop_token_ids=(stop,))
    stopped = serve(engine, [request])["b"]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.tokens == full.tokens[: full.tokens.index(stop) + 1]


def test_unservable_request_fails_alone(roomy_outputs):
    engine = Engine(TINY, SMALL_ENGINE)
    outputs = serve(engine, [make_request("huge", random_tokens(0, 500)), *some_requests()])
    huge = outputs.pop("huge")
    assert huge.finish_reason is FinishReason.ERROR
    assert huge.error == "500 prompt tokens and max_tokens=8 exceed max_model_len=128"
    assert huge.stats.ttft_s is None
    assert tokens_of(outputs) == tokens_of(roomy_outputs)


def test_wrong_requests_are_refused():
    engine = Engine(TINY, SMALL_ENGINE)
    engine.add_request(make_request("a", (1, 2, 3)))
    with pytest.raises(RequestError, match="request a is still unfinished"):
        engine.add_request(make_request("a", (1,)))
    with pytest.raises(RequestError, match="token 96; expected 0 to 95"):
        engine.add_request(make_request("b", (1, 96)))
    assert engine.stats().num_waiting == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"request_id": 5}, "request_id is 5; expected text"),
        ({"prompt_tokens": (1.0, 2.0, 3.0)}, "request a has tokens of type float; expected integers"),
        ({"prompt_tokens": "abc"}, "request a has tokens of type str; expected integers"),
        ({"prompt_tokens": None}, "request a has a prompt of None; expected token ids"),
        ({"cache_salt": None}, "request a has a cache_salt of None; expected text"),
        ({"limits": 5}, "request a has limits 5; expected RequestLimits"),
        ({"sampling": None}, "request a has sampling None; expected SamplingParams"),
    ],
)
def test_what_a_step_would_stumble_over_is_refused(roomy_outputs, wrong, said):
    """A step that raises takes all other requests with it."""
    engine = Engine(TINY, SMALL_ENGINE, offload=OffloadConfig.create(num_cpu_chunks=16))
    first, *others = some_requests()
    engine.add_request(first)
    with pytest.raises(RequestError, match=said):
        engine.add_request(dataclasses.replace(make_request("a", random_tokens(3, 20)), **wrong))
    assert tokens_of(serve(engine, others)) == tokens_of(roomy_outputs)
    engine.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 2.5},
        {"max_tokens": float("nan")},
        {"temperature": "hot"},
        {"temperature": 1e300},
        {"top_k": 2**31},
        {"top_k": 1.5},
        {"seed": None},
        {"stop_token_ids": 5},
        {"stop_token_ids": ("x",)},
    ],
)
def test_wrong_sampling_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}=.*; expected"):
        SamplingParams(**{"max_tokens": 4, **wrong})


def test_settings_of_another_kind_are_refused():
    wrong: Any
    for wrong in ("host_gb=1", {}):
        with pytest.raises(ConfigError, match="expected an OffloadConfig or None"):
            Engine(TINY, SMALL_ENGINE, offload=wrong)
    with pytest.raises(ConfigError, match=r"block_size=4.5; expected an integer"):
        dataclasses.replace(SMALL_ENGINE, block_size=4.5)  # type: ignore[arg-type]


def test_abort_while_waiting_and_running(roomy_outputs):
    engine = Engine(TINY, dataclasses.replace(SMALL_ENGINE, max_num_seqs=1))
    running, waiting, *others = some_requests()
    for request in (running, waiting, *others):
        engine.add_request(request)
    engine.step()
    engine.step()
    (aborted,) = engine.abort(running.request_id)
    assert aborted.finish_reason is FinishReason.ABORTED
    assert aborted.tokens == roomy_outputs[running.request_id].tokens[: len(aborted.tokens)] != ()
    assert [output.tokens for output in engine.abort(waiting.request_id)] == [()]
    assert engine.abort(waiting.request_id) == []
    engine.check_invariants()
    outputs = serve(engine, [])
    assert tokens_of(outputs) == {r.request_id: roomy_outputs[r.request_id].tokens for r in others}


def test_outputs_stream_and_times_follow_the_clock():
    now = iter(range(1000))
    engine = Engine(TINY, SMALL_ENGINE, clock=lambda: float(next(now)))
    engine.add_request(make_request("a", random_tokens(0, 40), max_tokens=3))  # 40 tokens: two steps of prefill
    steps = [engine.step() for _ in range(4)]
    assert [len(output.tokens) for outputs in steps for output in outputs] == [1, 2, 3]
    stats = steps[-1][0].stats
    assert (stats.arrival_s, stats.ttft_s, stats.finish_s) == (
        0.0,
        4.0,
        8.0,
    )  # the clock is read at both ends of a step
    assert not engine.has_unfinished
    assert engine.step() == []


def test_warm_up_compiles_all_programs(caplog):
    import jax

    config = dataclasses.replace(SMALL_ENGINE, num_blocks=61)  # a shape that no other test has compiled
    with jax.log_compiles():
        engine = Engine(TINY, config)
        engine.warm_up()
        assert "Compiling jit(_step)" in caplog.text
        caplog.clear()
        serve(engine, some_requests())
        assert "Compiling" not in caplog.text


@pytest.mark.parametrize(
    "offload", [None, OffloadConfig.create(num_cpu_chunks=64, host_segment_gb=0.001)], ids=["plain", "offload"]
)
def test_a_closed_engine_refuses_requests_and_steps(offload):
    engine = Engine(TINY, SMALL_ENGINE, offload=offload)
    serve(engine, [make_request("before", random_tokens(0, 40))])
    engine.add_request(make_request("unfinished", random_tokens(1, 40)))
    engine.close()
    before = engine.stats(), engine.offload_stats()
    with pytest.raises(RequestError, match=r"add_request\(\) of an engine that is closed"):
        engine.add_request(make_request("after", random_tokens(2, 40)))
    assert engine.has_unfinished
    with pytest.raises(RequestError, match=r"step\(\) of an engine that is closed"):
        engine.step()
    assert (engine.stats(), engine.offload_stats()) == before
    engine.close()


def test_closing_again_closes_no_file_of_others(tmp_path, caplog):
    storage = {"storage_tier": "file", "storage_options": f"{tmp_path},min_free_gb=0", "num_storage_chunks": 8}
    engine = Engine(
        TINY, SMALL_ENGINE, offload=OffloadConfig.create(num_cpu_chunks=64, host_segment_gb=0.001, **storage)
    )
    engine.close()
    with (tmp_path / "another").open("w") as file:  # takes the number of one that was closed
        engine.close()
        file.write("written")
    assert not caplog.text
