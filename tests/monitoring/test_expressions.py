"""Templates name metrics by their declaration, and what is not declared is an error."""

import pytest

from tpu_offload import ConfigError
from tpu_offload.metrics import HISTOGRAMS, METRICS, TIER_METRICS
from tpu_offload.monitoring import ALERTS, ROWS, render
from tpu_offload.monitoring.expressions import NAMES, VLLM_SERIES, used_names


def test_names_become_series_with_the_selector():
    found = render("sum(rate({saved_nbytes}[5m])) / {tier.promoted_chunks}", selector='{a="b"}')
    assert found.text == (
        'sum(rate(vllm:tpu_offload_saved_bytes_total{a="b"}[5m])) / vllm:tpu_offload_tier_promoted_chunks_total{a="b"}'
    )
    assert found.names == ("saved_nbytes", "tier.promoted_chunks")
    assert found.series == ("vllm:tpu_offload_saved_bytes_total", "vllm:tpu_offload_tier_promoted_chunks_total")
    assert render("{load_duration.bucket}").text == "vllm:tpu_offload_load_duration_seconds_bucket"
    assert render("{vllm.prefix_cache_hits}").text == "vllm:prefix_cache_hits_total"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("rate({saved_bytes}[5m])", "no metric is declared as 'saved_bytes'; did you mean saved_nbytes?"),
        ("{tier.saved_nbytes}", "no metric is declared as 'tier.saved_nbytes'"),
        ("{load_duration}", "no metric is declared as 'load_duration'; did you mean load_duration"),
        ("{vllm.hits}", "no metric is declared as 'vllm.hits'"),
        ("{0}", "no metric is declared as '0'"),
        ("up == 0", "the expression 'up == 0' names no metric; write its field in braces"),
    ],
)
def test_what_is_not_declared_is_an_error(template, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        render(template)


def test_every_metric_is_in_the_dashboard():
    """A new metric needs a panel, so that someone can see it."""
    used = used_names(query.expression for row in ROWS for panel in row.panels for query in panel.queries)
    wanted = {*METRICS} | {f"tier.{name}" for name in TIER_METRICS} | {f"vllm.{name}" for name in VLLM_SERIES}
    wanted |= {f"{name}.{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert wanted == set(NAMES)
    # Only the alert on a silent connector needs the totals; the panel shows them by source.
    assert wanted - used == {"vllm.prompt_tokens", "vllm.prompt_tokens_cached"}
    assert {"vllm.prompt_tokens", "vllm.prompt_tokens_cached"} <= used_names(alert.expression for alert in ALERTS)


def test_series_are_named_once():
    assert len(set(NAMES.values())) == len(NAMES)
