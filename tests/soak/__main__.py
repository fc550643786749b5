"""Starts the command behind `scripts/soak`, so that Ctrl-C also works during imports."""

import tpu_offload_command

tpu_offload_command.run(prog="soak", module="tests.soak.cli")
