"""Serves workloads on the embedded engine and compares runs, for `tpu-offload replay` and the soak."""
