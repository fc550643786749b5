"""The alerts as a rules file of Prometheus."""

from typing import Any

from tpu_offload.monitoring.alerts import ALERTS, Alert

PAGE = "docs/monitoring.md"
"""The page that explains every alert, in a section of its name."""


def rules() -> dict[str, Any]:
    """The content of a rules file."""
    return {"groups": [{"name": "tpu_offload", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expression.text}
    if alert.for_minutes:
        rule["for"] = f"{alert.for_minutes}m"
    return rule | {
        "labels": {"severity": alert.severity.value},
        "annotations": {
            "summary": alert.summary,
            "description": alert.action,
            "runbook": f"{PAGE}#{alert.name.lower()}",
        },
    }
