"""`python -m tpu_offload.monitoring [ROOT]` writes the generated files of a checkout; scripts/monitoring calls it."""

import sys
from pathlib import Path

from tpu_offload.monitoring.files import write_files

write_files(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
