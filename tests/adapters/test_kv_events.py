"""vLLM's KV events with several KV cache groups: a router that follows them knows what the host tier can give."""

import pytest
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.adapters.hashed_model import BLOCK_SIZE
from tests.adapters.kv_router import KVRouter
from tests.adapters.llm_client import ours
from tests.adapters.scheduler_stack import Stack, hold_saves, prompt
from tests.adapters.test_checkpoints import EMPTY_HBM, PROMPTS
from tests.adapters.test_hybrid_models import BLOCK, MANY_BLOCKS, WINDOW, answers, num_cached
from tests.inside.connector import event_sources
from tpu_offload import TierEvent, TierEventKind
from tpu_offload.adapters.vllm.event_sources import BlockSources
from tpu_offload.adapters.vllm.kv_events import EventGroup, event_groups, to_kv_events
from tpu_offload.types import BlockHash

pytestmark = pytest.mark.vllm

EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
SPECS = {
    "gemma3": {0: ("sliding_window", WINDOW), 1: ("sliding_window", WINDOW), 2: ("full_attention", None)},
    "qwen3.5": {0: ("mamba", None), 1: ("mamba", None), 2: ("mamba", None), 3: ("full_attention", None)},
}


@pytest.mark.parametrize(("model", "num_chunks"), [("gemma3", 40), ("qwen3.5", 36), ("gemma3", 400)])
def test_a_router_knows_what_is_loaded(process, model, num_chunks):
    """By the events before a prompt comes, as many tokens can be loaded as it then does not compute."""
    prompts = [*PROMPTS, PROMPTS[0][:100], PROMPTS[1], PROMPTS[2][:60], PROMPTS[0]]
    steps = [step for one in prompts for step in ({"do": "generate", "prompts": [one]}, *EMPTY_HBM, {"do": "events"})]
    outcome = process.run(
        {
            "model": model,
            "engine": MANY_BLOCKS | EVENTS,
            "connector": ours(num_cpu_chunks=num_chunks),
            "steps": [{"do": "record_events"}, *steps],
        }
    )
    assert outcome["error"] is None
    taken, router, named = 0, KVRouter(), [0]
    for one, events in zip(prompts[1:], outcome["steps"][4::4], strict=False):
        router.take_json(events[taken:], cleared=False)  # HBM is emptied, the host tier is not
        taken = len(events)
        named.append(router.num_host_tokens(router.hashes_of(one), len(one), block_size=BLOCK))
    assert named == num_cached(outcome)
    assert sum(named) > 3 * BLOCK
    assert router.groups == SPECS[model]
    assert bool(router.num_removed) == (num_chunks < 100)
    assert len(answers(outcome)) == len(prompts)


def test_a_state_is_stored_once_it_is_saved_and_in_each_group():
    stack = Stack(num_blocks=24, events=True, num_staging_blocks=16, num_cpu_chunks=40, num_rows=14)
    batches: list[KVEventBatch] = []
    stack.scheduler.kv_event_publisher.publish = batches.append
    stack.serve("first", prompt(4))  # so that the host tier is there
    release = hold_saves(stack)
    request = stack.add("a", prompt(3 * BLOCK_SIZE + 1))
    for _ in range(6):
        stack.step()
    events = [event for batch in batches for event in batch.events if getattr(event, "medium", None) == MEDIUM_CPU]
    assert events == [], "a copy that has not ended"
    del batches[:]
    release.clear()
    stack.drain()
    stored = [e for batch in batches for e in batch.events if isinstance(e, BlockStored) and e.medium == MEDIUM_CPU]
    hashes = [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes[:3]]
    by_group = {group: [h for e in stored if e.group_idx == group for h in e.block_hashes] for group in range(3)}
    assert by_group == {0: hashes[2:], 1: hashes[2:], 2: hashes}
    assert {(e.group_idx, e.kv_cache_spec_kind) for e in stored} == {
        (0, "mamba"),
        (1, "mamba"),
        (2, "full_attention"),
    }
    stack.check_end()


