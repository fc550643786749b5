"""All checks in order, as findings come."""

from collections.abc import Iterator, Mapping
from typing import Any

from tpu_offload.doctor.findings import Finding, warning
from tpu_offload.doctor.host import Host, check_host, has_tpu
from tpu_offload.doctor.settings import check_profile, read_settings
from tpu_offload.doctor.tiers import check_tiers
from tpu_offload.doctor.versions import check_compiled, check_known_faults, check_versions, installed_versions


def examine(
    overrides: Mapping[str, Any], *, load_failure_policy: object = None, with_devices: bool = True
) -> Iterator[Finding]:
    """Runs all checks; the slow ones come last.

    Args:
      overrides: `kv_connector_extra_config`.
      load_failure_policy: vLLM's `kv_load_failure_policy`; None if it is not known.
      with_devices: whether to use the devices: False beside a running engine, which has the TPU.
    """
    installed = installed_versions()
    yield from check_versions(installed)
    yield check_compiled()
    config, findings = read_settings(overrides)
    yield from findings
    if load_failure_policy not in (None, "recompute"):
        yield warning(
            "settings",
            f"kv_load_failure_policy is {load_failure_policy!r:.40}: a request whose load fails ends with an error",
            'have "kv_load_failure_policy": "recompute" in --kv-transfer-config',
        )
    yield from check_known_faults(installed, config)
    if not with_devices:
        yield from check_host(Host.read(), config, on_tpu=has_tpu(), beside_engine=True)
        yield from check_tiers(config)
        yield from check_profile((), config)
        return
    from tpu_offload.doctor import devices as of_devices  # jax takes seconds to import

    devices, findings = of_devices.find_devices()
    yield from findings
    yield from check_host(Host.read(), config, on_tpu=bool(devices) and devices[0].platform == "tpu")
    yield from check_tiers(config)
    yield from check_profile(devices, config)
    if devices:
        yield from of_devices.check_copies(devices)
        yield from of_devices.check_allocation(devices, config)
