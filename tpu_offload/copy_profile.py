"""Copy profiles: the ranking of copy paths on one machine, measured and written by `tpu-offload bench`.

With `TPU_OFFLOAD_SAVE_PATH=auto` or `_LOAD_PATH=auto` the path is read from this JSON file. Only these of its keys are
used:

    {
      "format": "tpu_offload.profile", "version": 1,
      "device_kind": "TPU v6 lite",
      "entries": [{"num_layers": 32, "page_nbytes": 65536, "save": ["direct", "staged"], "load": ["staged", "direct"]}]
    }

An entry is for one cache geometry: the number of layers, and the bytes of a page on each device. It lists the measured
paths, fastest first; an engine that does not offer the first takes the next.

A profile of another device kind is an error: its ranking says nothing about this device. For another geometry the
nearest entry is used, with a warning if it is more than a factor of two away. A wrong choice costs time, never
correctness: all paths copy the same bytes.
"""

import json
import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import Literal, Self

import pydantic
from pydantic import Field

from tpu_offload.config import CopyPath
from tpu_offload.errors import ConfigError
from tpu_offload.types import Direction

_logger = logging.getLogger(__name__)

FORMAT = "tpu_offload.profile"
VERSION = 1
_RUN_BENCH = "write a new one with `tpu-offload bench --output FILE`"
_MAX_NBYTES = 1 << 24  # a device file has no end
_MAX_DISTANCE = 2.0  # a geometry that differs by a larger factor is warned about

_MeasuredPath = Literal["direct", "staged", "fused"]


class ProfileEntry(pydantic.BaseModel):
    """The ranking for one cache geometry.

    Attributes:
      num_layers: layers of the caches.
      page_nbytes: bytes of one page on one device.
      save: paths for saves, fastest first.
      load: paths for loads, fastest first.
    """

    model_config = pydantic.ConfigDict(frozen=True)

    num_layers: int = Field(ge=1)
    page_nbytes: int = Field(ge=1)
    save: tuple[_MeasuredPath, ...] = Field(min_length=1)
    load: tuple[_MeasuredPath, ...] = Field(min_length=1)

    def ranking(self, direction: Direction) -> list[CopyPath]:
        """Paths for one direction, fastest first."""
        return [CopyPath(name) for name in (self.save if direction is Direction.SAVE else self.load)]

    def distance(self, *, num_layers: int, page_nbytes: int) -> float:
        """The factor, at least 1, by which that geometry is larger or smaller, in bytes of a page or of a block."""
        page = math.log(page_nbytes / self.page_nbytes)
        block = page + math.log(num_layers / self.num_layers)
        return math.exp(max(abs(page), abs(block)))


class CopyProfile(pydantic.BaseModel):
    """The part of a profile that is used; unknown keys are ignored.

    Attributes:
      format: identifies the file format.
      version: of the format.
      device_kind: `device_kind` of the jax devices that were measured.
      entries: one per geometry.
    """

    model_config = pydantic.ConfigDict(frozen=True)

    format: Literal["tpu_offload.profile"]
    version: Literal[1]
    device_kind: str
    entries: tuple[ProfileEntry, ...] = Field(min_length=1)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a profile.

        Raises:
          ConfigError: the file cannot be read or is not a profile.
        """
        name = f"TPU_OFFLOAD_COPY_PROFILE={path}"
        try:
            with path.open("rb") as file:
                return cls.model_validate(json.loads(file.read(_MAX_NBYTES)))
        except OSError as e:
            raise ConfigError(f"{name} cannot be read: {e.strerror or e}; {_RUN_BENCH}") from e
        except pydantic.ValidationError as e:
            detail = e.errors(include_url=False)[0]
            where = ".".join(map(str, detail["loc"])) or "the file"
            message = detail["msg"].replace("Input should be", "expected")
            raise ConfigError(f"{name} is not a profile: {where}: {message}; {_RUN_BENCH}") from None
        except (ValueError, RecursionError) as e:  # bad JSON and bad UTF-8 are ValueErrors
            reason = f"{e.msg} in line {e.lineno}" if isinstance(e, json.JSONDecodeError) else type(e).__name__
            raise ConfigError(f"{name} is not JSON ({reason}); {_RUN_BENCH}") from None

    def check_device(self, device_kind: str) -> None:
        """Checks that the profile was measured on devices of this kind.

        Raises:
          ConfigError: it was not.
        """
        if device_kind != self.device_kind:
            raise ConfigError(
                f"TPU_OFFLOAD_COPY_PROFILE was measured on {self.device_kind!r} and the KV caches are on "
                f"{device_kind!r}; {_RUN_BENCH} on this machine, or set TPU_OFFLOAD_SAVE_PATH and "
                "TPU_OFFLOAD_LOAD_PATH to direct or staged"
            )

    def choose(
        self,
        direction: Direction,
        *,
        device_kind: str,
        num_layers: int,
        page_nbytes: int,
        offered: Collection[CopyPath],
    ) -> CopyPath:
        """The fastest of the offered paths for these caches.

        Args:
          direction: save or load.
          device_kind: kind of the devices that hold the caches.
          num_layers: layers of the caches.
          page_nbytes: bytes of one page on one device.
          offered: the paths that the engine supports.
        Raises:
          ConfigError: the profile is of another device kind, or ranks none of the offered paths.
        """
        self.check_device(device_kind)
        distances = [entry.distance(num_layers=num_layers, page_nbytes=page_nbytes) for entry in self.entries]
        distance, nearest = min(zip(distances, self.entries, strict=True), key=lambda pair: pair[0])
        if distance > _MAX_DISTANCE:
            _logger.warning(
                "the nearest entry of TPU_OFFLOAD_COPY_PROFILE has %d layers with pages of %d bytes per device, the KV "
                "caches have %d with %d; TPU_OFFLOAD_%s_PATH=auto may not choose the fastest path: %s with the "
                "caches' geometry",
                nearest.num_layers,
                nearest.page_nbytes,
                num_layers,
                page_nbytes,
                direction.name,
                _RUN_BENCH,
            )
        ranking = nearest.ranking(direction)
        path = next((path for path in ranking if path in offered), None)
        if path is None:
            raise ConfigError(
                f"TPU_OFFLOAD_COPY_PROFILE ranks only {', '.join(p.value for p in ranking)} for {direction.value}s, "
                f"which this engine does not offer; set TPU_OFFLOAD_{direction.name}_PATH to "
                f"{' or '.join(p.value for p in offered)}, or {_RUN_BENCH}"
            )
        return path
