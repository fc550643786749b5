"""Chunks out of segments and back, by every path, bit for bit and in place, and the choice of the path."""

import itertools
import logging

import jax
import numpy as np
import pytest

from tests.caches import DTYPES, cache_sharding, pointers, random_caches, random_like
from tests.kernels.test_copies import Store
from tpu_offload.config import StorageCopyPath
from tpu_offload.errors import CompileError, ConfigError
from tpu_offload.kernels import (
    SLOT_PATHS,
    HbmPath,
    HostPath,
    SlotCopier,
    SlotPath,
    TransferSpec,
    make_slot_copiers,
    payload_choice,
    rank_slot_paths,
    reference,
)
from tpu_offload.memory import pinned_zeros

BLOCKS_PER_CHUNK = 3
NUM_CHUNKS = 4


class Setup:
    """A segment of random bytes, and a copier of one path."""

    def __init__(self, path, dtype="bfloat16", num_devices=1, num_stripes=2):
        rng = np.random.default_rng(0)
        self.spec = spec_of(dtype, num_devices, num_stripes)
        self.store = Store(s0=[random_like(rng, struct) for struct in self.spec.segment_structs()])
        self.copier = SlotCopier(self.spec, self.store, blocks_per_slot=BLOCKS_PER_CHUNK, path=path)

    def read(self, chunk):
        return self.copier.read(0, chunk * BLOCKS_PER_CHUNK)

    def write(self, chunk, payload):
        return int(self.copier.write(0, chunk * BLOCKS_PER_CHUNK, payload))

    def packed(self, payload):
        data = np.empty(self.copier.payload_nbytes, np.uint8)
        self.copier.pack(payload, data)
        return data

    @property
    def chunks(self):
        """Copies of the bytes of all chunks: per stripe, [chunk, blocks, ...]."""
        stripes = [reference.as_bytes(stripe).copy() for stripe in self.store.segment(0)]
        return [stripe.reshape(NUM_CHUNKS, BLOCKS_PER_CHUNK, *stripe.shape[1:]) for stripe in stripes]


def spec_of(dtype="bfloat16", num_devices=1, num_stripes=2):
    caches = random_caches(np.random.default_rng(1), dtype=dtype, num_devices=num_devices, num_blocks=2)
    segment_blocks = NUM_CHUNKS * BLOCKS_PER_CHUNK
    return TransferSpec.from_caches(caches, segment_blocks=segment_blocks, capacity=2, num_stripes=num_stripes)


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", SLOT_PATHS)
def test_bits_survive_and_nothing_else_changes(path, dtype, num_devices):
    setup = Setup(path, dtype, num_devices)
    before = setup.chunks
    payload = setup.read(2)
    for piece, stripe in zip(payload, before, strict=True):
        np.testing.assert_array_equal(reference.as_bytes(piece), stripe[2])
    # By bytes into another slot, so that a copy that does nothing is seen.
    assert setup.write(1, setup.copier.unpack(setup.packed(payload))) == 2 * BLOCKS_PER_CHUNK
    for stripe, old in zip(setup.chunks, before, strict=True):
        old[1] = old[2]
        np.testing.assert_array_equal(stripe, old)


@pytest.mark.parametrize("path", SLOT_PATHS)
def test_segments_stay_where_they_are(path):
    setup = Setup(path)
    at = [pointers(stripe) for stripe in setup.store.segment(0)]
    for chunk in (3, 0):
        setup.write(chunk, setup.read(1))
        assert [pointers(stripe) for stripe in setup.store.segment(0)] == at


@pytest.mark.parametrize("path", SLOT_PATHS)
def test_a_later_write_does_not_change_what_was_read(path):
    setup = Setup(path)
    before = setup.chunks
    payload = setup.read(0)
    setup.write(0, setup.read(3))
    for piece, stripe in zip(payload, before, strict=True):
        np.testing.assert_array_equal(reference.as_bytes(piece), stripe[0])


def test_all_paths_have_the_same_bytes():
    first, *others = (Setup(path) for path in SLOT_PATHS)
    expected = first.packed(first.read(1))
    for setup in others:
        np.testing.assert_array_equal(setup.packed(setup.read(1)), expected)


def test_copies_in_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((8,), ("model",))
    sharding = jax.sharding.NamedSharding(mesh, cache_sharding(8).spec)
    cache = jax.ShapeDtypeStruct((2, 4, 8, 2, 6), np.dtype(np.float32), sharding=sharding)
    spec = TransferSpec.from_caches([cache] * 2, segment_blocks=6, capacity=2)
    assert spec.explicit
    assert rank_slot_paths(SLOT_PATHS, [(spec, 2)], allocate=pinned_zeros, clock=itertools.count().__next__)


