"""Request swap: copies a preempted request's KV to a pool in host memory and back."""
