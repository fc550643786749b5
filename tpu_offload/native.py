"""Whether the modules of `tpu_offload.core` are compiled, which setup.py does with mypyc, and what they need for that.

Compiled, a module takes half of the time and does the same, with these differences:

- Arguments and attributes are checked against their annotations (TypeError). What an engine gives is `Given`, except
  sequences, which are not checked, so that it reaches our validation: that accepts integers of numpy and says more.
- Its classes have no `__dict__`. What its class does not declare cannot be set on an object, neither can its methods.
- They cannot be derived from in Python, unless they are `@mypyc_attr(allow_interpreted_subclasses=True)`. What a method
  of such a class returns is `Given`, too. They have no docstrings, cannot be copied, and have no weak references.
- `raise A from b` sets no `__cause__`, only the `__context__` that it has without `from`.

No class is `@mypyc_attr(acyclic=True)`, which hides its objects from the garbage collector. Where more than 50 objects
that hold each other are freed at once, mypyc 2.4 hands such an object, too, to CPython's trashcan (before Python 3.14),
which writes into the header for the collector, and this object has none: other memory is overwritten.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

__all__ = ["Given", "is_compiled", "mypyc_attr"]

COMPILES = False  # true for mypyc only (`--always-true` in setup.py)
if COMPILES:
    type Given[T] = Any
else:
    type Given[T] = T  # an argument from outside, or what a policy of a user's own returns: not validated yet

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_):
        """Marks a class for mypyc, which reads the source; does nothing else."""
        return lambda cls: cls


def is_compiled() -> bool:
    """Whether modules of `tpu_offload.core` are compiled."""
    spec = importlib.util.find_spec("tpu_offload.core.scheduler")
    return spec is not None and spec.origin is not None and not spec.origin.endswith(".py")
