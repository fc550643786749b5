"""The `tpu-offload` command."""
