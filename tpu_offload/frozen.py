"""Dataclasses that are frozen for type checkers only.

A frozen dataclass takes three times as long to make as another one, and each step and each request makes several.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool, **options: Any) -> Callable[[type], type]:
        """`dataclasses.dataclass`, hashable as with `frozen`, without its slow assignments."""
        return dataclasses.dataclass(unsafe_hash=frozen, **options)