def test_events_have_the_numbers_of_vllm():
    stack = Stack(num_blocks=24, num_rows=14)
    groups = event_groups(stack.kv_config)
    states = (EventGroup(0, "mamba", None), EventGroup(1, "mamba", None))
    assert groups == ((EventGroup(2, "full_attention", None),), states)
    removed = TierEvent(kind=TierEventKind.REMOVED, block_hashes=(BlockHash(b"x" * 32),), group_id=1)
    found = list(to_kv_events([removed], groups, sources=BlockSources(), block_size=BLOCK_SIZE, blocks_per_chunk=1))
    assert all(isinstance(event, BlockRemoved) for event in found)
    assert [event.group_idx for event in found] == [0, 1]


def stored_blocks(batches, medium):
    """Per hash, what the events of this medium say of the block: parent, tokens, adapter and extra keys."""
    found = {}
    for event in (one for batch in batches for one in batch.events):
        if isinstance(event, BlockStored) and event.medium == medium:
            size, parent = event.block_size, event.parent_block_hash
            for i, block_hash in enumerate(event.block_hashes):
                extra = event.extra_keys[i] if event.extra_keys else None
                tokens = event.token_ids[i * size : (i + 1) * size]
                found[block_hash] = parent, tokens, event.lora_id, event.lora_name, extra
                parent = block_hash
    return found


def recording(**kwargs):
    stack = Stack(num_blocks=24, events=True, num_staging_blocks=16, num_cpu_chunks=40, **kwargs)
    batches: list[KVEventBatch] = []
    stack.scheduler.kv_event_publisher.publish = batches.append
    stack.serve("first", prompt(4))  # so that the host tier is there
    return stack, batches


def with_adapter(stack, name, tokens):
    request = stack.add(name, tokens)
    request.lora_request = LoRARequest("tiny", 7, "somewhere")
    request.block_hashes.clear()  # it was hashed when it was created
    request.update_block_hashes()
    stack.drain()


@pytest.mark.parametrize("has_storage", [False, True])
def test_blocks_are_described_as_in_hbm(has_storage, tmp_path):
    """Tokens, parents, adapters and salts: what a router hashes itself. With storage, adapters are hashed further."""
    storage = {"storage_tier": "file", "storage_options": f"{tmp_path},min_free_gb=0", "num_storage_chunks": 64}
    stack, batches = recording(**(storage if has_storage else {}))
    stack.serve("a", prompt(3 * BLOCK_SIZE + 2))
    stack.serve("b", [*prompt(2 * BLOCK_SIZE), *prompt(2 * BLOCK_SIZE, seed=5)])  # shares the first two blocks
    stack.serve("c", prompt(2 * BLOCK_SIZE), salt="tenant")
    with_adapter(stack, "d", prompt(3 * BLOCK_SIZE))
    in_host, in_hbm = stored_blocks(batches, MEDIUM_CPU), stored_blocks(batches, "GPU")
    assert len(in_host) == 3 + 2 + 2 + 3
    assert in_host == {block_hash: in_hbm[block_hash] for block_hash in in_host}
    assert {(lora_id, lora_name) for _, _, lora_id, lora_name, _ in in_host.values()} == {(None, None), (7, "tiny")}
    assert {extra for *_, extra in in_host.values()} == {None, ("tenant",), ("tiny",)}
    assert sum(parent is None for parent, *_ in in_host.values()) == 3
    stack.check_end()


@pytest.mark.parametrize("aborts", [False, True])
def test_a_save_may_end_after_its_request(aborts):
    stack, batches = recording()
    release = hold_saves(stack)
    request = stack.add("a", prompt(3 * BLOCK_SIZE), max_tokens=2)
    for _ in range(8):
        stack.step()
        if aborts and stack.offload.has_jobs:
            stack.abort("a")
            break
    assert request.is_finished()
    assert not stored_blocks(batches, MEDIUM_CPU)
    assert len(event_sources(stack.side) or ()) == 3
    release.clear()
    stack.drain()
    assert stored_blocks(batches, MEDIUM_CPU) == stored_blocks(batches, "GPU")
    assert not event_sources(stack.side)
    stack.check_end()


