"""Hit rate against size, drawn."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_offload.cli.command import require
from tpu_offload.errors import InputError
from tpu_offload.sim import BOUND

_SUFFIXES = (".png", ".svg", ".pdf")


def check_plottable(path: Path) -> None:
    """Finds out before the work whether `draw` can make such a file.

    Raises:
      InputError: it cannot.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"cannot draw into {path}: its name ends with none of {', '.join(_SUFFIXES)}")
    require("--plot", "matplotlib")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as e:
        raise InputError(f"--plot needs matplotlib, which cannot be imported: {e}") from e


def draw(report: Mapping[str, Any], suffix: str) -> bytes:
    """The picture of a simulation.

    Args:
      report: as it is written to a file.
      suffix: of the file's name; says which format it has.
    """
    # Not above: half a second, and only for those who draw.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    rows = [row for row in report["results"] if row["prefix_hit_rate"] is not None]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = sorted((row for row in rows if row["policy"] == policy), key=lambda row: float(row["size_share"]))
        label = policy
        style: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": 1.2}
        if policy == BOUND:
            label, style = f"{policy} (the bound)", {"color": "black", "linestyle": "--", "linewidth": 1.2}
        elif mine[0]["default"]:
            label, style = f"{policy} (default)", {"marker": "o", "markersize": 4.5, "linewidth": 2.8}
        axes.plot(
            [100 * row["size_share"] for row in mine], [row["prefix_hit_rate"] for row in mine], label=label, **style
        )
    axes.set_xscale("log")
    axes.set_xticks(sorted({100 * row["size_share"] for row in rows}))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set_xlabel("host tier, share of the unique blocks")
    axes.set_ylabel("prefix hit rate of the host tier")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(_title(report), fontsize=10)
    content = io.BytesIO()
    # The same results give the same file.
    metadata = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix.lower()]
    with rc_context({"svg.hashsalt": "tpu_offload"}):
        figure.savefig(content, format=suffix[1:].lower(), dpi=150, metadata=metadata)
    return content.getvalue()


def _title(report: Mapping[str, Any]) -> str:
    names = ", ".join(Path(path).name for path in report["traces"])
    title = f"{names}: {report['num_requests']} requests, {report['num_unique_blocks']} unique blocks"
    if report["num_hbm_blocks"]:
        title += f"\nHBM of {report['num_hbm_blocks']} blocks in front, saved on {report['save_on']}"
    return title + ("\nsecond part only" if report["counts_second_part_only"] else "")
