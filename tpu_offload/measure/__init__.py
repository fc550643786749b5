"""What `tpu-offload bench` measures: copy paths compared with the machine's limit, and the delay of a model."""

from tpu_offload.measure.bench import TransferBench
from tpu_offload.measure.devices import check_backend, device_errors, environment
from tpu_offload.measure.figures import PATHS, Failure, Figures, Spread
from tpu_offload.measure.profiles import Measured, as_json, build_profile, fit_geometry, measure
from tpu_offload.measure.worker_copies import CopyRates, Geometry, measure_copy_rates

__all__ = [
    "PATHS",
    "CopyRates",
    "Failure",
    "Figures",
    "Geometry",
    "Measured",
    "Spread",
    "TransferBench",
    "as_json",
    "build_profile",
    "check_backend",
    "device_errors",
    "environment",
    "fit_geometry",
    "measure",
    "measure_copy_rates",
]
