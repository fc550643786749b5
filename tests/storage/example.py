"""The tier that docs/tiers.md shows."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "tiers.md"
NAME = "sqlite_tier:SQLiteTier"


def write_module(directory: Path) -> None:
    """Writes the file, as it stands there."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (directory / "sqlite_tier.py").write_text(code)
