"""The host: memory against the settings, limits of the process, huge pages and NUMA."""

import dataclasses
import resource
from pathlib import Path
from typing import Self, final

import psutil

from tpu_offload.config import OffloadConfig
from tpu_offload.doctor.findings import Findings, error, ok, warning
from tpu_offload.memory import available_nbytes

_GB = 2**30
_CAP_IPC_LOCK = 14  # see capabilities(7)
_MEMORY, _MEMLOCK, _PAGES, _NUMA = "host memory", "locked memory", "huge pages", "NUMA"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the checks read of the machine.

    Attributes:
      total_nbytes: its memory.
      available_nbytes: what this process can allocate, by RAM and cgroups.
      memlock_nbytes: how much it may lock; None for no limit.
      huge_pages: setting of transparent huge pages; empty if it is not known.
      num_nodes: NUMA nodes with memory.
    """

    total_nbytes: int
    available_nbytes: int
    memlock_nbytes: int | None
    huge_pages: str
    num_nodes: int

    @classmethod
    def read(cls, *, sysfs: Path = Path("/sys"), procfs: Path = Path("/proc")) -> Self:
        """Reads this machine's."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        is_unlimited = soft == resource.RLIM_INFINITY or _may_exceed_memlock(procfs / "self" / "status")
        try:
            text = (sysfs / "kernel/mm/transparent_hugepage/enabled").read_text()
        except OSError:
            text = ""
        nodes = list((sysfs / "devices/system/node").glob("node[0-9]*"))
        return cls(
            total_nbytes=psutil.virtual_memory().total,
            available_nbytes=available_nbytes(),
            memlock_nbytes=None if is_unlimited else soft,
            huge_pages=text.partition("[")[2].partition("]")[0],
            num_nodes=max(1, len(nodes)),
        )


def _may_exceed_memlock(status: Path) -> bool:
    """Whether the process has the capability IPC_LOCK, with which `ulimit -l` does not hold."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def has_tpu() -> bool:
    """Whether this machine has TPU chips, without using them."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def check_host(host: Host, config: OffloadConfig | None, *, on_tpu: bool, beside_engine: bool = False) -> Findings:
    """Compares the host with the settings; without valid settings only what does not depend on them.

    Args:
      host: the machine.
      config: the settings; None if they are invalid.
      on_tpu: whether it has TPU chips.
      beside_engine: whether an engine runs that may have taken its memory already.
    """
    if config is not None and config.enabled:
        yield from _check_memory(host, config, beside_engine=beside_engine)
    else:
        yield ok(_MEMORY, f"{host.available_nbytes / _GB:.1f} GB of {host.total_nbytes / _GB:.1f} can be allocated")
    wanted = int((config.host_gb or 0) * _GB) if config is not None else 0
    if host.memlock_nbytes is None:
        yield ok(_MEMLOCK, "no limit")
    elif on_tpu and host.memlock_nbytes < wanted:
        yield warning(
            _MEMLOCK,
            f"the process may lock {host.memlock_nbytes / _GB:.3g} GB and the host tier has {wanted / _GB:.1f}; pinned "
            "memory may fail to be allocated",
            "run with `ulimit -l unlimited`, in a container with `--ulimit memlock=-1` or the capability IPC_LOCK",
        )
    else:
        yield ok(_MEMLOCK, f"{host.memlock_nbytes / _GB:.3g} GB, which only matters on a TPU")
    if host.huge_pages == "never" and on_tpu:
        yield warning(
            _PAGES,
            "transparent huge pages are off, which makes large copies slower",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    else:
        yield ok(_PAGES, f"transparent huge pages: {host.huge_pages or 'not known'}")
    if host.num_nodes > 1:
        yield ok(_NUMA, f"{host.num_nodes} nodes; let the engine use all of them: each has some of the chips")
    else:
        yield ok(_NUMA, "one node")


def _check_memory(host: Host, config: OffloadConfig, *, beside_engine: bool) -> Findings:
    limit = host.available_nbytes * config.host_memory_fraction
    figures = {"available_nbytes": host.available_nbytes, "total_nbytes": host.total_nbytes}
    if config.host_gb is None:
        yield warning(
            _MEMORY,
            "TPU_OFFLOAD_HOST_GB is not set: the host tier has its default size, which is small",
            f"set it to up to {limit / _GB:.0f}",
            **figures,
        )
        return
    wanted = config.host_gb * _GB
    available = f"{host.available_nbytes / _GB:.1f} GB can be allocated (RAM, cgroup)"
    said = f"TPU_OFFLOAD_HOST_GB={config.host_gb:g} and {available}"
    if wanted > host.total_nbytes:
        yield error(
            _MEMORY, f"{said} of {host.total_nbytes / _GB:.1f}", f"set it to at most {limit / _GB:.1f}", **figures
        )
    elif wanted > limit and not beside_engine:
        yield warning(
            _MEMORY,
            f"{said}, of which {config.host_memory_fraction:g} is used: the host tier is cut to {limit / _GB:.1f} GB",
            f"free memory, or set it to at most {limit / _GB:.1f}",
            **figures,
        )
    else:
        yield ok(_MEMORY, said, **figures)
