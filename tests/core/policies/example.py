"""The policy that docs/policies.md shows."""

import re
from pathlib import Path

from tpu_offload import EvictionPolicy

DOCS = Path(__file__).parents[3] / "docs" / "policies.md"


def source() -> str:
    """The file, as it stands there."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return code


def load() -> type[EvictionPolicy]:
    """Its class."""
    names: dict[str, type[EvictionPolicy]] = {}
    exec(source(), names)
    return names["FIFOPolicy"]
