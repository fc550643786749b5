"""Validates manifests against the schemas of their kinds."""

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

from tests.deploy.manifests import Manifest

KUBERNETES = "1.34"
_SCHEMAS = Path(__file__).resolve().parent / "schemas"


def validate(manifest: Manifest) -> None:
    """Checks a manifest against the schema of its kind, unknown fields included.

    Raises:
      kubernetes_validate.ValidationError, jsonschema.ValidationError: it does not match.
    """
    kind = f"{manifest['apiVersion']}/{manifest['kind']}"
    path = _SCHEMAS / f"{kind.replace('/', '_')}.json"
    if not path.exists():
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    is_custom = "spec" in manifest
    jsonschema.validate(manifest["spec"] if is_custom else manifest, _strict(path))
    if is_custom:
        assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
        kubernetes_validate.validate(  # the metadata, as those of any other object
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]}, KUBERNETES, strict=True
        )


@functools.cache
def _strict(path: Path) -> Any:
    return _without_unknown(json.loads(path.read_text()))


def _without_unknown(schema: Any) -> Any:
    """The schema, refusing fields that it does not name, as `kubectl --validate=strict` does."""
    if isinstance(schema, list):
        return [_without_unknown(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: _without_unknown(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema and "additionalProperties" not in schema:
        strict["additionalProperties"] = False
    return strict
