"""The `tpu-offload` command line."""
