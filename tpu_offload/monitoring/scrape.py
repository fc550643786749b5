"""One reading of an engine's metrics endpoint, as numbers by field: what `tpu-offload top` shows.

The endpoint is vLLM's, or that of any engine that registers a `StatsCollector`. Counts of several engines behind one
endpoint (the label `engine`) are summed.
"""

import dataclasses
import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Self, final

from prometheus_client.parser import text_string_to_metric_families

from tpu_offload.errors import InputError
from tpu_offload.metrics import METRICS, PREFIX, TIER_METRICS
from tpu_offload.monitoring.expressions import VLLM_SERIES

_MAX_NBYTES = 64 << 20
_MAX_REASON = 200
_VLLM = "vllm."


def _fields() -> Mapping[str, str]:
    """By series without the prefix of vLLM, the field."""
    fields = {PREFIX + spec.series: field for field, spec in METRICS.items()}
    return fields | {series.removeprefix("vllm:"): _VLLM + name for name, series in VLLM_SERIES.items()}


_FIELDS = _fields()
_TIER_FIELDS = {PREFIX + spec.series: field for field, spec in TIER_METRICS.items()}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """The numbers at one moment.

    Attributes:
      at_s: when, monotonic seconds.
      values: by field of `OffloadStats`, and by `vllm.NAME` of `VLLM_SERIES`; of the latter those without histograms.
      tiers: by storage tier, its numbers by field of `TierStats`.
    """

    at_s: float
    values: Mapping[str, float]
    tiers: Mapping[str, Mapping[str, float]]

    @classmethod
    def read(cls, url: str, *, timeout_s: float = 5.0) -> Self:
        """Reads an endpoint.

        Raises:
          InputError: it does not answer in time, or what it answers are no metrics of this library.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            is_address = url.isascii() and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # not within its range either, or brackets that do not match
            is_address = False
        if not is_address:
            raise InputError(f"{url!r} is no address; expected one like http://127.0.0.1:8000/metrics")
        try:
            with urllib.request.urlopen(url, timeout=timeout_s) as answer:
                content = _read_all(answer, until_s=time.monotonic() + timeout_s)
        except urllib.error.HTTPError as e:
            raise InputError(f"{url} answers with status {e.code} ({e.reason})") from e
        except (OSError, ValueError, http.client.HTTPException) as e:  # a URLError is an OSError
            reason = " ".join(str(getattr(e, "reason", e)).split())[:_MAX_REASON]
            raise InputError(f"{url} does not answer: {reason or type(e).__name__}") from e
        return cls.parse(content.decode(errors="replace"), url=url)

    @classmethod
    def parse(cls, text: str, *, url: str = "the endpoint") -> Self:
        """Reads the text of an endpoint.

        Raises:
          InputError: as in `read`.
        """
        values: dict[str, float] = defaultdict(float)
        tiers: dict[str, dict[str, float]] = {}
        try:
            for name, labels, value in _samples(text):
                if (field := _FIELDS.get(name)) is not None:
                    values[field] += value
                elif (field := _TIER_FIELDS.get(name)) is not None and "tier" in labels:
                    tier = tiers.setdefault(labels["tier"], defaultdict(float))
                    tier[field] += value
        except ValueError as e:
            raise InputError(f"{url} answers with something else than metrics; expected the path /metrics") from e
        if not any(field in METRICS for field in values):
            raise InputError(
                f"{url} has no series tpu_offload_*: the engine runs without this connector, has not served a request "
                "yet, or reports elsewhere"
            )
        return cls(at_s=time.monotonic(), values=dict(values), tiers=tiers)


def _read_all(answer: http.client.HTTPResponse, *, until_s: float) -> bytes:
    """The whole of an answer, which may come in small pieces: a timeout of a socket is for each of them."""
    parts: list[bytes] = []
    while part := answer.read1(1 << 16):
        parts.append(part)
        if time.monotonic() > until_s or sum(map(len, parts)) > _MAX_NBYTES:
            raise TimeoutError("the answer takes too long")
    if answer.length:
        raise ConnectionError("the answer ends early")
    return b"".join(parts)


def _samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Per sample its series without vLLM's prefix, its labels and its value."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:").removeprefix("vllm_")
            yield name, sample.labels, sample.value
