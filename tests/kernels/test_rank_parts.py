"""The part of one data-parallel rank, or of one host, in segments of the host tier: read, written, and in place."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tests.caches import DTYPES, pointers, random_like
from tests.kernels.test_copies import Store
from tpu_offload.kernels import SLOT_PATHS, HostPath, SlotCopier, TransferSpec, part_of_rank, reference

BLOCKS = 3  # of a slot
NUM_SLOTS = 4
SPLITS = [("rank", None, "model"), ("rank", None, None, "model"), ("rank",)]


class Ranks:
    """A segment of random bytes that is split over four ranks of two devices each, and a copier of one of them."""

    def __init__(self, *, rank, path=HostPath, dtype="bfloat16", split=SPLITS[0], devices=None):
        rng = np.random.default_rng(0)
        devices = np.array(jax.devices()[:8] if devices is None else devices)
        sharding = NamedSharding(Mesh(devices.reshape(4, 2), ("rank", "model")), PartitionSpec(*split))
        cache = jax.ShapeDtypeStruct((4 * 2, 4, 8, 2, 6), np.dtype(dtype), sharding=sharding)
        self.spec = TransferSpec.from_caches([cache] * 2, segment_blocks=NUM_SLOTS * BLOCKS, capacity=2, num_stripes=2)
        self.store = Store(s0=[random_like(rng, struct) for struct in self.spec.segment_structs()])
        self.part = part_of_rank(self.spec, self.store, rank)
        self.copier = SlotCopier(self.part.spec, self.part.arena, blocks_per_slot=BLOCKS, path=path)

    @property
    def slots(self):
        """Copies of the bytes of all slots: per stripe, [rank, slot, blocks, ...]."""
        stripes = [reference.as_bytes(stripe).copy() for stripe in self.store.segment(0)]
        return [stripe.reshape(4, NUM_SLOTS, BLOCKS, *stripe.shape[1:]) for stripe in stripes]

    def read(self, slot):
        data = np.empty(self.copier.payload_nbytes, np.uint8)
        self.copier.pack(self.copier.read(0, slot * BLOCKS), data)
        return data

    def write(self, slot, data):
        return int(self.copier.write(0, slot * BLOCKS, self.copier.unpack(data)))


@pytest.mark.parametrize(
    ("split", "dtype", "path"),
    [
        *((SPLITS[0], dtype, HostPath) for dtype in DTYPES),
        *((split, "bfloat16", path) for split in SPLITS for path in SLOT_PATHS),
    ],
)
def test_only_the_slot_of_that_rank_changes(path, dtype, split):
    ranks = Ranks(rank=2, path=path, dtype=dtype, split=split)
    before = ranks.slots
    data = ranks.read(1)
    for old in before:
        assert not np.array_equal(old[2, 1], old[2, 3])
        old[2, 3] = old[2, 1]
    assert ranks.write(3, data) == 4 * BLOCKS
    for stripe, expected in zip(ranks.slots, before, strict=True):
        np.testing.assert_array_equal(stripe, expected)


def test_every_rank_reads_its_own_slot():
    per_rank = [Ranks(rank=rank) for rank in range(4)]
    for rank, ranks in enumerate(per_rank):
        for piece, stripe in zip(ranks.copier.read(0, BLOCKS), ranks.store.segment(0), strict=True):
            rows = {shard.device: shard.data[BLOCKS : 2 * BLOCKS] for shard in stripe.addressable_shards}
            assert [shard.device.id // 2 for shard in piece.addressable_shards] == [rank, rank]
            for shard in piece.addressable_shards:
                np.testing.assert_array_equal(reference.as_bytes(shard.data), reference.as_bytes(rows[shard.device]))


@pytest.mark.parametrize("rank", range(4))
def test_a_segment_stays_where_it_is_and_goes_on_as_one(rank):
    ranks = Ranks(rank=rank)
    at = [pointers(stripe) for stripe in ranks.store.segment(0)]
    expected = ranks.slots
    ranks.write(0, ranks.read(2))
    assert [pointers(stripe) for stripe in ranks.store.segment(0)] == at
    # As a program of all ranks takes it.
    add = jax.jit(lambda stripe: stripe + stripe.dtype.type(0), donate_argnums=0)
    for stripe, struct, old in zip(ranks.store.segment(0), ranks.spec.segment_structs(), expected, strict=True):
        assert (stripe.shape, stripe.sharding) == (struct.shape, struct.sharding)
        old[rank, 0] = old[rank, 2]
        np.testing.assert_array_equal(reference.as_bytes(add(stripe)).reshape(old.shape), old)


def test_ranks_have_the_same_records_if_their_devices_have_the_same_shards():
    formats = {(part.copier.payload_format, part.part.shards) for part in (Ranks(rank=0), Ranks(rank=3))}
    assert len(formats) == 1
    devices = jax.devices()[:8]
    others = [
        Ranks(rank=0, split=SPLITS[1]),
        Ranks(rank=0, split=SPLITS[2]),
        Ranks(rank=0, devices=[devices[1], devices[0], *devices[2:]]),
    ]
    formats |= {(part.copier.payload_format, part.part.shards) for part in others}
    assert len(formats) == 4


def test_what_has_one_rank_on_one_host_is_not_cut():
    sharding = SingleDeviceSharding(jax.devices()[0])
    cache = jax.ShapeDtypeStruct((8, 4, 8), np.dtype(np.float32), sharding=sharding)
    spec = TransferSpec.from_caches([cache], segment_blocks=2, capacity=2)
    store = Store()
    assert part_of_rank(spec, store, 0) == (spec, store, "")


@pytest.mark.parametrize("make_mesh", [jax.make_mesh, lambda shape, names: Mesh(np.array(jax.devices()[:8]), names)])
@pytest.mark.parametrize("path", SLOT_PATHS)
def test_an_engine_that_has_set_the_mesh_of_all_devices(path, make_mesh):
    ranks = Ranks(rank=1, path=path)
    expected = ranks.slots
    with jax.set_mesh(make_mesh((8,), ("all",))):
        ranks.write(0, ranks.read(2))
    for stripe, old in zip(ranks.slots, expected, strict=True):
        old[1, 0] = old[1, 2]
        np.testing.assert_array_equal(stripe, old)