def test_chunks_of_several_blocks_have_the_tokens_of_all():
    stack, batches = recording(blocks_per_chunk=2)
    request = stack.serve("a", prompt(5 * BLOCK_SIZE))
    (event,) = [
        event
        for batch in batches
        for event in batch.events
        if isinstance(event, BlockStored) and event.medium == MEDIUM_CPU
    ]
    hashes = [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes]
    assert (event.block_hashes, event.parent_block_hash) == ([hashes[1], hashes[3]], None)
    assert (event.block_size, event.token_ids) == (2 * BLOCK_SIZE, prompt(4 * BLOCK_SIZE))
    stack.check_end()


def test_a_chunk_of_unknown_origin_has_no_tokens():
    """A router then knows it only by an earlier event for HBM."""
    stored = TierEvent(kind=TierEventKind.STORED, block_hashes=(BlockHash(b"x" * 32), BlockHash(b"y" * 32)))
    groups = [[EventGroup(0, "full_attention", None)]]
    found = list(to_kv_events([stored], groups, sources=BlockSources(), block_size=BLOCK_SIZE, blocks_per_chunk=1))
    assert [event.token_ids for event in found] == [[], []]
    assert [event.parent_block_hash for event in found] == [None, None]
    assert [len(event.block_hashes) for event in found] == [1, 1]


def test_a_session_that_goes_on_with_other_tokens():
    stack, _ = recording()
    sources, request = BlockSources(), stack.add("a", prompt(3 * BLOCK_SIZE))
    first = list(request.block_hashes)
    sources.track(request)
    request._all_token_ids[2 * BLOCK_SIZE] += 1
    del request.block_hashes[2:]
    request.update_block_hashes()
    assert sources.get(first[2]) is None
    sources.track(request)
    assert len(sources) == 3
    assert sources.get(request.block_hashes[2]).token_ids(1, BLOCK_SIZE)[0] == prompt(2 * BLOCK_SIZE + 1)[-1] + 1
    sources.finish("a", next_job_id=5)
    sources.forget(oldest_job_id=4)
    assert len(sources) == 3
    sources.forget(oldest_job_id=5)
    assert len(sources) == 0


def test_one_group_is_number_0_as_in_vllms_own_events():
    stack = Stack(num_blocks=24, events=True, num_staging_blocks=16, num_cpu_chunks=40)
    batches: list[KVEventBatch] = []
    stack.scheduler.kv_event_publisher.publish = batches.append
    stack.serve("a", prompt(3 * BLOCK_SIZE))
    stack.serve("b", prompt(3 * BLOCK_SIZE, seed=1))
    stored = [e for batch in batches for e in batch.events if isinstance(e, BlockStored)]
    specs = {(e.medium, e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in stored}
    assert specs == {("GPU", 0, "full_attention", None), ("CPU", 0, "full_attention", None)}


def test_a_run_begins_anew_after_a_chunk_without_tokens():
    """It is in an event of its own, and the next chunk names it as its parent."""
    stack, _ = recording()
    sources, request = BlockSources(), stack.add("a", prompt(3 * BLOCK_SIZE))
    sources.track(request)
    hashes = tuple(request.block_hashes)
    found = sources.get
    sources.get = lambda block_hash: None if block_hash == hashes[1] else found(block_hash)
    stored = TierEvent(kind=TierEventKind.STORED, block_hashes=hashes)
    groups = [[EventGroup(0, "full_attention", None)]]
    events = list(to_kv_events([stored], groups, sources=sources, block_size=BLOCK_SIZE, blocks_per_chunk=1))
    assert [len(event.block_hashes) for event in events] == [1, 1, 1]
    assert [len(event.token_ids) for event in events] == [BLOCK_SIZE, 0, BLOCK_SIZE]
    assert events[2].parent_block_hash == events[1].block_hashes[0]


def test_of_requests_with_the_same_blocks_only_the_newest_is_kept():
    """The others have ended; their tokens and images would be kept for as long as somebody has the system prompt."""
    stack, _ = recording()
    sources = BlockSources()
    ended = stack.add("a", prompt(2 * BLOCK_SIZE))
    sources.track(ended)
    sources.track(stack.add("b", prompt(2 * BLOCK_SIZE)))
    sources.finish("a", next_job_id=0)
    sources.forget(oldest_job_id=0)
    assert len(sources) == 2
    assert {sources.get(block_hash).request.request_id for block_hash in ended.block_hashes} == {"b"}
