"""The settings: whether they parse, contradict each other, have no effect, or name what is not there."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_offload.config import CopyPath, OffloadConfig, SaveEvent
from tpu_offload.copy_profile import CopyProfile
from tpu_offload.core.policies import find_policy
from tpu_offload.doctor.findings import Finding, Findings, error, ok, warning
from tpu_offload.errors import ConfigError

_CHECK = "settings"


class _Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.lines.append(record.getMessage())


def read_settings(overrides: Mapping[str, Any]) -> tuple[OffloadConfig | None, list[Finding]]:
    """Reads `TPU_OFFLOAD_*` and what the connector gets in its configuration.

    Args:
      overrides: `kv_connector_extra_config`, which takes precedence.
    Returns:
      The settings, None if they are invalid; and what is wrong with them.
    """
    logger, handler = logging.getLogger("tpu_offload"), _Lines()
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        config = OffloadConfig.from_env(overrides=overrides)
    except ConfigError as e:
        return None, [error(_CHECK, str(e), "the engine will not start with it: see the settings in the README")]
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
    findings = [warning(_CHECK, line, "unset it, or what makes it useless") for line in handler.lines]
    findings += _contradictions(config)
    return config, findings or [ok(_CHECK, "valid")]


def _contradictions(config: OffloadConfig) -> Findings:
    if not config.enabled:
        yield warning(_CHECK, "a size of 0 turns offloading off", "set TPU_OFFLOAD_HOST_GB")
        return
    if CopyPath.FUSED in (config.save_path, config.load_path):
        yield error(
            _CHECK,
            "a copy path is fused, which needs a step that copies: vLLM has none and refuses it",
            "set TPU_OFFLOAD_SAVE_PATH and TPU_OFFLOAD_LOAD_PATH to direct, staged or auto",
        )
    if config.swap_gb != 0:
        yield error(
            _CHECK,
            f"swap_gb={config.swap_gb}: vLLM recomputes preempted requests, and refuses it",
            "unset TPU_OFFLOAD_SWAP_GB; TPU_OFFLOAD_DECODE_SAVE=1 has their blocks in the host tier",
        )
    if any(event is not SaveEvent.COMPUTE for event in config.save_on):
        names = ",".join(event.value for event in config.save_on)
        yield error(
            _CHECK,
            f"TPU_OFFLOAD_SAVE_ON={names}: vLLM has compute only, and refuses the others",
            "unset TPU_OFFLOAD_SAVE_ON",
        )
    if config.sync_load and CopyPath.STAGED is config.load_path:
        yield warning(
            _CHECK,
            "TPU_OFFLOAD_SYNC_LOAD=1 with staged loads: each hit waits for a copy that could overlap with steps",
            "unset TPU_OFFLOAD_SYNC_LOAD",
        )
    for tier in config.storage_tiers:
        if tier.size_gb is not None and config.host_gb is not None and tier.size_gb <= config.host_gb:
            yield warning(
                _CHECK,
                f"storage tier {tier.label} has {tier.size_gb:g} GB and the host tier {config.host_gb:g}: it mostly "
                "holds the same, and adds little but a restart",
                "enlarge TPU_OFFLOAD_STORAGE_GB",
            )
    try:
        find_policy(config.eviction_policy)
    except ConfigError as e:
        yield error(_CHECK, str(e), "the engine will not start with it: see docs/policies.md")


def check_profile(devices: Sequence[Any], config: OffloadConfig | None) -> Findings:
    """Whether a copy profile can be read, and is of these devices.

    Args:
      devices: those of jax; without any the profile is only read.
      config: the settings.
    """
    if config is None or config.copy_profile is None or CopyPath.AUTO not in (config.save_path, config.load_path):
        return  # without an `auto` path the engine does not read it; the settings' check says so
    path = config.copy_profile
    try:
        profile = CopyProfile.read(path)
        if devices:
            profile.check_device(devices[0].device_kind)
    except ConfigError as e:
        yield error("copy profile", str(e), "measure it on this machine")
    else:
        yield ok("copy profile", f"{path} is of {'these' if devices else profile.device_kind!r} devices")
