"""States with the host tier, beyond what `test_hybrid_tier` says of all models: loss, reset, and the right row."""

import dataclasses

import numpy as np
import pytest

from tests.engine.helpers import (
    SMALL_ENGINE,
    STATEFUL,
    make_request,
    num_loaded,
    random_tokens,
    rounds,
    serve,
    serve_rounds,
)
from tests.engine.test_cache_loss import Fatal, check_at_rest
from tests.engine.test_hybrid_tier import TIGHT, make_offload
from tests.engine.test_reset import ask, computed, finish, push_out
from tests.engine.test_save_modes import results
from tests.grids import few
from tests.inside.engine import offload_scheduler, one_worker
from tests.inside.scheduler import tier_context
from tpu_offload import JobKind
from tpu_offload.engine import Engine

pytestmark = pytest.mark.usefixtures("compiled_once")

ROOMY = dataclasses.replace(SMALL_ENGINE, num_blocks=96, num_states=40)
PROMPT = random_tokens(1, 30)


@pytest.fixture(scope="module")
def plain():
    ample = dataclasses.replace(SMALL_ENGINE, num_blocks=800, enable_prefix_caching=False)
    return results(serve_rounds(Engine(STATEFUL, ample), rounds()))


def make_engine(config=ROOMY, *, fatal=(), **changes):
    settings = {"num_cpu_chunks": 1500, "breaker_failures": 0, "job_timeout_s": 3600, **changes}
    engine = Engine(STATEFUL, config, offload=make_offload(**settings), seams=Fatal(*fatal).seams())
    engine.wait_for_host_memory()
    return engine


@pytest.mark.parametrize("asynchronous", few([False, True], True), ids=["sync", "async"])
def test_lost_caches_change_no_token(plain, asynchronous):
    engine = make_engine(dataclasses.replace(TIGHT, async_scheduling=asynchronous), fatal=(1, 4, 9))
    outputs = serve_rounds(engine, rounds())
    assert results(outputs) == plain
    assert engine.stats().num_cache_losses == 3
    assert num_loaded(outputs) > 0
    check_at_rest(engine)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_reset_invalidates_states(num_steps):
    """A request that runs goes on with its state, which serves no other one."""
    engine = make_engine(decode_save=True)
    engine.add_request(make_request("old", PROMPT, max_tokens=40, seed=1))
    for _ in range(num_steps):
        engine.step()
    engine.reset_cache()
    for _ in range(14):
        engine.step()
    assert ask(engine, "new", PROMPT) == computed(30)
    old = finish(engine, "old")["old"]
    assert ask(engine, "newer", (*PROMPT, *old.tokens)).hbm == 28, "the prompt of the second request"
    push_out(engine, num=12)
    sources = ask(engine, "newest", (*PROMPT, *old.tokens))
    assert (sources.hbm, sources.host) == (0, 68), "all of the third request"
    check_at_rest(engine)


@pytest.mark.parametrize(("blocks_per_chunk", "num_tokens"), [(1, 28), (2, 24)])
def test_the_same_prompt_is_loaded_up_to_its_last_chunk(blocks_per_chunk, num_tokens):
    engine = make_engine(blocks_per_chunk=blocks_per_chunk)
    first = serve(engine, [make_request("first", PROMPT)])["first"]
    push_out(engine, num=12)
    again = serve(engine, [make_request("again", PROMPT)])["again"]
    assert again.stats.prompt_tokens.host == num_tokens
    assert again.tokens == first.tokens
    third = serve(engine, [make_request("third", PROMPT)])["third"]
    assert third.stats.prompt_tokens.hbm == 28, "what was loaded, and computed after it, is in the prefix cache"
    check_at_rest(engine)


def test_where_prompts_part_the_host_tier_has_a_state_for_the_third():
    """HBM has nothing of the first prompt any more when the second comes: only the host tier knows that they part."""
    engine = make_engine()
    shared = random_tokens(2, 40)
    for i, host in enumerate((0, 0, 40)):
        assert ask(engine, f"r{i}", (*shared, *random_tokens(3 + i, 20))).host == host
        push_out(engine, num=12)
    check_at_rest(engine)


def test_another_row_would_be_noticed(plain):
    """Loads whose state lands one row beside the one asked for."""
    engine = make_engine(TIGHT)
    begin_step = one_worker(engine).begin_step

    def misplacing(plan, kv_caches, **kwargs):
        rows = [part.block_ids[0] for job in plan.of(JobKind.LOAD) for part in job.parts if part.group_id == 2]
        before = [np.asarray(cache) for cache in kv_caches]
        kv_caches = begin_step(plan, kv_caches, **kwargs)
        for i in tier_context(offload_scheduler(engine)).layout.groups[2].layer_ids:
            for row in rows:
                kv_caches[i] = kv_caches[i].at[row].set(before[i][row])
        return kv_caches

    one_worker(engine).begin_step = misplacing
    outputs = serve_rounds(engine, rounds())
    assert num_loaded(outputs) > 0
    assert results(outputs) != plain
    engine.close()
