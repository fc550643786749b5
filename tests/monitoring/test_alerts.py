"""Each alert fires on its fault and ends after it, and none fires without; Prometheus' own rule tester decides."""

import re

import pytest
import yaml

from tests.monitoring.faults import (
    FAULTS,
    MINUTES,
    NO_FAULTS,
    START,
    check_kinds,
    gauge_during,
    labels,
    once,
    series,
)
from tests.monitoring.prometheus import ROOT, promtool
from tpu_offload.monitoring import ALERTS, Severity
from tpu_offload.monitoring.files import RULES
from tpu_offload.monitoring.rules import rules

_FIRED = 'count by (instance, alertname, tier) (count_over_time(ALERTS{alertstate="firing"}[1d]))'
_FIRING = 'ALERTS{alertstate="firing"}'
CASES = (*FAULTS, *NO_FAULTS)


def rule_test():
    """All cases at once, each an engine of its own: exactly its alerts fire at some time, and none does at the end."""
    inputs, fired, end = [], [], f"{MINUTES - 1}m"
    for case in CASES:
        found = series(case.changed, instance=case.title, storage=case.storage)
        inputs += [{"series": name, "values": values} for name, values in found.items()]
        for name, tier in case.fires:
            label = f', tier="{tier}"' if tier else ""
            fired.append({"labels": f'{{alertname="{name}", instance="{case.title}"{label}}}', "value": 1})
    return {
        "interval": "1m",
        "input_series": inputs,
        "promql_expr_test": [
            {"expr": _FIRED, "eval_time": end, "exp_samples": fired},
            {"expr": _FIRING, "eval_time": end, "exp_samples": []},
        ],
    }


def run_rule_tests(folder, test, rules_file=ROOT / RULES):
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(rules_file)], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", str(path))


def test_the_rules_are_valid():
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(ROOT / RULES))


def test_each_alert_fires_on_its_fault_and_ends_and_none_fires_without(tmp_path):
    assert {name for case in FAULTS for name, _ in case.fires} == {alert.name for alert in ALERTS}
    assert not any(case.fires for case in NO_FAULTS)
    run_rule_tests(tmp_path, rule_test())


def test_counters_of_the_cases_only_grow():
    assert check_kinds() == []


def wrong_alerts(folder, change):
    """Where the cases above see a difference when each rule has been changed: alert and engine."""
    text = rules()
    for rule in text["groups"][0]["rules"]:
        change(rule)
    path = folder / "wrong.yml"
    path.write_text(yaml.safe_dump(text))
    with pytest.raises(AssertionError) as failed:
        run_rule_tests(folder, rule_test(), path)
    expected, got = (
        set(re.findall(r'alertname="(\w+)", instance="([^"]*)"', part)) for part in _halves(str(failed.value))
    )
    return expected ^ got


def _halves(output):
    """The expected and the found samples of the first expression, which promtool prints in two lines."""
    return re.search(r"exp: *(.*)\n *got: *(.*)", output).groups()


def test_alerts_that_never_fire_are_found(tmp_path):
    """The test above can fail, for each alert."""
    found = wrong_alerts(tmp_path, lambda rule: rule.update(expr="vector(1) < 0"))
    assert {name for name, _ in found} == {alert.name for alert in ALERTS}


def test_alerts_that_do_not_wait_are_found(tmp_path):
    found = wrong_alerts(tmp_path, lambda rule: rule.pop("for", None))
    assert {name for name, _ in found} == {alert.name for alert in ALERTS if alert.for_minutes}


def test_what_an_alert_says(tmp_path):
    """Labels and annotations as an operator gets them, with numbers, a share and a tier filled in."""
    by_name = {alert.name: alert for alert in ALERTS}

    def alert_test(name, minute, summary, more_labels=""):
        severity = by_name[name].severity.value
        label_pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels("tpu-0:8000") + more_labels))
        annotations = {
            "summary": summary,
            "description": by_name[name].action,
            "runbook": f"docs/monitoring.md#{name.lower()}",
        }
        alerts = [{"exp_labels": label_pairs | {"severity": severity}, "exp_annotations": annotations}]
        return {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": alerts}

    changed = {
        "num_quarantined_chunks": gauge_during(60, 12),
        "staging_reserved_blocks": gauge_during(60, 95, 60),
        "tier.failed_storage_chunks@0:file": once(9),
    }
    tests = [
        alert_test(
            "TpuOffloadQuarantineStuck",
            START + 20,
            "tpu-0:8000: 12 chunks of host memory are not returned by a timed-out copy",
        ),
        alert_test("TpuOffloadStagingFull", START + 30, "tpu-0:8000: the staging buffer is 95% full"),
        alert_test(
            "TpuOffloadStorageCopiesFail",
            START + 5,
            "tpu-0:8000: 9 chunks could not be written to or read from storage tier 0:file",
            ',tier="0:file"',
        ),
    ]
    inputs = [{"series": name, "values": values} for name, values in series(changed, instance="tpu-0:8000").items()]
    run_rule_tests(tmp_path, {"interval": "1m", "input_series": inputs, "alert_rule_test": tests})


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_says_what_to_do(alert):
    assert re.fullmatch(r"TpuOffload([A-Z][a-z]+)+", alert.name)
    assert alert.summary.startswith("{{ $labels.instance }}: ")
    assert not alert.summary.endswith(".")
    assert re.fullmatch(r"[A-Z].*\.", alert.action)
    assert "{" not in alert.action
    assert alert.severity in Severity
    assert [other.name for other in ALERTS].count(alert.name) == 1


def test_the_page_explains_every_alert():
    """A section of its name, in the same order, below which its severity and its duration are named."""
    text = (ROOT / "docs" / "monitoring.md").read_text()
    found = re.findall(r"^### (TpuOffload\w+)\n\n([^\n]+)", text, re.MULTILINE)
    assert [name for name, _ in found] == [alert.name for alert in ALERTS]
    for alert, (_, first) in zip(ALERTS, found, strict=True):
        lasting = f", for {alert.for_minutes} minutes" if alert.for_minutes else ""
        assert first.startswith(f"*{alert.severity.value}{lasting}*"), alert.name
