"""The devices: what jax finds, how fast host memory is allocated, and every copy path, bit for bit."""

import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_offload.config import CopyPath, OffloadConfig
from tpu_offload.doctor.findings import Finding, Findings, error, ok, warning
from tpu_offload.errors import InputError, OffloadError
from tpu_offload.measure import Geometry, check_backend
from tpu_offload.measure.worker_copies import CopyRates, WorkerCopies, measure_copy_rates
from tpu_offload.types import Direction
from tpu_offload.values import one_line

_GB = 2**30
_PATHS = (CopyPath.DIRECT, CopyPath.STAGED)  # those that vLLM's step supports
_DTYPES = ("bfloat16", "float8_e4m3fn")
_NUM_BLOCKS = 8
_POOL_NBYTES = 512 << 20
_SLOW_ALLOCATION_S = 600.0


def find_devices() -> tuple[list[Any], list[Finding]]:
    """The devices of this process, and what there is to say about them."""
    try:
        check_backend()
    except Exception as e:  # jax raises what it likes where a platform is missing
        return [], [
            error(
                "devices",
                str(e) if isinstance(e, InputError) else f"jax finds no device: {type(e).__name__}: {one_line(str(e))}",
                "see that no other process has the TPU, and that libtpu (jax[tpu]) and the machine's devices are there",
            )
        ]
    devices = jax.local_devices()
    first = devices[0]
    limit = (_memory_of(first) or {}).get("bytes_limit")
    memory = f", {limit / _GB:.2f} GB of memory each" if limit else ""
    said = f"{len(devices)} x {first.device_kind} ({first.platform}){memory}"
    if first.platform != "tpu":
        return devices, [
            warning("devices", f"{said}: no TPU", "run it on the machine that will serve, before the engine starts")
        ]
    return devices, [ok("devices", said, num_devices=len(devices), hbm_nbytes=limit)]


def check_copies(devices: list[Any]) -> Findings:
    """Saves and loads random blocks by every path and compares them with what they were."""
    for dtype in _DTYPES:
        for path in _PATHS:
            check = f"{path.value} copies, {dtype}"
            try:
                yield _check_path(check, path, _geometry(devices, dtype))
            except (OffloadError, RuntimeError, ValueError) as e:  # a compiler's error is a RuntimeError
                yield error(
                    check,
                    f"it fails: {type(e).__name__}: {one_line(str(e).partition(chr(10))[0])}",
                    f"do not use it: set TPU_OFFLOAD_SAVE_PATH and _LOAD_PATH to another than {path.value}",
                )


