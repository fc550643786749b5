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
_HARMLESS = {"allow_http", "anonymous", "ca_file", "connect_timeout_s", "db", "endpoint", "password_file", "region"}
_HARMLESS |= {"retries", "timeout_s", "ttl_s", "unsigned_payload", "virtual_hosted_style"}


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
    overrides, policy = _read(settings)
    for finding in examine(overrides, load_failure_policy=policy, with_devices=not no_devices):
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
            "argv": [arg.replace(settings, _masked_settings(settings)) if settings else arg for arg in argv],
            "versions": installed_versions(),
            "seconds": round(time.monotonic() - start_s, 1),
            "findings": [
                {
                    "check": finding.check,
                    "level": finding.level.value,
                    "text": _without_passwords(finding.text),
                    "action": finding.action,
                    "figures": dict(finding.figures),
                }
                for finding in findings
            ],
        }
        write_json(json, report)
    return 1 if counts[Level.ERROR] else 0


def _read(text: str | None) -> tuple[dict[str, Any], object]:
    """The settings of a connector's configuration, and vLLM's policy for failed loads; None if it is not there."""
    if text is None:
        return {}, None
    example = """expected an object like '{"host_gb": 800}', or a --kv-transfer-config"""
    try:
        given = json_format.loads(text)
    except (ValueError, RecursionError) as e:
        raise InputError(f"--settings is not JSON ({e}); {example}") from e
    if not isinstance(given, dict):
        raise InputError(f"--settings is {text:.40}; {example}")
    if not {"kv_connector", "kv_role", "kv_connector_extra_config"}.intersection(given):
        return given, None
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
    return extra, given.get("kv_load_failure_policy", "fail")  # vLLM's default


def _masked_settings(text: str) -> str:
    """Settings without what may be secret in the options of storage tiers."""
    given = json_format.loads(text)
    settings = given.get("kv_connector_extra_config") or given
    options = settings.get("storage_options")
    if isinstance(options, str):
        settings["storage_options"] = _masked_options(options)
    elif isinstance(options, list):
        settings["storage_options"] = [_masked_options(str(one)) for one in options]
    return json_format.dumps(given)


def _masked_options(options: str) -> str:
    """An address without its credentials, and without the options that are not known to be harmless."""
    place, *rest = options.split("?", maxsplit=1)
    place = re.sub(r"^(\w+:/*)?.*@", r"\1***@", place, flags=re.DOTALL)
    if not rest:
        return place
    # A password may have an ampersand, and what follows the last @ is then the host.
    query = rest[0].rsplit("@", maxsplit=1)
    pairs = [pair if pair.split("=")[0] in _HARMLESS else "***" for pair in query[-1].split("&")]
    return f"{place}?{'***@' if len(query) > 1 else ''}{'&'.join(pairs)}"


def _without_passwords(text: str) -> str:
    """A finding: errors name addresses."""
    text = re.sub(r"\S+@", "***@", re.sub(r"://.*@", "://***@", text))
    return re.sub(r"([?&](?!\w*_file=)\w*(?:pass|secret|token|key)\w*=)[^&\s]*", r"\1***", text, flags=re.IGNORECASE)
