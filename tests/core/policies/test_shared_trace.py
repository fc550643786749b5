"""An hour of a chat service's traffic: under the prefix rule no policy hits less than its textbook version."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.core.policies.textbook import TEXTBOOK, prefix_hit_rate
from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import POLICIES, Use

TRACE = Path(__file__).parents[4] / "shared" / "traces" / "conversation_trace.jsonl"

pytestmark = pytest.mark.skipif(not TRACE.exists(), reason=f"the shared trace is not at {TRACE}")


@pytest.fixture(scope="module")
def prompts() -> list[list[bytes]]:
    with TRACE.open() as file:
        prompts = [json.loads(line)["hash_ids"] for line in file]
    keys = {block: hashlib.sha256(b"%d" % block).digest() for prompt in prompts for block in prompt}
    return [[keys[block] for block in prompt] for prompt in prompts]


def chunk_hit_rate(policy, prompts, size) -> float:
    index = ChunkIndex(policy)
    index.grow(size)
    num_hits = 0
    for i, prompt in enumerate(prompts):
        use = Use(i)
        num_found = len(index.find(prompt))
        num_hits += num_found
        index.touch(use, prompt, num_found)
        missing, _ = index.missing(prompt, num_found, len(prompt))
        if missing:
            slots = index.allocate(use, prompt, missing, protected=set(prompt))
            index.complete([prompt[j] for j in missing[: len(slots)]], slots, success=True)
        index.touch(use, prompt, len(prompt))
    index.check_invariants()
    return num_hits / sum(map(len, prompts))


@pytest.mark.parametrize("name", TEXTBOOK)
@pytest.mark.parametrize("share", [0.005, 0.02, 0.1])
def test_no_worse_than_the_textbook(prompts, name, share) -> None:
    size = int(share * len({key for prompt in prompts for key in prompt}))
    expected = prefix_hit_rate(TEXTBOOK[name](size), prompts)
    found = chunk_hit_rate(POLICIES[name](), prompts, size)
    if name == "wtinylfu":
        expected -= 0.005  # no bypass within a request: see the head of its file
    assert found >= expected
