"""Workloads for the embedded engine, served and compared: what `tpu-offload replay` and the soak run."""
