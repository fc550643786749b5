"""Workloads for the embedded engine, served once and compared: what `tpu-offload replay` and the soak run."""

from tpu_offload.replay.comparison import find_differences, outcome
from tpu_offload.replay.replay import serve_twice, size_setup
from tpu_offload.replay.serving import Record, ServedRun, serve
from tpu_offload.replay.setup import (
    ServingOptions,
    Setup,
    blocks_per_request,
    build_setup,
    build_workload,
    describe,
    layout_of,
    serve_once,
)
from tpu_offload.replay.workloads import Workload, chat_workload, decode_workload

__all__ = [
    "Record",
    "ServedRun",
    "ServingOptions",
    "Setup",
    "Workload",
    "blocks_per_request",
    "build_setup",
    "build_workload",
    "chat_workload",
    "decode_workload",
    "describe",
    "find_differences",
    "layout_of",
    "outcome",
    "serve",
    "serve_once",
    "serve_twice",
    "size_setup",
]
