"""All settings, in one frozen object; long, because each setting has its type, limits and description in one place.

A size may be set in tokens, blocks, chunks or GB; it is converted to blocks and chunks here, by the layout's bytes per
block. 1 GB is 2**30 bytes, as in tpu-inference.
"""

import decimal
import difflib
import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import pydantic
from pydantic import Field

from tpu_offload.config.choices import (
    DEFAULT_EVICTION_POLICY,
    CopyPath,
    EvictionPolicyName,
    LoadMode,
    SaveEvent,
    StorageAdmission,
    StorageCopyPath,
    StorageEvictionPolicy,
    StorageWriteEvent,
    SwapMode,
)
from tpu_offload.config.environment import env_name, one_line_error, read_settings
from tpu_offload.config.segments import HostSegments
from tpu_offload.config.storage_tiers import (
    STORAGE_SIZES,
    StorageTierConfig,
    make_storage_tiers,
    records_per_state,
    split_per_tier,
)
from tpu_offload.errors import ConfigError
from tpu_offload.layout import KVLayout
from tpu_offload.types import Direction, Pool

_logger = logging.getLogger(__name__)

DEFAULT_STAGING_BUFFER_TOKENS = 8192
DEFAULT_NUM_CPU_CHUNKS = 1024
DEFAULT_BREAKER_FAILURES = 5
_GB = 2**30
_MAX_AUTO_SWAP_BLOCKS = 2**22

# Fields that set the same size in different units; at most one of each tuple may be set.
_STAGING_SIZES = ("staging_buffer_tokens", "num_staging_blocks", "staging_buffer_gb")
_HOST_SIZES = ("num_cpu_chunks", "host_gb")
_OF_STORAGE_TIERS = (
    "storage_options",
    *STORAGE_SIZES,
    "storage_write_on",
    "storage_admission",
    "storage_eviction_policy",
    "max_storage_gb_in_flight",
)


