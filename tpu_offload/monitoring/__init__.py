"""The dashboard, the alerts and the page of metrics, generated from the declarations of `tpu_offload.metrics`."""

from tpu_offload.monitoring.alerts import ALERTS, Alert, Severity
from tpu_offload.monitoring.expressions import Expression, render
from tpu_offload.monitoring.rows import ROWS

__all__ = ["ALERTS", "ROWS", "Alert", "Expression", "Severity", "render"]