class Swapped(SlotPath):
    """Writes to the slot after the right one, with the right token."""

    path = StorageCopyPath.HBM
    max_hbm_blocks = 1
    read = staticmethod(HostPath.read)

    @staticmethod
    def write(spec, num_blocks):
        right = HostPath.write(spec, num_blocks)

        def function(segment, payload, first):
            segment, _ = right.function(segment, payload, (first + num_blocks) % spec.segment_blocks)
            return segment, first + num_blocks

        return as_program(right, jax.jit(function, donate_argnums=0))


class Flipped(SlotPath):
    """Reads one bit wrong."""

    path = StorageCopyPath.HBM
    max_hbm_blocks = 1
    write = staticmethod(HostPath.write)

    @staticmethod
    def read(spec, num_blocks):
        right = HostPath.read(spec, num_blocks)

        def function(segment, first):
            payload, token = right.function(segment, first)
            return [payload[0].at[(0,) * payload[0].ndim].multiply(-1), *payload[1:]], token

        return as_program(right, jax.jit(function))


class Refused(SlotPath):
    """Does not compile."""

    path = StorageCopyPath.HBM
    max_hbm_blocks = 1
    write = staticmethod(HostPath.write)

    @staticmethod
    def read(spec, num_blocks):
        raise CompileError("too large\nand more")


def as_program(right, function):
    return type(right)(right.name, function, right.args, right.platform)


def ranked(*paths, clock):
    return rank_slot_paths(paths, [(spec_of(num_stripes=1), BLOCKS_PER_CHUNK)], allocate=pinned_zeros, clock=clock)


class Clock:
    """Each path is timed by pairs of calls; the first path's take `seconds[0]`, the second's `seconds[1]`."""

    def __init__(self, *seconds):
        steps = [step for s in seconds for step in [1.0, s] * payload_choice.NUM_TIMED]
        self._times = itertools.accumulate(steps)

    def __call__(self):
        return next(self._times)


def test_the_fastest_path_comes_first():
    assert list(ranked(HostPath, HbmPath, clock=Clock(0.25, 0.5)).items()) == [(HostPath, 0.25), (HbmPath, 0.5)]
    assert list(ranked(HostPath, HbmPath, clock=Clock(0.5, 0.25)).items()) == [(HbmPath, 0.25), (HostPath, 0.5)]


@pytest.mark.parametrize("broken", [Swapped, Flipped, Refused])
def test_a_path_that_copies_wrong_or_not_at_all_is_not_taken(broken, caplog):
    assert ranked(broken, HostPath, clock=itertools.count().__next__).keys() == {HostPath}
    assert "chunks cannot go to and from storage by the hbm path: " in caplog.text
    if broken is Refused:
        assert caplog.messages == ["chunks cannot go to and from storage by the hbm path: too large"]


def copiers(wanted, monkeypatch, *, ranking=None, precompile=True, broken=()):
    """The path that is chosen; with a `ranking`, as if the platform had to be tried."""
    spec = spec_of()
    if ranking is not None:
        monkeypatch.setattr(TransferSpec, "platform", "tpu-like")
        monkeypatch.setattr(
            payload_choice, "rank_slot_paths", lambda paths, *_, **__: {p: 0.25 for p in ranking if p in paths}
        )
    monkeypatch.setattr(SlotCopier, "compile", lambda self: refuse(self.path) if self.path in broken else None)
    ((made,),) = make_slot_copiers(
        StorageCopyPath(wanted), [[(spec, Store(), 1)]], allocate=pinned_zeros, precompile=precompile
    )
    return made.path


def refuse(path):
    raise CompileError(f"{path.path.value} is too large")


def test_on_cpu_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(payload_choice, "rank_slot_paths", None)
    assert copiers("auto", monkeypatch) is HostPath
    assert copiers("host", monkeypatch) is HostPath
    assert copiers("hbm", monkeypatch) is HbmPath


def test_elsewhere_the_fastest_that_compiles_is_chosen(monkeypatch, caplog):
    both = [HbmPath, HostPath]
    with caplog.at_level(logging.INFO):
        assert copiers("auto", monkeypatch, ranking=both) is HbmPath
    said = ["storage copies use the hbm path; measured times of a round trip: hbm 250 ms, host 250 ms"]
    assert caplog.messages == said
    caplog.clear()
    assert copiers("host", monkeypatch, ranking=both) is HostPath
    assert copiers("auto", monkeypatch, ranking=both, precompile=False) is HostPath
    assert copiers("auto", monkeypatch, ranking=[HostPath]) is HostPath
    assert caplog.messages == []
    assert copiers("auto", monkeypatch, ranking=both, broken=[HbmPath]) is HostPath
    assert caplog.messages == ["chunks cannot go to and from storage by the hbm path: hbm is too large"]


@pytest.mark.parametrize("case", [{"ranking": []}, {"ranking": [HbmPath], "broken": [HbmPath]}])
def test_a_device_on_which_no_path_works_ends_the_start_in_one_line(case, monkeypatch):
    with pytest.raises(ConfigError, match=r"^TPU_OFFLOAD_STORAGE_COPY_PATH=hbm: no such path .*expected auto, host or"):
        copiers("hbm", monkeypatch, **case)
