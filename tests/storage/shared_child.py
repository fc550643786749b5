"""A process with an engine above a shared tier: `python -m tests.storage.shared_child URL` prints what it served."""

import json
import sys

from tests.engine.helpers import TINY, rounds, tokens_of
from tests.storage.test_engine import TIGHT, make_offload, serve_slowly
from tpu_offload.engine import Engine


def main(url: str) -> None:
    engine = Engine(TINY, TIGHT, offload=make_offload(storage_tier="valkey", storage_options=url))
    restored = engine.offload_stats().restored_chunks
    outputs = tokens_of(serve_slowly(engine, rounds()[2:]))
    stats = engine.offload_stats()
    engine.close()
    found = {"restored": restored, "promoted": stats.promoted_chunks, "failed": stats.num_failed_jobs}
    print(json.dumps(found | {"tokens": outputs}))


if __name__ == "__main__":
    main(sys.argv[1])
