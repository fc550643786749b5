"""`tpu-offload doctor`: is everything right on the machine that will serve?"""

import json as json_format
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tpu_offload.cli.files import output_file, write_json
from tpu_offload.cli.interrupts import ended_by_interrupt
from tpu_offload.cli.options import Command, option
from tpu_offload.errors import InputError

_CONNECTORS = "TPUOffloadConnector", "TPUHostOffloadConnector"
_SECRET_OPTION = re.compile(r"([?&](?!\w*_file=)\w*(?:password|secret|token|key)\w*=)[^&;\"]*", re.IGNORECASE)


@click.command(cls=Command)
@option(
    "--settings",
    str,
    "JSON",
    "the settings that vLLM gives the connector: kv_connector_extra_config, or all of --kv-transfer-config",
)
@click.option("--no-devices", is_flag=True, help="leave the devices alone: beside an engine that uses them")
@option("--json", output_file, "FILE", "write the findings and versions as JSON: the report to send with a question")
@click.pass_obj
def command(argv: Sequence[str], /, *, settings: str | None, no_devices: bool, json: Path | None) -> int:
    """Checks versions, limits, the TPU_OFFLOAD_* settings, host memory, storage tiers, devices and every copy path.

    One line a check. Status 0 if nothing is wrong, 1 with an error. Storage tiers are written to, beside what they
    hold.
    """
    with ended_by_interrupt("tpu-offload"):
        from tpu_offload.doctor import Level, examine, installed_versions

    start_s = time.monotonic()
    findings = []
    for finding in examine(_overrides(settings), with_devices=not no_devices):
        findings.append(finding)
        action = f" -> {finding.action}" if finding.action else ""
        sys.stdout.write(f"{finding.level.value:8}{finding.check}: {finding.text}{action}\n")
        sys.stdout.flush()
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    sys.stdout.write(
        f"{counts[Level.ERROR]} errors, {counts[Level.WARNING]} warnings, {time.monotonic() - start_s:.0f} s\n"
    )
    if json is not None:
        report = {
            "argv": list(argv),
            "versions": installed_versions(),
            "seconds": round(time.monotonic() - start_s, 1),
            "findings": [
                {
                    "check": finding.check,
                    "level": finding.level.value,
                    "text": finding.text,
                    "action": finding.action,
                    "figures": dict(finding.figures),
                }
                for finding in findings
            ],
        }
        write_json(json, _without_passwords(report))
    return 1 if counts[Level.ERROR] else 0


def _overrides(text: str | None) -> dict[str, Any]:
    """The settings of a connector's configuration."""
    if text is None:
        return {}
    example = """expected an object like '{"host_gb": 800}', or a --kv-transfer-config"""
    try:
        given = json_format.loads(text)
    except (ValueError, RecursionError) as e:
        raise InputError(f"--settings is not JSON ({e}); {example}") from e
    if not isinstance(given, dict):
        raise InputError(f"--settings is {text:.40}; {example}")
    if not {"kv_connector", "kv_role", "kv_connector_extra_config"}.intersection(given):
        return given
    connector = given.get("kv_connector", _CONNECTORS[0])
    if connector not in _CONNECTORS:
        raise InputError(f"--settings is of the connector {connector!r:.60}; expected {' or '.join(_CONNECTORS)}")
    if (role := given.get("kv_role", "kv_both")) != "kv_both":
        raise InputError(
            f"--settings has the kv_role {role!r:.40}; expected kv_both: the host tier both saves and loads"
        )
    extra = given.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise InputError(f"kv_connector_extra_config in --settings is {extra!r:.40}; expected an object")
    return extra


def _without_passwords(value: Any) -> Any:
    """A report to send to others."""
    if isinstance(value, dict):
        return {name: _without_passwords(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_passwords(part) for part in value]
    if not isinstance(value, str):
        return value
    value = re.sub(r"://.*@", "://***@", value)  # to the last one: a password may have any character
    return _SECRET_OPTION.sub(r"\1***", value)
