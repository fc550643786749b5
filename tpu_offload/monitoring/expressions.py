"""PromQL that names metrics by their declaration.

A template is PromQL in which braces name a metric by the field that declares it, so that a renamed or removed metric
is an error when the files are generated, not an empty panel:

    {saved_nbytes}              vllm:tpu_offload_saved_bytes_total           a field of `OffloadStats`
    {tier.promoted_chunks}      vllm:tpu_offload_tier_promoted_chunks_total  a field of `TierStats`; label `tier`
    {load_duration.bucket}      vllm:tpu_offload_load_duration_seconds_bucket
    {vllm.prefix_cache_hits}    vllm:prefix_cache_hits_total                 one of vLLM's own, listed in `VLLM_SERIES`
"""

import dataclasses
import difflib
import string
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

from tpu_offload.errors import ConfigError
from tpu_offload.metrics import HISTOGRAMS, METRICS, TIER_METRICS, VLLM_PREFIX

VLLM_SERIES: Mapping[str, str] = MappingProxyType(
    {
        "prompt_tokens": "vllm:prompt_tokens_total",
        "prompt_tokens_cached": "vllm:prompt_tokens_cached_total",
        "prompt_tokens_by_source": "vllm:prompt_tokens_by_source_total",
        "prefix_cache_queries": "vllm:prefix_cache_queries_total",
        "prefix_cache_hits": "vllm:prefix_cache_hits_total",
        "external_prefix_cache_queries": "vllm:external_prefix_cache_queries_total",
        "external_prefix_cache_hits": "vllm:external_prefix_cache_hits_total",
        "kv_cache_usage": "vllm:kv_cache_usage_perc",
        "preemptions": "vllm:num_preemptions_total",
        "time_to_first_token_bucket": "vllm:time_to_first_token_seconds_bucket",
    }
)
"""Series of vLLM 0.32 itself; tests/adapters compares them with a real engine's endpoint."""

_HISTOGRAM_PARTS = ("bucket", "sum", "count")


def _names() -> Mapping[str, str]:
    names = {field: VLLM_PREFIX + spec.series for field, spec in METRICS.items()}
    names |= {f"tier.{field}": VLLM_PREFIX + spec.series for field, spec in TIER_METRICS.items()}
    for name, spec in HISTOGRAMS.items():
        names |= {f"{name}.{part}": f"{VLLM_PREFIX}{spec.family}_{part}" for part in _HISTOGRAM_PARTS}
    return MappingProxyType(names | {f"vllm.{name}": series for name, series in VLLM_SERIES.items()})


NAMES = _names()
"""The series in a scrape of vLLM, by the name that templates have for them."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """Rendered PromQL.

    Attributes:
      text: the PromQL.
      names: keys of `NAMES` that it uses, each once, in their order in the text.
    """

    text: str
    names: tuple[str, ...]

    @property
    def series(self) -> tuple[str, ...]:
        """The series that it reads."""
        return tuple(NAMES[name] for name in self.names)


@final
class _Renderer(string.Formatter):
    def __init__(self, selector: str) -> None:
        self._selector = selector
        self.used: dict[str, None] = {}

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if field_name not in NAMES:
            near = difflib.get_close_matches(field_name, NAMES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"no metric is declared as {field_name!r}{hint}")
        self.used[field_name] = None
        return NAMES[field_name] + self._selector, field_name


def render(template: str, *, selector: str = "") -> Expression:
    """The PromQL of a template; see the module.

    Args:
      template: PromQL with names in braces.
      selector: label matchers for every series, in braces; empty for none.
    Raises:
      ConfigError: it names what is not declared, or nothing.
    """
    renderer = _Renderer(selector)
    text = renderer.format(template)
    if not renderer.used:
        raise ConfigError(f"the expression {template!r} names no metric; write its field in braces")
    return Expression(text, tuple(renderer.used))


def used_names(expressions: Iterable[Expression]) -> frozenset[str]:
    """Keys of `NAMES` that any of them uses."""
    return frozenset(name for expression in expressions for name in expression.names)
