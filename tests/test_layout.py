"""The geometry of blocks, on one device and sharded."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.caches import random_caches
from tpu_offload.errors import LayoutError
from tpu_offload.layout import KVLayout, LayerGroup, LayerGroupKind, PageGroup
from tpu_offload.worker.setup import check_caches


def uniform(*, layer_ids=(0, 1, 2), page_shape=(16, 4, 2, 64), dtype="bfloat16"):
    return LayerGroup.uniform(LayerGroupKind.FULL_ATTENTION, layer_ids, page_shape, dtype)


GROUP = uniform()
BASE = KVLayout(block_size=16, groups=(GROUP,), model="m")


def sharding(*axes, num_devices=1):
    devices = jax.devices("cpu")
    if len(devices) < num_devices:
        pytest.skip(f"needs {num_devices} CPU devices, there are {len(devices)}")
    return NamedSharding(Mesh(np.array(devices[:num_devices]), ("model",)), PartitionSpec(*axes))


def cache(shape=(8, 16, 4, 2, 64), dtype=jnp.bfloat16, where=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where or sharding())


def test_from_caches():
    layout = KVLayout.from_caches([cache()] * 3, block_size=16, model="m")
    assert layout == BASE


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [("bfloat16", 2), ("float32", 4), ("float16", 2), ("int8", 1), ("float8_e4m3fn", 1), ("float8_e5m2", 1)],
)
def test_bytes(dtype, itemsize):
    layout = KVLayout.from_caches([cache(dtype=jnp.dtype(dtype))] * 3, block_size=16)
    ((pages,),) = (group.page_groups for group in layout.groups)
    assert pages.dtype == dtype
    assert pages.page_nbytes == 16 * 4 * 2 * 64 * itemsize
    assert (
        layout.block_nbytes == layout.block_nbytes_per_device == layout.block_nbytes_per_host == 3 * pages.page_nbytes
    )


def test_layers_with_other_pages_are_another_page_group():
    """As Gemma-4's layers, whose heads have two sizes, or caches beside which the scales of their numbers are kept."""
    wide, scales = cache((8, 16, 2, 2, 128)), cache((8, 16, 4), jnp.float32)
    layout = KVLayout.from_caches([cache(), wide, cache(), scales, wide], block_size=16)
    (group,) = layout.groups
    assert group.page_groups == (
        PageGroup(layer_ids=(0, 2), page_shape=(16, 4, 2, 64), dtype="bfloat16"),
        PageGroup(layer_ids=(1, 4), page_shape=(16, 2, 2, 128), dtype="bfloat16"),
        PageGroup(layer_ids=(3,), page_shape=(16, 4), dtype="float32"),
    )
    assert group.layer_ids == (0, 1, 2, 3, 4)
    assert layout.block_nbytes == 4 * 16 * 4 * 2 * 64 * 2 + 16 * 4 * 4
    moved = KVLayout.from_caches([wide, cache(), cache(), scales, wide], block_size=16)
    assert moved.fingerprint() != layout.fingerprint()
    layout.check_tier()


def test_sharded_heads_split_the_bytes():
    where = sharding(None, None, "model", num_devices=4)
    layout = KVLayout.from_caches([cache(where=where)], block_size=16)
    assert (layout.num_shards, layout.num_local_devices) == (4, 4)
    assert layout.block_nbytes_per_device * 4 == layout.block_nbytes == layout.block_nbytes_per_host


def test_replicated_caches_take_every_device_and_every_copy():
    layout = KVLayout.from_caches([cache(where=sharding(num_devices=4))], block_size=16)
    assert (layout.num_shards, layout.num_local_devices) == (1, 4)
    assert layout.block_nbytes_per_device == layout.block_nbytes
    assert layout.block_nbytes_per_host == 4 * layout.block_nbytes


