"""Starts the command behind `scripts/soak`; Ctrl-C works while the modules are imported, too."""

import tpu_offload_command

tpu_offload_command.run(prog="soak", module="tests.soak.cli")
