"""The code in docs/swap.md runs, and does what it says."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import tpu_offload
from tests.caches import random_caches
from tpu_offload.kernels import reference

DOCS = Path(__file__).parents[1] / "docs" / "swap.md"


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_code_for_engine_authors(hybrid, monkeypatch):
    setup, out, back, step = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    monkeypatch.setenv("TPU_OFFLOAD_SWAP_GB", "0.001")
    monkeypatch.setenv("TPU_OFFLOAD_NUM_CPU_CHUNKS", "0")
    caches = random_caches(np.random.default_rng(0), num_blocks=12)
    before = [reference.as_bytes(cache) for cache in caches]
    tables = {"old": [[0, 1], [0]], "new": [[5, 3, 7], [4, 2]]}
    names = {name: getattr(tpu_offload, name) for name in tpu_offload.__all__} | {
        "kv_caches": caches,
        "windows": [0, 8, 0] if hybrid else [],
        "holding": ["old", "new"],
        "block_tables": {name: table if hybrid else table[:1] for name, table in tables.items()},
        "block_hashes": {"old": [], "new": []},
        "num_computed": {"old": 8, "new": 11},
        "num_new_blocks": {"old": [1, 1][: 1 + hybrid], "new": [0, 0][: 1 + hybrid]},
        "num_free": [0, 0][: 1 + hybrid],
        "swapped_out": [],
        "to_recompute": [],
        "grant": lambda num_blocks: [[8, 9, 10][: num_blocks[0]], [6, 1]][: 1 + hybrid],
        "changed": [],
        "forward": jax.jit(lambda caches: [cache * 1 for cache in caches], donate_argnums=0),
        "name": "new",
    }
    exec(setup.replace("layout, kv_caches)", "layout, kv_caches, available=2**30)"), names)
    names["worker"].wait_until_allocated()
    names["scheduler"].apply(names["worker"].poll())
    exec(out, names)
    assert (names["swapped_out"], names["to_recompute"]) == (["new"], [])
    exec(step, names)
    exec(back, names)
    assert names["waits"]
    for _ in range(100):
        exec(step, names)
        if names["update"].swapped_in:
            break
    assert names["update"].swapped_in == ("new",)
    for layer, (cache, old) in enumerate(zip(names["kv_caches"], before, strict=True)):
        pairs = ((6, 4), (1, 2)) if hybrid and layer == 1 else ((8, 5), (9, 3), (10, 7))
        for target, source in pairs:
            np.testing.assert_array_equal(reference.as_bytes(cache)[target], old[source])
    names["worker"].close()