def test_a_block_axis_that_is_split_means_data_parallel_ranks():
    layout = KVLayout.from_caches([cache(where=sharding("model", num_devices=4))] * 3, block_size=16)
    assert (layout.num_ranks, layout.num_shards, layout.num_local_devices) == (4, 1, 4)
    assert layout.block_nbytes_per_device == layout.block_nbytes
    assert layout.block_nbytes_per_host == 4 * layout.block_nbytes, "one block of each rank"
    one = KVLayout.from_caches([cache()] * 3, block_size=16)
    assert (one.num_ranks, one.fingerprint()) == (1, layout.fingerprint())


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        (lambda: [], "no KV cache arrays"),
        (lambda: [cache((8,))], r"shape \(8,\)"),
        (lambda: [cache(), cache((9, 16, 2, 2, 64))], "KV cache 1 has 9 blocks"),
        (lambda: [cache(), cache(where=sharding(None, None, "model", num_devices=2))], "one sharding in a layer group"),
    ],
)
def test_caches_that_cannot_be_described(caches, message):
    with pytest.raises(LayoutError, match=message):
        KVLayout.from_caches(caches(), block_size=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"groups": ()}, "got no layer groups"),
        ({"groups": (uniform(layer_ids=()),)}, "no layers"),
        ({"groups": (LayerGroup(kind=GROUP.kind, page_groups=()),)}, "no layers"),
        ({"num_shards": 0}, "num_shards"),
        ({"num_local_devices": 0}, "num_local_devices"),
    ],
)
def test_an_invalid_layout(change, message):
    with pytest.raises(LayoutError, match=message):
        dataclasses.replace(BASE, **change)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda pages: LayerGroup(kind=GROUP.kind, page_groups=pages), "expected a sequence of PageGroup"),
        (lambda pages: LayerGroup(kind=GROUP.kind, page_groups=pages.layer_ids), "expected a sequence of PageGroup"),
        (lambda pages: KVLayout(block_size=16, groups=(pages,)), "expected a sequence of LayerGroup"),
        (
            lambda pages: KVLayout(block_size=16, groups=(LayerGroup(kind=GROUP.kind, page_groups=(pages, pages)),)),
            "expected each layer once",
        ),
    ],
)
def test_page_groups_in_the_wrong_place(make, message):
    with pytest.raises(LayoutError, match=message):
        make(GROUP.page_groups[0])


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"block_size": 32},
        {"groups": (uniform(layer_ids=(0, 1)),)},
        {"groups": (uniform(page_shape=(16, 2, 4, 64)),)},  # the same bytes in another order
        {"groups": (uniform(dtype="float16"),)},
        {"groups": (dataclasses.replace(GROUP, window=64),)},
    ],
)
def test_different_layouts_have_different_fingerprints(change):
    assert dataclasses.replace(BASE, **change).fingerprint() != BASE.fingerprint()


def test_layers_of_one_window_are_a_group():
    layout = KVLayout.from_caches([cache(), cache((5, 16, 4, 2, 64)), cache()], block_size=16, windows=[0, 32, 0])
    full, window = layout.groups
    assert (full.kind, full.layer_ids, full.window) == (LayerGroupKind.FULL_ATTENTION, (0, 2), 0)
    assert (window.kind, window.layer_ids, window.window) == (LayerGroupKind.SLIDING_WINDOW, (1,), 32)
    assert layout.group_nbytes_per_host(full) == 2 * layout.group_nbytes_per_host(window) == full.block_nbytes


