"""How much host memory may be used: the minimum of free RAM and what the cgroups leave.

In a container `psutil` sees the whole machine, and a pool sized by it gets the process OOM-killed. So the limits of the
process's cgroup and of all its ancestors count as well.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_logger = logging.getLogger(__name__)

_GB = 2**30
# cgroup v1 reports "no limit" as the largest page-aligned number; no machine has this much.
_NO_LIMIT = 2**60


def available_nbytes(
    *,
    ram_nbytes: int | None = None,
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    process_cgroups: Path = Path("/proc/self/cgroup"),
) -> int:
    """Bytes of host memory that can be allocated without swapping or being OOM-killed.

    Reclaimable page cache (`inactive_file`) counts as available.

    Args:
      ram_nbytes: available RAM of the machine; None asks psutil.
      cgroup_root: where the cgroup file systems are mounted.
      process_cgroups: the kernel's list of this process's cgroups.
    """
    ram = psutil.virtual_memory().available if ram_nbytes is None else ram_nbytes
    return max(0, min([ram, *_cgroup_headrooms(cgroup_root, process_cgroups)]))


def cap_chunks(wanted: int, *, chunk_nbytes: int, fraction: float, available: int, what: str = "chunks") -> int:
    """Clamps the host tier to a fraction of the available memory, with a warning if that makes it smaller.

    Args:
      wanted: configured chunks.
      chunk_nbytes: bytes of host memory that one chunk takes in this process.
      fraction: fraction of `available` that may be used.
      available: bytes, as from `available_nbytes`.
      what: names the chunks, in the warning.
    Returns:
      A number of chunks between 0 and `wanted`.
    """
    fitting = int(available * fraction) // chunk_nbytes
    if fitting >= wanted:
        return wanted
    _logger.warning(
        "the host tier is cut from %d to %d %s (%.2f to %.2f GB): TPU_OFFLOAD_HOST_MEMORY_FRACTION=%g of the "
        "%.2f GB that are available (RAM, cgroup)%s",
        wanted, fitting, what, wanted * chunk_nbytes / _GB, fitting * chunk_nbytes / _GB, fraction, available / _GB,
        "" if fitting else "; nothing is offloaded",
    )  # fmt: skip
    return fitting


def size_swap_pool(
    wanted_nbytes: int | None, *, groups: Sequence[tuple[int, int]], fraction: float, available: int
) -> tuple[int, ...]:
    """Divides the swap pool among the layer groups, in proportion to their blocks in HBM.

    Args:
      wanted_nbytes: bytes of host memory in this process; None for twice the size of the KV cache, because requests
        admitted in place of swapped-out ones may be swapped out as well.
      groups: per layer group, its blocks in HBM and the bytes of host memory per block.
      fraction: fraction of `available` that may be used; a larger pool is cut, with a warning.
      available: bytes that RAM, cgroup and host tier leave.
    Returns:
      Blocks per layer group; all 0, with a warning, if any group would get less than one.
    """
    wanted = _swap_pool_nbytes(wanted_nbytes, groups)
    nbytes = min(wanted, int(available * fraction))
    if nbytes < wanted:
        _logger.warning(
            "the swap pool is cut from %.4g to %.4g GB: TPU_OFFLOAD_SWAP_SAFETY=%g of the %.4g GB that are available "
            "(RAM, cgroup, after the host tier)",
            wanted / _GB, nbytes / _GB, fraction, available / _GB,
        )  # fmt: skip
    num_blocks = _share_out(nbytes, groups)
    if min(num_blocks) == 0:
        _logger.warning(
            "the swap pool of %.6f GB holds less than one block per layer group: preempted requests are recomputed",
            nbytes / _GB,
        )
        return (0,) * len(groups)
    return num_blocks


def wanted_swap_blocks(wanted_nbytes: int | None, *, groups: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Blocks of the swap pool per layer group if memory were unlimited; arguments as for `size_swap_pool`."""
    return _share_out(_swap_pool_nbytes(wanted_nbytes, groups), groups)


def _swap_pool_nbytes(wanted_nbytes: int | None, groups: Sequence[tuple[int, int]]) -> int:
    return 2 * sum(num_blocks * nbytes for num_blocks, nbytes in groups) if wanted_nbytes is None else wanted_nbytes


def _share_out(nbytes: int, groups: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    hbm_nbytes = sum(num_blocks * block_nbytes for num_blocks, block_nbytes in groups)
    return tuple(nbytes * num_blocks // hbm_nbytes for num_blocks, _ in groups)


def _cgroup_headrooms(root: Path, process_cgroups: Path) -> Iterator[int]:
    """Bytes left in each cgroup that limits this process."""
    for line in _read(process_cgroups).splitlines():
        # "0::/a/b" is version 2; "4:memory:/a/b" names a controller of version 1.
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            for mount in (root, root / "unified"):  # the second on hosts that mount both versions
                for directory in _with_ancestors(mount, path):
                    yield from _headroom(directory, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for directory in _with_ancestors(root / "memory", path):
                yield from _headroom(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _with_ancestors(mount: Path, path: str) -> Iterator[Path]:
    """The cgroup's directory and its ancestors. In a container the path may be the host's, and not exist."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _headroom(directory: Path, limit_name: str, usage_name: str, cache_name: str) -> Iterator[int]:
    limit = _read(directory / limit_name).strip()
    usage = _read(directory / usage_name).strip()
    if not (limit.isdigit() and usage.isdigit()) or int(limit) >= _NO_LIMIT:  # no such cgroup, or "max"
        return
    stat = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines() if " " in line)
    yield int(limit) - int(usage) + int(stat.get(cache_name, "0"))


def _read(path: Path) -> str:
    """The text of a kernel file; empty if it does not exist or is not readable."""
    try:
        return os.fsdecode(path.read_bytes())  # a cgroup's name may be no text
    except OSError:
        return ""