# The description of each field is its row in the README table; a test compares them.
class OffloadConfig(pydantic.BaseModel):
    """Every setting of the library. Field `x` is set by the environment variable `TPU_OFFLOAD_X`.

    Raises:
      ConfigError: from `from_env` and `create`, for an invalid value.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    staging_buffer_tokens: int | None = Field(
        None,
        ge=0,
        le=2**40,
        description="Size of the HBM staging buffer in tokens, rounded down to blocks. It limits staged copies in "
        "flight; direct copies do not use it. 0 turns offloading off.",
    )
    num_staging_blocks: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Size of the staging buffer in blocks; 0 turns offloading off."
    )
    staging_buffer_gb: float | None = Field(
        None,
        ge=0,
        le=2**20,
        allow_inf_nan=False,
        description="Size of the staging buffer in GB of HBM per device; 0 turns offloading off.",
    )
    num_cpu_chunks: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="Size of the host tier in chunks; with states, which share it, in the memory of that many chunks. "
        "0 turns offloading off. The default is small: set `TPU_OFFLOAD_HOST_GB` instead.",
    )
    host_gb: float | None = Field(
        None,
        ge=0,
        le=2**20,
        allow_inf_nan=False,
        description="Size of the host tier in GB of memory on each host; 0 turns offloading off. Several times the KV "
        "cache in HBM is a good start.",
    )
    state_share: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Part of the host tier that holds states at first, for a model with linear attention (Qwen3.5, "
        "Qwen3-Next); the KV of its other layers has the rest. From then on memory moves to where it is needed.",
    )
    host_memory_fraction: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Upper limit of the host tier, as a share of the memory available at start (RAM and cgroup "
        "limit). A larger tier is cut to it, with a warning.",
    )
    host_segment_gb: float = Field(
        1.0,
        gt=0,
        le=2**20,
        allow_inf_nan=False,
        description="Size of the segments in which host memory is allocated, in the background. Lower it if a host "
        "has less memory than one segment.",
    )
    eviction_policy: EvictionPolicyName | str = Field(
        DEFAULT_EVICTION_POLICY,
        description="Which chunks a full host tier evicts. `module:Class` is your own policy, imported from that "
        "module.",
    )
    blocks_per_chunk: int = Field(
        1,
        ge=1,
        le=4096,
        description="Blocks in a chunk, the unit of lookup and eviction. Larger chunks need a smaller index, but miss "
        "up to a chunk at the end of each prefix.",
    )
    save_path: CopyPath = Field(
        CopyPath.DIRECT,
        description="How saves copy blocks. `fused` needs engine support (not vLLM); `auto` takes the fastest path in "
        "`TPU_OFFLOAD_COPY_PROFILE`.",
    )
    load_path: CopyPath = Field(CopyPath.DIRECT, description="How loads copy blocks; values as for saves.")
    copy_profile: Path | None = Field(
        None, description="Profile for `auto` paths: the file that `tpu-offload bench` wrote on this kind of machine."
    )
    load_mode: LoadMode | None = Field(
        None,
        description="`auto` loads KV from the host tier and from storage unless computing it is faster, by times "
        "measured on this engine, and loads while these are not known (always in vLLM with data-parallel ranks or "
        "pipeline stages); `load` and `recompute` force one. By default `auto` with storage tiers and `load` without: "
        "storage can be slower than computing, host memory hardly ever is.",
    )
    max_load_gb_per_step: float = Field(
        1.0,
        ge=0,
        le=2**20,
        allow_inf_nan=False,
        description="Most GB per device that direct and fused loads copy before one step. Running requests wait that "
        "long; larger loads are spread over several steps. 0 sets no limit.",
    )
    load_wait_s: float = Field(
        5.0,
        ge=0,
        le=1e9,
        allow_inf_nan=False,
        description="How long a staged load waits for room in the staging buffer before its request is prefilled "
        "instead; 0 never waits.",
    )
    decode_save: bool = Field(
        False,
        description="Also save blocks with generated tokens. Turn it on for chats: the next prompt contains them.",
    )
    save_on: tuple[SaveEvent, ...] = Field(
        (SaveEvent.COMPUTE,),
        description="When blocks are saved, comma-separated: when computed (write-through), when HBM evicts them, "
        "when their request is preempted. vLLM supports `compute` only.",
    )
    save_after_sightings: int = Field(
        1,
        ge=1,
        le=15,
        description="Save a block only after this many requests have contained it; 1 saves every block. 2 keeps "
        "one-off prompts out of a small host tier.",
    )
    max_save_tokens: int = Field(
        0, ge=0, le=2**40, description="Most leading tokens of each request that are saved; 0 sets no limit."
    )
    max_load_tokens: int = Field(
        0, ge=0, le=2**40, description="Most tokens that are loaded for each request; 0 sets no limit."
    )
    skip_jax_precompile: bool = Field(
        False, description="Compile copy programs on first use instead of at start. The first copies are slow then."
    )
    block_size_buckets: tuple[Annotated[int, Field(ge=1, le=2**31 - 1)], ...] = Field(
        (),
        description="Sizes that staged copies and fused steps are compiled for; comma-separated, ascending, starting "
        "at 1. By default powers of two for staged copies, and 8 chunks for fused steps.",
    )
    sync_load: bool | None = Field(
        None,
        description="vLLM only. 1: a request's load runs in front of its first step. 0: the request waits for its "
        "load while other requests run. By default 1 for direct loads and 0 for staged ones.",
    )
    patch_runner: bool = Field(
        True,
        description="vLLM only. With async scheduling, tpu-inference 0.32 loses a token of preempted requests. 1 "
        "restores it, and works around its other defects (docs/upstream); 0 does not, and nothing of such a request is "
        "saved from that token on. Pipeline stages need 1.",
    )
    save_wait_s: float = Field(
        0.5,
        ge=0,
        le=1e9,
        allow_inf_nan=False,
        description="How long a request whose next blocks are being saved waits for them before it computes them "
        "again; 0 never waits.",
    )
    swap_gb: float | Literal["auto"] = Field(
        0.0,
        description="Size of the swap pool for preempted requests in GB of host memory; `auto` is twice the KV cache; "
        "0 turns request swap off. Not for vLLM, which recomputes preempted requests.",
    )
    swap_safety: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Upper limit of the swap pool, as a share of the memory that is available after the host tier. A "
        "larger pool is cut to it, with a warning.",
    )
    swap_mode: SwapMode = Field(
        SwapMode.AUTO,
        description="`auto` swaps a preempted request if that is faster than recompute, by measured rates; `swap` and "
        "`recompute` force one.",
    )
    storage_tier: tuple[str, ...] = Field(
        (),
        description="Storage tiers below the host tier, nearest first: `file`, `object`, `valkey`, or `module:Class` "
        "of your own, separated by `;`. Settings of tiers that are lists have one value a tier, separated likewise.",
    )
    storage_options: tuple[str, ...] = Field(
        (), description="Options of each storage tier; of `file`, `DIR[,min_free_gb=GB][,direct=off]`."
    )
    num_storage_chunks: tuple[Annotated[int, Field(ge=1, le=2**31 - 1)], ...] = Field(
        (),
        description="Size of each storage tier in records per data-parallel rank. A chunk is one record, a state one "
        "or more. A tier needs this or `TPU_OFFLOAD_STORAGE_GB`.",
    )
    storage_gb: tuple[Annotated[float, Field(gt=0, le=2**30, allow_inf_nan=False)], ...] = Field(
        (),
        description="Size of each storage tier in GB of each worker, all of its data-parallel ranks together, record "
        "headers and padding included; instead of chunks.",
    )
    storage_write_on: tuple[StorageWriteEvent, ...] = Field(
        (StorageWriteEvent.SAVE,),
        description="When chunks are written to a storage tier: `save`, once they are in the host tier, or "
        "`eviction`, when the host tier evicts them. `eviction` writes less; what is still in host memory at a restart "
        "is not in storage. A single value applies to each tier.",
    )
    storage_admission: tuple[StorageAdmission, ...] = Field(
        (StorageAdmission.ALL,),
        description="Which chunks a storage tier takes: `all`, those that two requests contained "
        "(`second_sighting`), or those that a request loaded from the host tier (`after_hit`). Most chunks are never "
        "used again. A single value applies to each tier.",
    )
    storage_eviction_policy: tuple[StorageEvictionPolicy, ...] = Field(
        (StorageEvictionPolicy.AUTO,),
        description="Which chunks a full storage tier evicts. `auto` is `density` where the tier holds five times as "
        "many as the host tier and nearer tiers together, or twice as many if it is written on `eviction`; in a "
        "smaller one it is the better of `density` and `lru`, and `lru` if it holds fewer than these. Tiers of a model "
        "with windows or states, and those that other engines share, are `lru` whatever this says. A single value "
        "applies to each tier.",
    )
    storage_copy_path: StorageCopyPath = Field(
        StorageCopyPath.AUTO,
        description="How chunks are copied between the host tier and the buffers of storage: `host` by the host's CPU, "
        "`hbm` through HBM, one or two blocks of it. `auto` tries both at the start and takes the faster one; on CPU, "
        "and with `TPU_OFFLOAD_SKIP_JAX_PRECOMPILE`, it is `host`.",
    )
    storage_wait_s: float = Field(
        0.5,
        ge=0,
        le=1e9,
        allow_inf_nan=False,
        description="How long a request whose next blocks are being read from any storage tier waits for them "
        "before it computes them; 0 never waits. With `TPU_OFFLOAD_LOAD_MODE=auto` and measured times it waits up "
        "to twice the estimate of the read if that is longer, but not much longer than computing them would take.",
    )
    storage_lookup_wait_s: float = Field(
        0.25,
        ge=0,
        le=1e9,
        allow_inf_nan=False,
        description="How long a request waits for a shared storage tier to tell which of its next blocks other engines "
        "have stored; with `TPU_OFFLOAD_LOAD_MODE=auto` never longer than computing them takes, where that is "
        "measured. 0 never asks: then only what this engine has written itself is found.",
    )
    max_storage_gb_in_flight: tuple[Annotated[float, Field(gt=0, le=2**20, allow_inf_nan=False)], ...] = Field(
        (1.0,),
        description="Limit in GB of host memory for chunks on their way to and from a storage tier, beside the host "
        "tier; at least one chunk, or state, each way. A chunk that is being copied into the host tier briefly takes "
        "twice its size. A single value applies to each tier.",
    )
    job_timeout_s: float = Field(
        60.0,
        gt=0,
        le=1e9,
        allow_inf_nan=False,
        description="A copy that not every worker has reported after this long counts as failed; a load in portions "
        "has this long for each portion.",
    )
    breaker_failures: int = Field(
        DEFAULT_BREAKER_FAILURES,
        ge=0,
        le=2**31 - 1,
        description="Circuit breaker: after this many failed or late copies in a row, copies of that kind (saves, "
        "loads, swaps out, swaps in, cascades, promotions, deletions, lookups) are suspended; 0 never suspends them, "
        f"except deletions, which are repeated until they succeed: after {DEFAULT_BREAKER_FAILURES}.",
    )
    breaker_retry_s: float = Field(
        5.0,
        gt=0,
        le=1e9,
        allow_inf_nan=False,
        description="How long suspended copies wait before one is retried; doubles with each failed retry, up to 64 "
        "times. Also the first backoff of a chunk whose copies failed twice.",
    )
    metrics_log_interval: float = Field(
        10.0, ge=0, le=1e9, allow_inf_nan=False, description="Seconds between log lines with metrics; 0 logs none."
    )
    batched_save: bool | None = Field(None, description="Accepted and ignored: the saves of a step are always batched.")
    save_threads: int | None = Field(None, ge=1, description="Accepted and ignored: copies use no threads.")
    use_unpinned_host: bool | None = Field(
        None,
        description="Accepted and ignored: host memory is always pinned; unpinned memory corrupted bfloat16 on TPU.",
    )

    @pydantic.field_validator("block_size_buckets", "save_on", mode="before")
    @classmethod
    def _split_list(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @pydantic.field_validator(
        "storage_tier",
        *_OF_STORAGE_TIERS,
        mode="before",
    )
    @classmethod
    def _split_tiers(cls, value: Any) -> Any:
        return split_per_tier(value)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """JSON has true where a switch is meant; it is no number."""
        wanted = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and wanted is not bool and bool not in get_args(wanted):
            raise ValueError("expected a number or text, not true or false")
        return value

    @pydantic.field_validator("save_on")
    @classmethod
    def _check_save_on(cls, value: tuple[SaveEvent, ...]) -> tuple[SaveEvent, ...]:
        if not value or len(set(value)) < len(value):
            raise ValueError("expected one or more of compute, eviction and preemption, without duplicates")
        return value

    @pydantic.field_validator("eviction_policy", mode="plain")
    @classmethod
    def _parse_policy(cls, value: Any) -> EvictionPolicyName | str:
        """Built-in names become enum members. A `module:Class` is imported on use (`core.policies.find_policy`)."""
        if isinstance(value, EvictionPolicyName):
            return value
        names = [name.value for name in EvictionPolicyName]
        if value in names:
            return EvictionPolicyName(value)
        if isinstance(value, str) and ":" in value:
            module, _, class_name = value.partition(":")
            if all(part.isidentifier() for part in (*module.split("."), class_name)):
                return value
            raise ValueError("expected module:Class, like my_package.policies:MyPolicy")
        near = difflib.get_close_matches(str(value).lower(), names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        *first, last = map(repr, names)
        raise ValueError(f"expected {', '.join(first)} or {last}, or module:Class of your own policy{hint}")

    @pydantic.field_validator("swap_gb", mode="plain")
    @classmethod
    def _parse_swap_gb(cls, value: Any) -> float | Literal["auto"]:
        if value == "auto":
            return "auto"
        try:
            size = float(value)
        except (TypeError, ValueError, OverflowError):
            size = -1.0
        if isinstance(value, bool) or not 0 <= size <= 2**20:
            raise ValueError(f"expected auto, or GB from 0 to {2**20}")
        return size

    @pydantic.field_validator("copy_profile")
    @classmethod
    def _check_copy_profile(cls, value: Path | None) -> Path | None:
        if value == Path() or (value is not None and "\0" in str(value)):  # an empty string; a null character in JSON
            raise ValueError("expected the path of a file")
        return value

    @pydantic.model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        for names in (_STAGING_SIZES, _HOST_SIZES):
            given = [f"{env_name(n)}={getattr(self, n)}" for n in names if getattr(self, n) is not None]
            if len(given) > 1:
                raise ConfigError(f"{' and '.join(given)} set the same size; set only one of them")
        if self.copy_profile is None and CopyPath.AUTO in (self.save_path, self.load_path):
            field = "save_path" if self.save_path is CopyPath.AUTO else "load_path"
            raise ConfigError(
                f"{env_name(field)}=auto needs a profile of this machine; run `tpu-offload bench` and set "
                f"{env_name('copy_profile')} to its output file, or choose direct or staged"
            )
        self._make_storage_tiers()
        buckets = self.block_size_buckets
        if buckets and (buckets[0] != 1 or list(buckets) != sorted(set(buckets))):
            raise ConfigError(
                f"{env_name('block_size_buckets')}={','.join(map(str, buckets))}: expected ascending sizes that "
                "start with 1, such as 1,2,4,8,16"
            )
        return self

    @classmethod
    def create(cls, **settings: Any) -> "OffloadConfig":
        """Like the constructor, but raises one-line `ConfigError`s instead of pydantic's errors."""
        try:
            return cls(**settings)
        except pydantic.ValidationError as e:
            raise ConfigError(one_line_error(e, known=cls.model_fields, name=str)) from None

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, overrides: Mapping[str, Any] | None = None
    ) -> "OffloadConfig":
        """Reads `TPU_OFFLOAD_*` from `environ`, by default the process environment.

        Args:
          environ: names and values.
          overrides: settings by field name (`host_gb` for `TPU_OFFLOAD_HOST_GB`); they take precedence. A size set
            here replaces one that `environ` sets in another unit.
        Raises:
          ConfigError: an unknown variable or setting (with the nearest known name), or a value that does not
            parse, is out of range or contradicts another.
        """
        settings = read_settings(
            environ, overrides, known=list(cls.model_fields), same_size=(_STAGING_SIZES, _HOST_SIZES, STORAGE_SIZES)
        )

        def name_of(field: str) -> str:
            return field if field in (overrides or {}) else env_name(field)

        try:
            config = cls.model_validate(settings)
        except pydantic.ValidationError as e:
            raise ConfigError(one_line_error(e, known=cls.model_fields, name=name_of)) from None
        config.warn_ignored()
        return config

    def warn_ignored(self) -> None:
        """Logs one warning for each setting that has no effect, by design or beside the other settings."""
        for field in ("batched_save", "save_threads", "use_unpinned_host"):
            if getattr(self, field) is not None:
                why = type(self).model_fields[field].description or ""
                _logger.warning("%s is set. %s", env_name(field), why)
        if self.copy_profile is not None and CopyPath.AUTO not in (self.save_path, self.load_path):
            _logger.warning(
                "%s is set but not used: neither %s nor %s is auto",
                *map(env_name, ("copy_profile", "save_path", "load_path")),
            )
        of_tiers = () if self.storage_tier else _OF_STORAGE_TIERS
        for field in of_tiers:
            if field in self.model_fields_set and getattr(self, field):
                _logger.warning("%s is set but not used: %s is empty", env_name(field), env_name("storage_tier"))

    def path_for(self, direction: Direction) -> CopyPath:
        """The copy path for one direction."""
        return self.save_path if direction is Direction.SAVE else self.load_path

    @property
    def enabled(self) -> bool:
        """False when a size of zero turned offloading off."""
        return all(getattr(self, name) != 0 for name in _STAGING_SIZES + _HOST_SIZES)

    @property
    def has_storage(self) -> bool:
        """Whether there is a storage tier below the host tier."""
        return self.enabled and bool(self.storage_tier)

    @property
    def effective_load_mode(self) -> LoadMode:
        """`load_mode`, or what it is by default."""
        return self.load_mode or (LoadMode.AUTO if self.has_storage else LoadMode.LOAD)

    @property
    def storage_tiers(self) -> tuple[StorageTierConfig, ...]:
        """The storage tiers, nearest first; none with offloading off."""
        return self._make_storage_tiers() if self.has_storage else ()

    def _make_storage_tiers(self) -> tuple[StorageTierConfig, ...]:
        return make_storage_tiers(
            names=self.storage_tier,
            options=self.storage_options,
            num_chunks=self.num_storage_chunks,
            sizes_gb=self.storage_gb,
            write_on=self.storage_write_on,
            admission=self.storage_admission,
            eviction_policy=self.storage_eviction_policy,
            max_gb_in_flight=self.max_storage_gb_in_flight,
        )

    @property
    def swap_enabled(self) -> bool:
        """Whether preempted requests may be swapped out."""
        return self.swap_gb != 0 and self.swap_mode is not SwapMode.RECOMPUTE

    def staging_blocks(self, layout: KVLayout) -> int:
        """The staging budget in blocks.

        Raises:
          ConfigError: it is smaller than one chunk, so nothing could ever be saved or loaded. If all copies are direct,
            which do not use the buffer, one block is enough.
        """
        name: str
        value: float
        per_block: float
        if self.num_staging_blocks is not None:
            name, value, per_block = "num_staging_blocks", self.num_staging_blocks, 1
        elif self.staging_buffer_gb is not None:
            name, value, per_block = "staging_buffer_gb", self.staging_buffer_gb, layout.block_nbytes_per_device / _GB
        else:
            given = self.staging_buffer_tokens
            name, value = "staging_buffer_tokens", DEFAULT_STAGING_BUFFER_TOKENS if given is None else given
            per_block = layout.block_size
        num_blocks = int(value / per_block)
        is_direct = {self.save_path, self.load_path} == {CopyPath.DIRECT}
        least = 1 if is_direct else self.blocks_per_chunk
        if num_blocks < least and self.enabled:
            raise ConfigError(
                f"{env_name(name)}={value} is {num_blocks} blocks (block_size={layout.block_size} tokens, "
                f"{layout.block_nbytes_per_device} bytes per device); expected at least one "
                f"{'block' if is_direct else f'chunk of {least} block(s)'}: set it to at least "
                f"{_round_up(per_block * least)}, or to 0 to turn offloading off"
            )
        return num_blocks

    def max_load_blocks(self, layout: KVLayout) -> int:
        """Most blocks that direct and fused loads copy before one step, at least one; 0 for no limit."""
        if self.max_load_gb_per_step == 0:
            return 0
        return max(1, int(self.max_load_gb_per_step * _GB / layout.block_nbytes_per_device))

    def storage_chunks(self, layout: KVLayout) -> tuple[int, ...]:
        """Most records in each storage tier: a chunk takes one, a state `records_per_state`.

        Raises:
          ConfigError: a tier is smaller than one chunk.
        """
        size = self.blocks_per_chunk
        return tuple(tier.size_in_chunks(layout, blocks_per_chunk=size) for tier in self.storage_tiers)

    def records_per_state(self, layout: KVLayout) -> int:
        """Records that a state takes in storage, each as long as that of a chunk; 0 for a layout without states."""
        return records_per_state(layout, blocks_per_chunk=self.blocks_per_chunk)

    def max_swap_blocks(self, layout: KVLayout) -> int:
        """Upper bound on the swap pool's blocks of one layer group; a worker that reports more is rejected."""
        if self.swap_gb == "auto":
            return _MAX_AUTO_SWAP_BLOCKS
        least = min(layout.group_nbytes_per_host(group) for group in layout.groups)
        return int(self.swap_gb * _GB) // least

    def host_chunks(self, layout: KVLayout) -> int:
        """The most chunks that the host tier can have, before it is capped by the available memory.

        With states that is all of it but one segment, see `host_segments`.

        Raises:
          ConfigError: it is smaller than one chunk, or with states than two segments.
        """
        return self.host_slots(layout)[Pool.CHUNKS]

    def host_states(self, layout: KVLayout) -> int:
        """Likewise, the most rows of states; 0 for a layout without them."""
        return sum(self.host_slots(layout)[Pool.STATES :])

    def num_pools(self, layout: KVLayout) -> int:
        """Pools of the host tier, see `Pool`."""
        return len(Pool) if self.enabled and layout.state_group is not None else 1

    def host_slots(self, layout: KVLayout) -> tuple[int, ...]:
        """By pool, the most slots that it can have, before the host tier is capped by the available memory.

        Raises:
          ConfigError: the host tier is smaller than one chunk, or with states than two segments.
        """
        segments = self.host_segments(layout) if self.num_pools(layout) > 1 else None
        if segments is not None:
            return segments.max_slots
        chunk_nbytes = layout.block_nbytes_per_host * self.blocks_per_chunk
        num_chunks = self._host_nbytes(layout) // chunk_nbytes
        if num_chunks < 1 and self.enabled:
            raise self._too_small("one chunk", chunk_nbytes)
        return (num_chunks,)

    def first_slots(self, layout: KVLayout) -> tuple[int, ...]:
        """By pool, the number of its first slot: those of all pools before it are smaller."""
        return tuple(itertools.accumulate(self.host_slots(layout)[:-1], initial=0))

    def host_segments(self, layout: KVLayout) -> HostSegments | None:
        """The segments of the host tier that move between chunks and states; None for a layout without states.

        Raises:
          ConfigError: there are fewer than two: one for chunks and one for states.
        """
        if layout.state_group is None:
            return None
        segments = HostSegments.plan(
            self._host_nbytes(layout),
            slot_nbytes=(
                layout.block_nbytes_per_host * self.blocks_per_chunk,
                layout.group_nbytes_per_host(layout.state_group),
            ),
            segment_nbytes=int(self.host_segment_gb * _GB),
        )
        if segments.num_segments < 2 and self.enabled:
            raise self._too_small("two segments, one for states and one for chunks,", 2 * segments.segment_nbytes)
        return segments

    def _host_nbytes(self, layout: KVLayout) -> int:
        """The configured size of the host tier."""
        if self.host_gb is not None:
            return int(self.host_gb * _GB)
        num_chunks = DEFAULT_NUM_CPU_CHUNKS if self.num_cpu_chunks is None else self.num_cpu_chunks
        return num_chunks * layout.block_nbytes_per_host * self.blocks_per_chunk

    def _too_small(self, what: str, nbytes: int) -> ConfigError:
        """The error of a host tier that is smaller than `nbytes`."""
        given, changed = f"{env_name('host_gb')}={self.host_gb}", "set it"
        if self.host_gb is None:
            given = f"{env_name('num_cpu_chunks')}={self.num_cpu_chunks or DEFAULT_NUM_CPU_CHUNKS}"
            changed = f"{'set' if self.num_cpu_chunks is None else 'unset it and set'} {env_name('host_gb')}"
        return ConfigError(
            f"{given} is less than {what} of {nbytes} bytes; {changed} to at least "
            f"{_round_up(nbytes / _GB)}, or to 0 to turn offloading off"
        )


def _round_up(size: float) -> str:
    """A size in at most six digits, rounded up: rounded to nearest it could be slightly too small."""
    return f"{decimal.Context(prec=6, rounding=decimal.ROUND_UP).create_decimal_from_float(size).normalize():f}"
