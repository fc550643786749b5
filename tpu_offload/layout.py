"""The geometry of KV cache blocks: layer groups, page shapes, sizes, and the fingerprint that salts the keys."""

import dataclasses
import enum
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np

from tpu_offload.errors import LayoutError
from tpu_offload.values import as_integer, one_line


class LayerGroupKind(enum.Enum):
    """How the layers of a group use their blocks. Hybrid models have several groups."""

    FULL_ATTENTION = "full_attention"  # one block per `block_size` tokens
    SLIDING_WINDOW = "sliding_window"  # blocks for the last tokens only
    STATE = "state"  # one row: the state of linear attention after some token


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageGroup:
    """Layers of a layer group whose pages have one shape and dtype: they are copied together.

    Attributes:
      layer_ids: positions of the arrays in the list of KV caches.
      page_shape: global shape of one layer's slice of a block, for tpu-inference
        `(block_size, 2 * kv_heads / packing, packing, head_dim)`.
      dtype: numpy name of the element type, such as `bfloat16`.
    """

    layer_ids: tuple[int, ...]
    page_shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        # The fingerprint hashes the repr of these, so they must be plain integers.
        object.__setattr__(self, "layer_ids", _integers("layer_ids", self.layer_ids))
        object.__setattr__(self, "page_shape", _integers("page_shape", self.page_shape))

    @property
    def num_layers(self) -> int:
        """Layers in the group."""
        return len(self.layer_ids)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all devices."""
        return math.prod(self.page_shape) * np.dtype(self.dtype).itemsize

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block, all layers of the group, over all devices."""
        return self.num_layers * self.page_nbytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share one block table.

    Groups may share arrays: then one pool of blocks serves them, and a block belongs to one of them at a time.

    A block of a group of states is a row: what all of its layers know about the tokens before a position. Entry `p` of
    its block table is the row after exactly `(p + 1) * block_size` tokens, and the null block where there is none.

    Attributes:
      kind: how the group's blocks are used.
      page_groups: its layers by page shape and dtype. Most models have one; Gemma-4, whose layers have two head sizes,
        has two, and so have states, with a convolution and a recurrent array a layer.
      window: tokens that a token attends to, itself included; 0 without a sliding window.
    """

    kind: LayerGroupKind
    page_groups: tuple[PageGroup, ...]
    window: int = 0

    def __post_init__(self) -> None:
        given = self.page_groups
        if not isinstance(given, Sequence) or not all(isinstance(pages, PageGroup) for pages in given):
            raise LayoutError(f"page_groups={one_line(given)}; expected a sequence of PageGroup")
        object.__setattr__(self, "page_groups", tuple(given))
        object.__setattr__(self, "window", _integer("window", self.window))

    @classmethod
    def uniform(
        cls,
        kind: LayerGroupKind,
        layer_ids: tuple[int, ...],
        page_shape: tuple[int, ...],
        dtype: str,
        *,
        window: int = 0,
    ) -> "LayerGroup":
        """A group whose pages all have one shape; arguments as for `PageGroup`."""
        pages = PageGroup(layer_ids=layer_ids, page_shape=page_shape, dtype=dtype)
        return cls(kind=kind, page_groups=(pages,), window=window)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Positions of the group's arrays in the list of KV caches, ascending."""
        return tuple(sorted(i for pages in self.page_groups for i in pages.layer_ids))

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block, all layers of the group, over all devices."""
        return sum(pages.block_nbytes for pages in self.page_groups)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """A description of the KV cache; holds no arrays.

    Attributes:
      block_size: tokens in a block.
      groups: the layer groups, full attention first. Groups may share their arrays, as in vLLM: a block then belongs to
        one of them at a time. The host tier supports one group of full attention, then groups with sliding windows that
        share its arrays, then one of states with arrays of its own; request swap supports any.
      num_shards: devices that a page is sharded over (1 if replicated or on one device).
      num_local_devices: devices of this process, each with its shard.
      num_ranks: data-parallel ranks in this engine, which the block axis is split over. Each has blocks, block ids and
        an `OffloadScheduler` of its own; one worker copies for all of them (see `RankPlans`).
      model: name or revision of the weights; part of the fingerprint, so that models never share a chunk.
      null_block: what block tables of groups with windows or states have where the request holds no block. The host
        tier needs it for those: KV of the block with this id is never saved. Any other number if there are none.
      stages: with pipeline parallelism, the layout of each stage's caches, see `of_stages`; else empty.
      stage_layers: of a stage, which layers of the model it has, as text; empty for all. Part of the fingerprint: two
        stages of one shape have different bytes of a chunk.
    """

    block_size: int
    groups: tuple[LayerGroup, ...]
    num_shards: int = 1
    num_local_devices: int = 1
    model: str = ""
    null_block: int | None = None
    num_ranks: int = 1
    stages: tuple["KVLayout", ...] = ()
    stage_layers: str = ""

    def __post_init__(self) -> None:
        for name in ("block_size", "num_shards", "num_local_devices", "num_ranks"):
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        if self.null_block is not None:
            object.__setattr__(self, "null_block", _integer("null_block", self.null_block))
        for name in ("model", "stage_layers"):
            if type(getattr(self, name)) is not str:
                raise LayoutError(f"{name}={one_line(getattr(self, name))}; expected text")
        if self.block_size < 1:
            raise LayoutError(f"block_size must be at least 1, got {self.block_size}")
        if not self.groups:
            raise LayoutError("got no layer groups; expected at least one")
        if min(self.num_shards, self.num_local_devices, self.num_ranks) < 1:
            raise LayoutError(f"{self.num_shards=}, {self.num_local_devices=} and {self.num_ranks=} must be at least 1")
        for group in self.groups:
            if not isinstance(group, LayerGroup):
                raise LayoutError(f"groups={one_line(self.groups)}; expected a sequence of LayerGroup")
            if len(set(group.layer_ids)) != len(group.layer_ids):
                raise LayoutError(f"layers {list(group.layer_ids)} of a group; expected each layer once")
            if not group.page_groups or not all(pages.layer_ids for pages in group.page_groups):
                raise LayoutError("a layer group has no layers; expected at least one KV cache array")

    @classmethod
    def from_caches(
        cls,
        kv_caches: Sequence[Any],
        *,
        block_size: int,
        model: str = "",
        windows: Sequence[int] = (),
        groups: Sequence[tuple[int, Sequence[int]]] = (),
        states: Sequence[int] = (),
        null_block: int | None = None,
        stage_layers: str = "",
    ) -> "KVLayout":
        """Describes caches, one array per layer, or per layer of a group if the layer groups share them.

        Args:
          kv_caches: arrays or shape structs `[num_blocks, *page_shape]` with a sharding. Where it splits the
            block axis, each part is a data-parallel rank.
          block_size: tokens in a block.
          model: name or revision of the weights.
          windows: per layer, the number of tokens that a token attends to, 0 for all; empty if every layer has full
            attention. Layers with the same window form a layer group. In it, those with the same page shape and dtype
            form a page group.
          groups: in place of `windows`, per layer group its window and the positions of its arrays. Several groups may
            name the same arrays, see `LayerGroup`.
          states: positions of the arrays `[num_rows, ...]` that hold states in place of KV. They form the last layer
            group, and have no place in `groups`.
          null_block: see the class.
          stage_layers: see the class.
        Raises:
          LayoutError: no caches, groups that leave out an array, or different shardings or numbers of blocks within a
            group.
        """
        if isinstance(kv_caches, Mapping) or hasattr(kv_caches, "shape") or not isinstance(kv_caches, Iterable):
            raise LayoutError(f"KV caches are a {type(kv_caches).__name__}; expected a list with one array per layer")
        kv_caches, windows, given = list(kv_caches), _integers("windows", windows), _read_groups(groups)
        states = _integers("states", states)
        if not kv_caches:
            raise LayoutError("got no KV cache arrays; expected one per layer")
        for i, cache in enumerate(kv_caches):
            if not all(hasattr(cache, name) for name in ("shape", "dtype", "sharding")):
                raise LayoutError(f"KV cache {i} is a {type(cache).__name__}; expected a jax array or shape struct")
        layers_of = _layers_of_attention(len(kv_caches), windows, given, states)
        kinds = {False: LayerGroupKind.FULL_ATTENTION, True: LayerGroupKind.SLIDING_WINDOW}
        described = [
            _describe_group(kv_caches, layer_ids, kinds[window > 0], window=window) for window, layer_ids in layers_of
        ]
        if states:
            described.append(_describe_group(kv_caches, states, LayerGroupKind.STATE))
        sharded = {(num_ranks, num_shards, num_devices) for _, num_ranks, num_shards, num_devices in described}
        if len(sharded) != 1:
            found = ", ".join(
                f"{group.kind.value} into {ranks} ranks and {shards} shards on {devices} local devices"
                for group, ranks, shards, devices in described
            )
            raise LayoutError(
                f"layer groups are sharded differently: {found}; expected the same numbers for each: allocate "
                "the caches of all groups over one mesh, blocks split over the same axis and pages over as many devices"
            )
        _, num_ranks, num_shards, num_devices = described[0]
        layer_groups = tuple(group for group, *_ in described)
        return cls(
            block_size=block_size,
            groups=layer_groups,
            num_shards=num_shards,
            num_local_devices=num_devices,
            model=model,
            null_block=null_block,
            num_ranks=num_ranks,
            stage_layers=stage_layers,
        )

    @classmethod
    def of_stages(cls, stages: Sequence["KVLayout"]) -> "KVLayout":
        """Describes the caches of a model whose layers are divided among pipeline stages, each with its own worker.

        A block consists of the pages of all stages. Its bytes per device and per host are those of the stage with the
        most: a number of blocks for which that stage has room is one for which each has.

        Args:
          stages: the layout of each worker's caches, by worker id; each names its layers.
        Raises:
          LayoutError: no stages, stages with different block sizes or models, with the same layers, or with layers that
            do not all have full attention.
        """
        stages = tuple(stages)
        if not stages:
            raise LayoutError("got no pipeline stages; expected the layout of at least one")
        if len({(stage.block_size, stage.model) for stage in stages}) > 1:
            found = [(stage.block_size, stage.model) for stage in stages]
            raise LayoutError(f"pipeline stages with the block sizes and models {found}; expected one of each")
        names = [stage.stage_layers for stage in stages]
        if len(set(names)) < len(names):
            raise LayoutError(f"pipeline stages with {names} for stage_layers; expected the layers that each has")
        kinds = [group.kind for stage in stages for group in stage.groups]
        if kinds != [LayerGroupKind.FULL_ATTENTION] * len(stages):
            raise LayoutError(
                f"pipeline stages with the layer groups {', '.join(kind.value for kind in kinds)}; expected one with "
                "full attention in each: run this model without pipeline parallelism or without offloading"
            )
        pages, num_layers = [], 0
        for stage in stages:
            for of_stage in stage.groups[0].page_groups:
                layer_ids = tuple(num_layers + i for i in of_stage.layer_ids)
                pages.append(dataclasses.replace(of_stage, layer_ids=layer_ids))
            num_layers += len(stage.groups[0].layer_ids)
        group = LayerGroup(kind=LayerGroupKind.FULL_ATTENTION, page_groups=tuple(pages))
        return dataclasses.replace(stages[0], groups=(group,), stages=stages, stage_layers="")

    def check_tier(self) -> None:
        """Raises LayoutError unless the host tier supports this layout."""
        first, others = self.groups[0], self.groups[1:]
        for group in others:
            if group.kind is LayerGroupKind.SLIDING_WINDOW and group.window < 1:
                raise LayoutError(f"a layer group with a sliding window of {group.window} tokens; expected at least 1")
        windows = others[:-1] if self.state_group is not None else others
        arrays = {i for group in self.groups[: len(windows) + 1] for i in group.layer_ids}
        if (
            first.kind is not LayerGroupKind.FULL_ATTENTION
            or any(group.kind is not LayerGroupKind.SLIDING_WINDOW for group in windows)
            or any(group.page_groups != first.page_groups for group in windows)
            or (self.state_group is not None and arrays.intersection(self.state_group.layer_ids))
        ):
            kinds = ", ".join(group.kind.value for group in self.groups)
            raise LayoutError(
                f"the KV caches have the layer groups {kinds}; the host tier supports one with full attention, then "
                "groups with sliding windows that share its arrays, then one of states with its own: set "
                "TPU_OFFLOAD_HOST_GB=0 (request swap works without it)"
            )
        if others and self.null_block is None:
            raise LayoutError("windows or states need null_block: the id in block tables where there is no block")

    @property
    def first_with_arrays(self) -> tuple[int, ...]:
        """Per layer group, the first group with the same arrays: itself unless groups share them."""
        arrays = [group.layer_ids for group in self.groups]
        return tuple(map(arrays.index, arrays))

    @property
    def window_groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups with a sliding window, in their order."""
        return tuple(group for group in self.groups if group.kind is LayerGroupKind.SLIDING_WINDOW)

    @property
    def state_group(self) -> LayerGroup | None:
        """The layer group of states, which is the last one; None without states."""
        return self.groups[-1] if self.groups[-1].kind is LayerGroupKind.STATE else None

    def window_blocks(self, group: LayerGroup) -> int:
        """Blocks before a block boundary that the tokens after it still attend to."""
        return -(-(group.window - 1) // self.block_size)

    def group_nbytes_per_host(self, group: LayerGroup) -> int:
        """Bytes of host memory that one block of a group takes in this process, of each rank."""
        return group.block_nbytes // self.num_shards * self.num_local_devices

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all arrays, over all devices: of every group, unless groups share their arrays.

        States have rows, which are no part of a block.
        """
        of_attention = [group for group in self.groups if group.kind is not LayerGroupKind.STATE]
        return sum({group.layer_ids: group.block_nbytes for group in of_attention}.values())

    @property
    def block_nbytes_per_device(self) -> int:
        """Bytes of HBM that one block takes on each device."""
        if self.stages:
            return max(stage.block_nbytes_per_device for stage in self.stages)
        return self.block_nbytes // self.num_shards

    @property
    def block_nbytes_per_host(self) -> int:
        """Bytes of host memory that one block takes in this process, of each rank: one shard per local device."""
        if self.stages:
            return max(stage.block_nbytes_per_host for stage in self.stages)
        return self.block_nbytes_per_device * self.num_local_devices

    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever bytes saved under one layout cannot be used under the other.

        The sharding is not part of it, because the host tier belongs to one process. What leaves the process is also
        identified by its order and by the part that each device has (`kernels.SlotCopier.payload_format`).
        """
        groups = [
            (group.kind.value, group.window, [(p.layer_ids, p.page_shape, p.dtype) for p in group.page_groups])
            for group in self.groups
        ]
        stages = [stage.fingerprint().hex() for stage in self.stages]
        text = repr(("tpu_offload-layout-4", self.model, self.stage_layers, self.block_size, groups, *stages))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _layers_of_attention(
    num_caches: int,
    windows: Sequence[int],
    given: Sequence[tuple[int, tuple[int, ...]]],
    states: Sequence[int],
) -> Sequence[tuple[int, tuple[int, ...]]]:
    """Per layer group of attention its window and the positions of its arrays; see `KVLayout.from_caches`."""
    if windows and (len(windows) != num_caches or min(windows) < 0):
        raise LayoutError(
            f"windows={list(windows)} for {num_caches} KV caches; expected one per layer, in tokens, or 0"
        )
    of_attention = [i for i in range(num_caches) if i not in states]
    if len(set(states)) < len(states) or not set(states) <= set(range(num_caches)) or not of_attention:
        raise LayoutError(
            f"states={states} for {num_caches} KV caches; expected the positions of some of them, none twice"
        )
    if given and (windows or {i for _, ids in given for i in ids} != set(of_attention)):
        raise LayoutError(
            f"groups={given}, windows={windows} and states={states} for {num_caches} KV caches; expected each of them "
            "in a group or among the states, and no windows"
        )
    windows = windows or (0,) * num_caches
    return given or tuple(
        (window, tuple(i for i in of_attention if windows[i] == window))
        for window in sorted({windows[i] for i in of_attention})
    )


def _describe_group(
    kv_caches: Sequence[Any], layer_ids: tuple[int, ...], kind: LayerGroupKind, *, window: int = 0
) -> tuple[LayerGroup, int, int, int]:
    """A group, the number of ranks, of devices that a page of it is sharded over, and of devices of this process."""
    first = kv_caches[layer_ids[0]]
    is_state = kind is LayerGroupKind.STATE
    layers_of: dict[tuple[tuple[int, ...], str], list[int]] = {}
    sharding_of: dict[tuple[tuple[int, ...], str], Any] = {}
    for i in layer_ids:
        cache = kv_caches[i]
        if len(cache.shape) < 2:
            raise LayoutError(f"KV cache {i} has the shape {tuple(cache.shape)}; expected [num_blocks, *page_shape]")
        pages = tuple(cache.shape[1:]), np.dtype(cache.dtype).name
        # The arrays of a state are sharded over different axes.
        sharding = sharding_of.setdefault(pages, cache.sharding) if is_state else first.sharding
        if cache.shape[0] != first.shape[0] or cache.sharding != sharding:
            raise LayoutError(
                f"KV cache {i} has {cache.shape[0]} blocks and the sharding {cache.sharding}, cache {layer_ids[0]} "
                f"{first.shape[0]} and {sharding}; expected one number of blocks and one sharding in a layer group"
            )
        layers_of.setdefault(pages, []).append(i)
    shards = {_num_shards(kv_caches[ids[0]]) for ids in layers_of.values()}
    if len(shards) != 1:
        raise LayoutError(
            f"pages of the shapes {[list(shape) for shape, _ in layers_of]} are split over {sorted(shards)} devices; "
            "expected one number: shard all KV caches of a layer group over the same axes of the mesh"
        )
    made = [PageGroup(layer_ids=tuple(ids), page_shape=shape, dtype=name) for (shape, name), ids in layers_of.items()]
    group = LayerGroup(kind=kind, page_groups=tuple(made), window=window)
    num_ranks = first.shape[0] // first.sharding.shard_shape(first.shape)[0]
    return group, num_ranks, shards.pop(), len(first.sharding.addressable_devices)


def _read_groups(groups: Any) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The argument of `from_caches` as integers."""
    try:
        pairs = [(window, layer_ids) for window, layer_ids in groups]
    except Exception as e:  # a caller's object may raise anything
        raise LayoutError(f"groups={one_line(groups)}; expected pairs of a window and the positions of arrays") from e
    read = tuple((_integer("a window", window), _integers("layer_ids", layer_ids)) for window, layer_ids in pairs)
    if any(window < 0 or not layer_ids for window, layer_ids in read):
        raise LayoutError(f"groups={read}; expected windows in tokens, or 0, each with the positions of its arrays")
    return read


def _num_shards(cache: Any) -> int:
    shard_shape: tuple[int, ...] = cache.sharding.shard_shape(cache.shape)
    return int(math.prod(cache.shape[1:]) // math.prod(shard_shape[1:]))


def _integer(name: str, value: Any) -> int:
    number = as_integer(value)
    if number is None:
        raise LayoutError(f"{name}={one_line(value)}; expected an integer")
    return number


def _integers(name: str, values: Any) -> tuple[int, ...]:
    try:
        given = tuple(values)
    except Exception as e:  # a caller's object may raise anything
        raise LayoutError(f"{name}={one_line(values)}; expected a sequence of integers") from e
    return tuple(_integer(name, value) for value in given)