def test_layer_groups_may_share_arrays():
    caches = [cache()] * 2
    layout = KVLayout.from_caches(caches, block_size=16, groups=[(0, (0, 1)), (32, range(2)), (32, [0, 1])])
    assert [(group.window, group.layer_ids) for group in layout.groups] == [(0, (0, 1)), (32, (0, 1)), (32, (0, 1))]
    assert [group.kind for group in layout.groups] == [
        LayerGroupKind.FULL_ATTENTION, LayerGroupKind.SLIDING_WINDOW, LayerGroupKind.SLIDING_WINDOW
    ]  # fmt: skip
    check_caches(layout, caches)
    one_group = KVLayout.from_caches(caches, block_size=16)
    assert one_group == KVLayout.from_caches(caches, block_size=16, groups=[(0, (0, 1))])
    assert len({one.fingerprint() for one in (layout, one_group)}) == 2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([(0, (0,))], r"groups=\(\(0, \(0,\)\),\).* for 2 KV caches; expected each of them in a group"),
        ([(0, (0, 1, 2))], "for 2 KV caches; expected each of them in a group"),
        ([(0, (0, 1)), (-1, (0, 1))], "expected windows in tokens, or 0"),
        ([(0, (0, 1)), (8, ())], "each with the positions of its arrays"),
        ([(0, (0, 0, 1))], "expected each layer once"),
        ([0, 1], "expected pairs of a window and the positions of arrays"),
        ([(0.5, (0, 1))], "a window=0.5; expected an integer"),
        (3, "groups=3; expected pairs"),
    ],
)
def test_invalid_groups(groups, message):
    with pytest.raises(LayoutError, match=message):
        KVLayout.from_caches([cache()] * 2, block_size=16, groups=groups)
    with pytest.raises(LayoutError, match="and no windows"):
        KVLayout.from_caches([cache()] * 2, block_size=16, windows=[0, 8], groups=[(0, (0, 1))])


def test_the_host_tier_refuses_windows_in_one_line():
    hybrid = KVLayout.from_caches([cache()] * 2, block_size=16, windows=[0, 32])
    only_window = KVLayout.from_caches([cache()] * 2, block_size=16, windows=[32, 32])
    BASE.check_tier()
    for layout in (hybrid, only_window):
        with pytest.raises(LayoutError, match=r"sliding_window; the host tier .* set TPU_OFFLOAD_HOST_GB=0"):
            layout.check_tier()


@pytest.mark.parametrize(
    ("caches", "windows", "message"),
    [
        (lambda: [cache()] * 2, [0], r"windows=\[0\] for 2 KV caches; expected one per layer"),
        (lambda: [cache()] * 2, [0, -1], r"windows=\[0, -1\] for 2 KV caches"),
        (lambda: [cache(), cache((5, 16, 4, 2, 64))], [32, 32], "expected one number of blocks"),
        (
            lambda: [cache(), cache(where=sharding(None, None, "model", num_devices=2))],
            [0, 32],
            "full_attention into 1 ranks and 1 shards on 1 local devices, sliding_window into 1 ranks and 2 shards on "
            "2 local devices; expected the same numbers for each: allocate the caches of all groups over one mesh",
        ),
    ],
)
def test_invalid_windows(caches, windows, message):
    with pytest.raises(LayoutError, match=message):
        KVLayout.from_caches(caches(), block_size=16, windows=windows)


def test_fingerprint_does_not_depend_on_the_sharding():
    assert dataclasses.replace(BASE, num_shards=4, num_local_devices=4).fingerprint() == BASE.fingerprint()


def test_fingerprint_golden():
    """A golden value: chunks stored under one value cannot be read under another."""
    assert BASE.fingerprint().hex() == "a58fe07c43d8c6d1bb14610abff36af1"


def test_numpy_integers_give_the_same_layout():
    caches = random_caches(np.random.default_rng(0))
    plain = KVLayout.from_caches(caches, block_size=4, windows=[0] * len(caches))
    sizes: dict[str, Any] = {"block_size": np.int64(4), "windows": np.zeros(len(caches), np.int32)}
    other = KVLayout.from_caches(tuple(caches), **sizes)
    assert other == plain
    assert other.fingerprint() == plain.fingerprint()
    assert type(other.block_size) is int