def check_allocation(devices: list[Any], config: OffloadConfig | None) -> Findings:
    """How fast pinned host memory is allocated, and how fast copies are, with the settings' copy paths."""
    geometry = _geometry(devices, "bfloat16", num_layers=16)
    num_chunks = max(2, _POOL_NBYTES // geometry.block_nbytes)
    settings = OffloadConfig.create(num_cpu_chunks=num_chunks, save_path="direct", load_path="direct")
    try:
        start_s = time.perf_counter()
        copies = WorkerCopies(settings, geometry.make_caches(2))
        seconds = time.perf_counter() - start_s
        nbytes = copies.num_host_blocks * geometry.block_nbytes
        copies.worker.close()
        rates = measure_copy_rates(_measurable(config), geometry, num_rounds=5)
    except (OffloadError, RuntimeError) as e:
        yield error("pinned memory", f"it cannot be allocated: {one_line(str(e))}", "see host memory and locked memory")
        return
    yield _allocation(nbytes / seconds, config)
    yield _rates(rates)


def _allocation(nbytes_per_s: float, config: OffloadConfig | None) -> Finding:
    wanted = (config.host_gb or 0) * _GB if config is not None else 0
    said = f"allocated and written once at {nbytes_per_s / _GB:.2f} GB/s"
    figures = {"nbytes_per_s": nbytes_per_s}
    if wanted / nbytes_per_s > _SLOW_ALLOCATION_S:
        return warning(
            "pinned memory",
            f"{said}: the host tier is complete after {wanted / nbytes_per_s / 60:.0f} minutes",
            "until then it is smaller (vllm:tpu_offload_host_chunks); nothing waits for it",
            **figures,
        )
    return ok("pinned memory", said, **figures)


def _rates(rates: CopyRates) -> Finding:
    said = f"save {rates.save_gb_per_s:.2f} and load {rates.load_gb_per_s:.2f} GB/s, jobs of {rates.num_blocks} blocks"
    figures = {"save_gb_per_s": rates.save_gb_per_s, "load_gb_per_s": rates.load_gb_per_s}
    return ok("copy speed", f"{said}; tpu-offload bench measures more", **figures)


def _measurable(config: OffloadConfig | None) -> OffloadConfig:
    """The settings' copy paths, or direct ones where they say `auto` or `fused`."""
    paths = dict.fromkeys(Direction, CopyPath.DIRECT)
    if config is not None:
        paths |= {d: path for d in Direction if (path := config.path_for(d)) in _PATHS}
    return OffloadConfig.create(save_path=paths[Direction.SAVE].value, load_path=paths[Direction.LOAD].value)


def _geometry(devices: list[Any], dtype: str, *, num_layers: int = 3) -> Geometry:
    heads = 2 * len(devices)
    return Geometry(num_layers, (16, heads, 2, 128), dtype=dtype, num_devices=len(devices))


def _check_path(check: str, path: CopyPath, geometry: Geometry) -> Finding:
    config = OffloadConfig.create(
        num_cpu_chunks=_NUM_BLOCKS, num_staging_blocks=_NUM_BLOCKS, save_path=path.value, load_path=path.value
    )
    order = random.Random(0)
    saved = order.sample(range(_NUM_BLOCKS), _NUM_BLOCKS)
    loaded = order.sample(range(_NUM_BLOCKS, 2 * _NUM_BLOCKS), _NUM_BLOCKS)
    caches = _random_caches(geometry, 2 * _NUM_BLOCKS)
    before = [_bytes_of(cache) for cache in caches]
    copies = WorkerCopies(config, caches)
    try:
        caches = copies.finish(copies.dispatch(copies.plan(Direction.SAVE, saved), caches))
        caches = copies.finish(copies.dispatch(copies.plan(Direction.LOAD, loaded), caches))
        hbm_nbytes = copies.worker.hbm_nbytes
    finally:
        copies.worker.close()
    wrong = sum(
        not np.array_equal(_bytes_of(cache)[target], old[source])
        for cache, old in zip(caches, before, strict=True)
        for source, target in zip(saved, loaded, strict=True)
    ) + sum(
        not np.array_equal(_bytes_of(cache)[block], old[block])
        for cache, old in zip(caches, before, strict=True)
        for block in saved
    )
    if wrong:
        return error(
            check,
            f"{wrong} of {2 * len(caches) * _NUM_BLOCKS} pages have other bytes than before",
            f"do not use it, and send us this report: set the copy paths to another than {path.value}",
        )
    return ok(check, f"bit for bit, within {hbm_nbytes / 2**20:.1f} MiB of device memory", hbm_nbytes=hbm_nbytes)


def _random_caches(geometry: Geometry, num_blocks: int) -> list[Any]:
    """Caches of random bits, NaNs included."""
    dtype = jnp.dtype(geometry.dtype)
    random_bits, caches = np.random.default_rng(0), []
    for cache in geometry.make_caches(num_blocks):
        raw = random_bits.integers(0, 256, size=(*cache.shape, dtype.itemsize), dtype=np.uint8)
        caches.append(jax.device_put(raw.view(dtype)[..., 0], cache.sharding))
    return caches


def _bytes_of(cache: Any) -> Any:
    """Per block, its bytes."""
    return np.ascontiguousarray(np.asarray(cache)).view(np.uint8).reshape(cache.shape[0], -1)


def _memory_of(device: Any) -> dict[str, int] | None:
    try:
        found: dict[str, int] | None = device.memory_stats()
    except (RuntimeError, NotImplementedError):
        return None
    return found
