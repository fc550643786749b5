"""What a check of `tpu-offload doctor` says: one line each, of three levels."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any, final


class Level(enum.Enum):
    """How serious a finding is."""

    OK = "ok"
    WARNING = "warning"  # it works, but worse than it could, or not for sure
    ERROR = "error"  # it will not work, or not as set


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
      check: what was checked: a few words, the same in every run.
      level: how serious it is.
      text: what was found.
      action: what to do about it; empty if nothing is to be done.
      figures: the numbers behind it, for JSON.
    """

    check: str
    level: Level
    text: str
    action: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Findings = Iterator[Finding]


def ok(check: str, text: str, **figures: Any) -> Finding:
    """A finding that is fine."""
    return Finding(check=check, level=Level.OK, text=text, figures=figures)


def warning(check: str, text: str, action: str, **figures: Any) -> Finding:
    """A finding to think about."""
    return Finding(check=check, level=Level.WARNING, text=text, action=action, figures=figures)


def error(check: str, text: str, action: str, **figures: Any) -> Finding:
    """A finding to fix first."""
    return Finding(check=check, level=Level.ERROR, text=text, action=action, figures=figures)