@pytest.mark.parametrize(
    ("caches", "settings", "error"),
    [
        (None, {}, "KV caches are a NoneType; expected a list with one array per layer"),
        ({0: 1}, {}, "KV caches are a dict; expected a list"),
        (np.zeros((2, 3, 4)), {}, "KV caches are a ndarray; expected a list"),
        ([1], {}, "KV cache 0 is a int; expected a jax array or shape struct"),
        ([np.zeros((2, 3, 4))], {}, "KV cache 0 is a ndarray; expected a jax array"),
        ("real", {"block_size": 4.0}, "block_size=4.0; expected an integer"),
        ("real", {"block_size": True}, "block_size=True; expected an integer"),
        ("real", {"block_size": "4"}, "block_size='4'; expected an integer"),
        ("real", {"windows": 5}, "windows=5; expected a sequence of integers"),
        ("real", {"windows": [None]}, "windows=None; expected an integer"),
        ("real", {"windows": [0.0]}, "windows=0.0; expected an integer"),
        ("real", {"model": b"m"}, "model=b'm'; expected text"),
    ],
)
def test_invalid_input_is_refused_with_one_line(caches, settings, error):
    if isinstance(caches, str):
        caches = random_caches(np.random.default_rng(0))[:1]
    with pytest.raises(LayoutError) as e:
        KVLayout.from_caches(caches, **{"block_size": 4, **settings})
    assert error in str(e.value)
    assert len(str(e.value).splitlines()) == 1


def stage(num_layers, *, page_shape=(16, 4, 2, 64), **fields):
    return KVLayout(
        block_size=16, groups=(uniform(layer_ids=tuple(range(num_layers)), page_shape=page_shape),), model="m", **fields
    )


def test_stages_have_the_layers_of_all_and_the_largest_bytes():
    stages = stage(3, stage_layers="a"), stage(1), stage(2, page_shape=(16, 4, 2, 256), stage_layers="b")
    layout = KVLayout.of_stages(stages)
    assert (layout.stages, layout.stage_layers) == (stages, "")
    assert layout.groups[0].layer_ids == (0, 1, 2, 3, 4, 5)
    assert layout.block_nbytes == sum(of_stage.block_nbytes for of_stage in stages)
    assert layout.block_nbytes_per_device == stages[2].block_nbytes
    assert layout.block_nbytes_per_host == stages[2].block_nbytes
    layout.check_tier()


def divided(*num_layers, num_arrays=None):
    """The stages of a model that is divided so; each with so many arrays, whatever layers they have."""
    first, stages = 0, []
    for i, num in enumerate(num_layers):
        names = f"{first} to {first + num - 1}"
        stages.append(stage(num_arrays[i] if num_arrays else num, stage_layers=names))
        first += num
    return KVLayout.of_stages(stages)


def test_fingerprints_of_stages_depend_on_where_the_model_is_divided():
    layouts = [stage(4), *(divided(i, 4 - i) for i in (1, 2, 3)), divided(4)]
    assert len({layout.fingerprint() for layout in layouts}) == 5
    same_arrays = [divided(*n, num_arrays=(2, 2, 2, 2)) for n in ((2, 2, 2, 1), (2, 2, 1, 2))]
    assert len({layout.fingerprint() for layout in same_arrays}) == 2
    assert len({of_stage.fingerprint() for layout in same_arrays for of_stage in layout.stages}) == 6


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "no pipeline stages"),
        ([stage(2), dataclasses.replace(stage(2), block_size=32)], "block sizes and models .*expected one of each"),
        ([stage(2), dataclasses.replace(stage(2), model="other")], "block sizes and models .*expected one of each"),
        ([stage(2), stage(2)], r"pipeline stages with \['', ''\] for stage_layers; expected the layers that each has"),
        (
            [stage(2, stage_layers="a"), dataclasses.replace(stage(2), groups=(GROUP, GROUP))],
            "full_attention, full_attention, full_attention; expected one with full attention in each",
        ),
        (
            [
                KVLayout(
                    block_size=16, groups=(LayerGroup.uniform(LayerGroupKind.STATE, (0,), (4, 4), "int8"),), model="m"
                ),
                stage(2, stage_layers="b"),
            ],
            "state, full_attention; expected one with full attention in each",
        ),
    ],
)
def test_invalid_stages(stages, message):
    with pytest.raises(LayoutError, match=message) as e:
        KVLayout.of_stages(stages)
    assert "\n" not in str(e.value)
