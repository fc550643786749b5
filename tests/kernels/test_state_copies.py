"""The direct path copies the states of linear attention bit for bit, on one device and sharded over several.

As tpu-inference has them: conv states bf16[rows, 3, channels] and recurrent states f32[rows, heads, dk, dv], each an
array a layer, whose row axis names a mesh axis of size 1.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.caches import pointers, random_array, random_like
from tests.kernels.test_copies import Store, moves
from tpu_offload.kernels import DirectCopier, TransferSpec, direct_spec, reference

NUM_LAYERS = 4
SEGMENT_ROWS = 5
NAMES = {"2D": ("data", "model"), "many": (("data", "attn_dp"), ("model", "expert"))}
AXES = {"data": 1, "attn_dp": 1, "model": 0, "expert": 1}  # 0: as many as there are devices


@dataclasses.dataclass(frozen=True)
class Array:
    """A kind of state array."""

    dtype: str
    page_shape: tuple[int, ...]
    split_axis: int
    num_rows: int


ARRAYS = {
    "conv, tiny": Array("bfloat16", (3, 256), 2, 65),
    "recurrent, tiny": Array("float32", (4, 32, 32), 1, 65),
    "conv": Array("bfloat16", (3, 8192), 2, 9),
    "recurrent, 1 MiB a layer": Array("float32", (16, 128, 128), 1, 7),
}
# Numbers that arithmetic would not keep: signalling and quiet NaNs with payloads, zeros, denormals, infinities.
SPECIAL: dict[str, Any] = {
    "bfloat16": np.array([0x7F81, 0xFF81, 0x7FC1, 0xFFFF, 0x8000, 0x0000, 0x0001, 0x807F, 0x7F80, 0xFF80], np.uint16),
    "float32": np.array(
        [0x7F800001, 0xFFA00000, 0x7FC12345, 0xFFFFFFFF, 0x80000000, 0, 1, 0x807FFFFF, 0x7F800000, 0xFF800000],
        np.uint32,
    ),
}


def state_sharding(num_devices, split_axis, names):
    """As tpu-inference shards: `P('data', ..., 'model', ...)`, or with tuples of names in its other design."""
    row_axes, split_axes = NAMES[names]
    flat = [name for axes in (row_axes, split_axes) for name in (axes if isinstance(axes, tuple) else (axes,))]
    devices = np.array(jax.devices()[:num_devices]).reshape([AXES[name] or num_devices for name in flat])
    unsplit = [None] * (split_axis - 1)
    return NamedSharding(Mesh(devices, tuple(flat)), PartitionSpec(row_axes, *unsplit, split_axes))


def random_states(rng, array, sharding):
    """Random bytes, and the special numbers in each row and shard."""
    states = []
    for _ in range(NUM_LAYERS):
        state = random_array(rng, (array.num_rows, *array.page_shape), array.dtype)
        rows = state.reshape(array.num_rows, -1).view(SPECIAL[array.dtype].dtype)
        for start in range(0, rows.shape[1], rows.shape[1] // 8):
            rows[:, start : start + len(SPECIAL[array.dtype])] = SPECIAL[array.dtype]
        states.append(jax.device_put(state, sharding))
    return states


class States:
    """A page group with its copier, and a segment full of random bytes."""

    def __init__(self, name, num_devices, names="2D"):
        rng = np.random.default_rng(5)
        self.array = ARRAYS[name]
        self.caches = random_states(rng, self.array, state_sharding(num_devices, self.array.split_axis, names))
        self.spec = direct_spec(TransferSpec.from_caches(self.caches, segment_blocks=SEGMENT_ROWS, capacity=1))
        self.store = Store(s0=[random_like(rng, struct) for struct in self.spec.segment_structs()])
        self.copier: Any = DirectCopier(self.spec, self.store)

    def save(self, rows, places):
        assert int(self.copier.save(0, moves(rows, places), self.caches).waiting_on) == len(rows)

    def load(self, rows, places):
        flight, self.caches = self.copier.load(0, moves(rows, places), self.caches)
        assert int(flight.waiting_on) == len(rows)

    def segment_bytes(self):
        return np.concatenate([reference.as_bytes(stripe) for stripe in self.store.segment(0)], axis=1)

    def cache_bytes(self):
        return [reference.as_bytes(cache) for cache in self.caches]


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("name", ARRAYS)
def test_rows_are_copied_bit_for_bit_in_place(name, num_devices):
    states = States(name, num_devices)
    last = states.array.num_rows - 1
    places_before = [pointers(cache) for cache in states.caches]
    segment_at = [pointers(stripe) for stripe in states.store.segment(0)]

    before = states.cache_bytes()
    expected = reference.save(states.segment_bytes(), before, [last, 0, 3], [4, 1, 0])
    states.save([last, 0, 3], [4, 1, 0])
    np.testing.assert_array_equal(states.segment_bytes(), expected)
    for cache, unchanged in zip(states.cache_bytes(), before, strict=True):
        np.testing.assert_array_equal(cache, unchanged)

    loaded = reference.load(before, expected, [2, last], [4, 1])
    states.load([2, last], [4, 1])
    for cache, wanted in zip(states.cache_bytes(), loaded, strict=True):
        np.testing.assert_array_equal(cache, wanted)
    np.testing.assert_array_equal(states.segment_bytes(), expected)

    assert [pointers(cache) for cache in states.caches] == places_before
    assert [pointers(stripe) for stripe in states.store.segment(0)] == segment_at


@pytest.mark.parametrize("name", ["conv, tiny", "recurrent, tiny"])
def test_axes_of_several_names_are_the_same_to_the_copies(name):
    states = States(name, 4, "many")
    expected = reference.save(states.segment_bytes(), states.cache_bytes(), [64, 7], [2, 3])
    states.save([64, 7], [2, 3])
    np.testing.assert_array_equal(states.segment_bytes(), expected)
    loaded = reference.load(states.cache_bytes(), expected, [8], [2])
    states.load([8], [2])
    for cache, wanted in zip(states.cache_bytes(), loaded, strict=True):
        np.testing.assert_array_equal(cache, wanted)


@pytest.mark.parametrize("names", NAMES)
def test_segments_are_sharded_as_the_states_but_for_their_rows(names):
    for name, split in (("conv, tiny", 3), ("recurrent, tiny", 2)):
        spec = States(name, 2, names).spec
        for struct in spec.segment_structs():
            shard = struct.sharding.shard_shape(struct.shape)
            assert [i for i in range(len(shard)) if shard[i] != struct.shape[i]] == [split]
            assert shard[split] == struct.shape[split] // 2


def test_a_row_is_all_layers_on_all_devices():
    assert States("recurrent, 1 MiB a layer", 4).spec.block_nbytes_per_device == NUM_LAYERS * 2**20 // 4
