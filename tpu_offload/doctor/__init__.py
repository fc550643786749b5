"""Examines the machine that will serve: versions, limits, settings, storage, devices, and every copy path."""

from tpu_offload.doctor.examination import examine
from tpu_offload.doctor.findings import Finding, Level
from tpu_offload.doctor.versions import KNOWN_FAULTS, SUPPORTED, installed_versions

__all__ = ["KNOWN_FAULTS", "SUPPORTED", "Finding", "Level", "examine", "installed_versions"]
