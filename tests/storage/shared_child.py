"""A process with an engine above a shared tier: `python -m tests.storage.shared_child URL`.

It prints "ready" once it has started, waits for a line, serves, and prints what it has found.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

from tests.engine.helpers import TINY, rounds, tokens_of
from tests.storage.test_engine import TIGHT, make_offload, serve_slowly
from tpu_offload import BlockHasher
from tpu_offload.engine import Engine
from tpu_offload.replay.restart import restart_numbers
from tpu_offload.replay.setup import layout_of


def serve_last_round(engine: Engine) -> dict[str, Any]:
    """Serves the last turns of the conversations with a new engine; returns what it found of the earlier ones."""
    stored = engine.stored_block_hashes()
    restored = engine.offload_stats().restored_chunks
    (requests,) = rounds()[2:]
    outputs = serve_slowly(engine, [requests])
    records: list[Any] = [
        SimpleNamespace(prompt_tokens=request.prompt_tokens, stats=outputs[request.request_id].stats)
        for request in requests
    ]
    hasher = BlockHasher(layout_of(TINY, TIGHT).fingerprint(), block_size=TIGHT.block_size)
    found = restart_numbers(records, stored, hasher=hasher, block_size=TIGHT.block_size, blocks_per_chunk=1)
    stats = engine.offload_stats()
    found |= {"restored": restored, "found": stats.found_storage_chunks, "promoted": stats.promoted_chunks}
    return found | {"failed": stats.num_failed_jobs, "tokens": tokens_of(outputs)}


def main(url: str) -> None:
    offload = make_offload(storage_tier="valkey", storage_options=url, storage_lookup_wait_s=60.0)
    engine = Engine(TINY, TIGHT, offload=offload)
    print("ready", flush=True)
    sys.stdin.readline()
    found = serve_last_round(engine)
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
