"""What tests need to know when `tpu_offload.core` is compiled (scripts/test --compiled)."""

import dataclasses
from typing import Any

import pytest

# Tests that replace a method or attribute, or derive from a class that is final; skipped where that cannot be done.
interpreted_only = pytest.mark.interpreted


def state_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that are set, whatever it keeps them in, by name; compiled classes list theirs."""
    cls = type(value)
    names = {field.name: None for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    for base in reversed(cls.__mro__):
        for kind in ("__slots__", "__mypyc_attrs__"):
            listed = base.__dict__.get(kind, ())
            names |= dict.fromkeys((listed,) if isinstance(listed, str) else listed)
    names |= dict.fromkeys(getattr(value, "__dict__", ()))
    return {name: getattr(value, name) for name in names if name not in _NOT_STATE and hasattr(value, name)}


_NOT_STATE = {"__dict__", "__weakref__"}
