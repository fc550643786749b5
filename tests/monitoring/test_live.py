"""A real Prometheus scrapes a real run: every expression of dashboard and alerts has data."""

import time

import pytest

from tests.monitoring.live_engine import LiveEngine, endpoint
from tests.monitoring.prometheus import SCRAPE, as_grafana_asks, configure, is_finite, promtool, running
from tests.ports import free_port
from tpu_offload.metrics import HISTOGRAMS, SWAP_FIELDS
from tpu_offload.monitoring import ALERTS, ROWS
from tpu_offload.monitoring.expressions import NAMES

_END_S = 90.0
_QUERIES = [query for row in ROWS for panel in row.panels for query in panel.queries]


def is_only_in_vllm(name):
    return name.startswith("vllm.") or name.partition(".")[0] in HISTOGRAMS


def test_the_example_is_valid():
    assert "SUCCESS" in promtool("check", "config", str(SCRAPE))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The engine, which has served once; Prometheus with the example's configuration; and both jobs' instances."""
    folder = tmp_path_factory.mktemp("live")
    live = LiveEngine(folder / "kv")
    live.serve_round()
    with endpoint(live.vllm_registry) as vllm, endpoint(live.own_registry) as own:
        instances = {"vllm": vllm, "tpu_offload_engine": own}
        with running(configure(folder, instances), folder, free_port()) as prometheus:
            yield live, prometheus, instances
    live.engine.close()


def wait_for(live, what_is_missing):
    """Serves until nothing is missing."""
    end_s = time.monotonic() + _END_S
    while missing := what_is_missing():
        assert time.monotonic() < end_s, missing
        live.serve_round()


def wanted(instances):
    """PromQL of every query of the dashboard for each engine that can answer it."""
    for query in _QUERIES:
        names = query.expression.names
        for job, instance in instances.items():
            if any(is_only_in_vllm(name) if job != "vllm" else name in SWAP_FIELDS for name in names):
                continue
            yield as_grafana_asks(query, instance, window="1m")


def test_every_expression_of_the_dashboard_has_data(run):
    live, prometheus, instances = run
    missing = set(wanted(instances))
    assert len(missing) > len(_QUERIES)

    def still():
        missing.difference_update([text for text in missing if is_finite(prometheus.query(text))])
        return missing

    wait_for(live, still)


def test_engines_of_vllm_have_no_request_swap(run):
    """Why the row of request swap is empty there: its series are absent."""
    _, prometheus, _ = run
    for name in SWAP_FIELDS:
        found = {labels["job"] for labels, _ in prometheus.query(NAMES[name])}
        assert found == {"tpu_offload_engine"}, name


def test_every_series_of_the_alerts_is_there_and_none_fires(run):
    live, prometheus, _ = run
    names = {name for alert in ALERTS for name in alert.expression.names}
    for name in names:
        job = "tpu_offload_engine" if name in SWAP_FIELDS else "vllm"
        assert prometheus.query(f'{NAMES[name]}{{job="{job}"}}'), name

    def not_evaluated():
        found = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        assert [rule["name"] for rule in found] == [alert.name for alert in ALERTS]
        assert not any(rule.get("lastError") for rule in found)
        return [rule["name"] for rule in found if rule["health"] != "ok"]

    wait_for(live, not_evaluated)
    assert prometheus.query('ALERTS{alertstate="firing"}') == []


def test_a_copy_that_really_fails_alerts(run):
    """The only fault that this run has; `test_alerts` has the others."""
    live, prometheus, _ = run
    live.fail_next_save()

    def not_fired():
        return expected - {labels["alertname"] for labels, _ in prometheus.query('ALERTS{alertstate="firing"}')}

    expected = {"TpuOffloadCopiesFail"}
    wait_for(live, not_fired)
    fired = {labels["alertname"] for labels, _ in prometheus.query('ALERTS{alertstate="firing"}')}
    assert fired == expected
    assert live.engine.offload_stats().num_failed_jobs > 0
