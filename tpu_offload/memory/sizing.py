"""How much host memory the pool may take: what the machine has left, and what the cgroup leaves.

In a container `psutil` sees the whole machine. A pool sized by it is killed by the kernel as soon as it
is touched, so the limits of the process's cgroup and of every cgroup above it count as well.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_logger = logging.getLogger(__name__)

_GB = 2**30
# cgroup v1 says "no limit" with the largest page-aligned number; no machine has this much.
_NO_LIMIT = 2**60


def available_nbytes(
    *,
    ram_nbytes: int | None = None,
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    process_cgroups: Path = Path("/proc/self/cgroup"),
) -> int:
    """Bytes of host memory that can still be taken without swapping or being killed.

    Page cache that the kernel would drop first (`inactive_file`) counts as available.

    Args:
      ram_nbytes: what the machine has available; None asks psutil.
      cgroup_root: where the cgroup file systems are mounted.
      process_cgroups: the kernel's list of the cgroups that this process is in.
    """
    ram = psutil.virtual_memory().available if ram_nbytes is None else ram_nbytes
    return max(0, min([ram, *_cgroup_rooms(cgroup_root, process_cgroups)]))


def cap_chunks(wanted: int, *, chunk_nbytes: int, fraction: float, available: int) -> int:
    """Clamps the host tier to a share of the available memory, and warns when that makes it smaller.

    Args:
      wanted: chunks that the settings ask for.
      chunk_nbytes: bytes of host memory that one chunk takes in this process.
      fraction: share of `available` that may be taken.
      available: bytes, as from `available_nbytes`.
    Returns:
      A number of chunks between 0 and `wanted`.
    """
    fitting = int(available * fraction) // chunk_nbytes
    if fitting >= wanted:
        return wanted
    _logger.warning(
        "the host tier is cut from %d to %d chunks (%.2f to %.2f GB): TPU_OFFLOAD_HOST_MEMORY_FRACTION=%g of the "
        "%.2f GB that RAM and cgroup leave%s",
        wanted, fitting, wanted * chunk_nbytes / _GB, fitting * chunk_nbytes / _GB, fraction, available / _GB,
        "" if fitting else "; nothing is offloaded",
    )  # fmt: skip
    return fitting


def size_swap_pool(
    wanted_nbytes: int | None, *, groups: Sequence[tuple[int, int]], fraction: float, available: int
) -> tuple[int, ...]:
    """Cuts the swap pool into blocks: every layer group gets the same share of the blocks that it has in HBM.

    Args:
      wanted_nbytes: bytes of host memory in this process; None for twice as many as the KV cache has, because requests
        that were admitted in the place of swapped-out ones may have to go as well.
      groups: per layer group, its blocks in HBM and the bytes of host memory that one takes.
      fraction: share of `available` that may be taken; what is wanted beyond that is cut, with a warning.
      available: bytes that RAM, cgroup and host tier leave.
    Returns:
      Blocks per layer group; all 0, with a warning, if they come to less than one in any.
    """
    wanted = _swap_pool_nbytes(wanted_nbytes, groups)
    nbytes = min(wanted, int(available * fraction))
    if nbytes < wanted:
        _logger.warning(
            "the swap pool is cut from %.4g to %.4g GB: TPU_OFFLOAD_SWAP_SAFETY=%g of the %.4g GB that RAM, cgroup and "
            "host tier leave",
            wanted / _GB, nbytes / _GB, fraction, available / _GB,
        )  # fmt: skip
    num_blocks = _share_out(nbytes, groups)
    if min(num_blocks) == 0:
        _logger.warning(
            "the swap pool of %.6f GB holds less than a block of each layer group: preempted requests are recomputed",
            nbytes / _GB,
        )
        return (0,) * len(groups)
    return num_blocks


def wanted_swap_blocks(wanted_nbytes: int | None, *, groups: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Blocks of the swap pool per layer group if memory were no limit; the arguments are those of `size_swap_pool`."""
    return _share_out(_swap_pool_nbytes(wanted_nbytes, groups), groups)


def _swap_pool_nbytes(wanted_nbytes: int | None, groups: Sequence[tuple[int, int]]) -> int:
    return 2 * sum(num_blocks * nbytes for num_blocks, nbytes in groups) if wanted_nbytes is None else wanted_nbytes


def _share_out(nbytes: int, groups: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    hbm_nbytes = sum(num_blocks * block_nbytes for num_blocks, block_nbytes in groups)
    return tuple(nbytes * num_blocks // hbm_nbytes for num_blocks, _ in groups)


def _cgroup_rooms(root: Path, process_cgroups: Path) -> Iterator[int]:
    """Bytes left in each cgroup that limits this process."""
    for line in _read(process_cgroups).splitlines():
        # "0::/a/b" is version 2; "4:memory:/a/b" names a controller of version 1.
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            for mount in (root, root / "unified"):  # the second on hosts that mount both versions
                for directory in _upwards(mount, path):
                    yield from _room(directory, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for directory in _upwards(root / "memory", path):
                yield from _room(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The cgroup's directory and those above it. In a container the path may be the host's, and not exist."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _room(directory: Path, limit_name: str, usage_name: str, cache_name: str) -> Iterator[int]:
    limit = _read(directory / limit_name).strip()
    usage = _read(directory / usage_name).strip()
    if not (limit.isdigit() and usage.isdigit()) or int(limit) >= _NO_LIMIT:  # no such cgroup, or "max"
        return
    stat = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines() if " " in line)
    yield int(limit) - int(usage) + int(stat.get(cache_name, "0"))


def _read(path: Path) -> str:
    """The text of a file of the kernel's, empty when there is none that we may read."""
    try:
        return path.read_text()
    except OSError:
        return ""
