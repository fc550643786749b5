"""The code in docs/saving.md runs, and does what it says."""

import re
from pathlib import Path

import tpu_offload
from tests.core.fakes import FakeEngine, tokens

DOCS = Path(__file__).parents[1] / "docs" / "saving.md"


def test_the_code_for_engine_authors():
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    engine = FakeEngine(save_on="eviction,preemption")
    old, young = engine.add("old", tokens(16)), engine.add("young", tokens(12, start=100))
    engine.step({"old": 16, "young": 12})
    names = {name: getattr(tpu_offload, name) for name in tpu_offload.__all__} | {
        "scheduler": engine.scheduler,
        "prefix_cache": dict(zip(old.hashes, old.block_ids, strict=True)),
        "num_blocks": 3,
        "request_id": "young",
        "block_ids": young.block_ids,
        "block_hashes": old.hashes,
        "num_prompt_tokens": 12,
        "num_computed_tokens": 12,
        "changed": [],
    }
    first, second = code.split("# When a request")
    exec(first, names)
    names["block_hashes"] = young.hashes
    exec("#" + second, names)
    (job,) = names["plan"].of(tpu_offload.JobKind.EARLY_SAVE)
    assert list(job.block_ids) == old.block_ids[:3] + young.block_ids
    exec("scheduler.mark_caches_lost()", names)


def test_the_defaults_in_the_table_of_limits():
    rows = dict(re.findall(r"^\| `(\w+)` \| (none|0|true) \|", DOCS.read_text(), re.MULTILINE))
    words = {None: "none", 0: "0", True: "true"}
    limits = tpu_offload.RequestLimits()
    assert rows == {
        name: words[getattr(limits, name)] for name in ("max_save_tokens", "max_load_tokens", "priority", "cache")
    }
