"""The README's table of settings equals the declarations."""

import enum
import re
import types
import typing
from pathlib import Path

import pytest

from tpu_offload.config import (
    DEFAULT_NUM_CPU_CHUNKS,
    DEFAULT_STAGING_BUFFER_TOKENS,
    EvictionPolicyName,
    OffloadConfig,
)

README = Path(__file__).parents[1] / "README.md"


def env_name(field):
    return "TPU_OFFLOAD_" + field.upper()


def readme_rows():
    rows = {}
    for line in README.read_text().splitlines():
        if match := re.match(r"\| `(TPU_OFFLOAD_\w+)` \|(.*)\|$", line):
            assert match[1] not in rows, f"{match[1]} is in the table twice"
            rows[match[1]] = [cell.strip() for cell in match[2].split(" | ")]
    return rows


def type_text(annotation):
    if annotation == EvictionPolicyName | str:
        return f"{type_text(EvictionPolicyName)} or `module:Class`"
    if annotation == float | typing.Literal["auto"]:
        return "float or `auto`"
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = [a for a in typing.get_args(annotation) if a is not type(None)]
    if typing.get_origin(annotation) is tuple:
        return f"list of {type_text(typing.get_args(annotation)[0])}"
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if issubclass(annotation, enum.Enum):
        return " or ".join(f"`{member.value}`" for member in annotation)
    return "file" if annotation is Path else annotation.__name__


def default_text(field):
    default = OffloadConfig.model_fields[field].default
    sizes = {"staging_buffer_tokens": DEFAULT_STAGING_BUFFER_TOKENS, "num_cpu_chunks": DEFAULT_NUM_CPU_CHUNKS}
    if field in sizes:
        return str(sizes[field])
    if default in (None, (), ""):
        return "unset"
    if isinstance(default, enum.Enum):
        return default.value
    if isinstance(default, tuple):
        return ",".join(getattr(value, "value", None) or f"{value:g}" for value in default)
    return f"{default:g}" if isinstance(default, float) else str(int(default))


def test_readme_table_has_every_variable_and_no_other():
    assert list(readme_rows()) == [env_name(field) for field in OffloadConfig.model_fields]


@pytest.mark.parametrize("field", OffloadConfig.model_fields)
def test_readme_line(field):
    type_cell, unit, default, meaning = readme_rows()[env_name(field)]
    info = OffloadConfig.model_fields[field]
    assert type_cell == type_text(info.annotation)
    assert default == default_text(field)
    assert meaning == info.description
    assert unit
    for suffix, word in {"_tokens": "tokens", "_blocks": "blocks", "_gb": "GB", "_chunks": "chunks", "_s": "s"}.items():
        if field.endswith(suffix):
            assert unit == word
