"""A process with an engine above a shared tier: `python -m tests.storage.shared_child URL`.

It prints "ready" once it has started, waits for a line, serves, and prints what it has found.
"""

import json
import sys

from tests.engine.helpers import TINY, rounds, tokens_of
from tests.storage.test_engine import TIGHT, make_offload, serve_slowly
from tpu_offload.engine import Engine


def main(url: str) -> None:
    offload = make_offload(storage_tier="valkey", storage_options=url, storage_lookup_wait_s=60.0)
    engine = Engine(TINY, TIGHT, offload=offload)
    restored = engine.offload_stats().restored_chunks
    print("ready", flush=True)
    sys.stdin.readline()
    outputs = tokens_of(serve_slowly(engine, rounds()[2:]))
    stats = engine.offload_stats()
    engine.close()
    found = {"restored": restored, "found": stats.found_storage_chunks, "promoted": stats.promoted_chunks}
    print(json.dumps(found | {"failed": stats.num_failed_jobs, "tokens": outputs}))


if __name__ == "__main__":
    main(sys.argv[1])
