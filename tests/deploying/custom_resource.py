# SPDX-License-Identifier: MIT OR Apache-2.0
"""A manifest against KubeRay's definitions of its resources, as strictly as an API server with strict field validation.

`problems(document)` lists what is wrong: an unknown field (none is let through, as a server would prune it), a missing
one, a wrong type, a value out of its enum, and entries of a keyed list that have the same keys.

What it leaves out: rules in CEL (`x-kubernetes-validations`), and the formats of texts.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

FOLDER = Path(__file__).parents[1] / "fixtures" / "kuberay"
FILES = {"RayService": "ray.io_rayservices.yaml.gz", "RayCluster": "ray.io_rayclusters.yaml.gz"}
INTEGERS = {"int32": 2**31, "int64": 2**63}


def problems(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a RayService or a RayCluster, each with its place. `metadata` is the server's own."""
    errors = _validator(document["kind"], document["apiVersion"]).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in errors]


def strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenAPI schema of a definition as a JSON schema that lets no unknown field through."""
    made = dict(schema)
    if "properties" in schema:
        made["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
    if "items" in schema:
        made["items"] = strict(schema["items"])
    if isinstance(schema.get("additionalProperties"), Mapping):
        made["additionalProperties"] = strict(schema["additionalProperties"])
    elif schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    if schema.get("format") in INTEGERS:
        bound = INTEGERS[schema["format"]]
        made = {"minimum": -bound, "maximum": bound - 1, **made}
    if schema.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if schema.get("nullable"):
        made["type"] = [made["type"], "null"]
    return made


@cache
def _validator(kind: str, api_version: str) -> Any:
    with gzip.open(FOLDER / FILES[kind]) as file:
        definition = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    group, _, version = api_version.partition("/")
    assert definition["spec"]["group"] == group
    (schema,) = [each["schema"] for each in definition["spec"]["versions"] if each["name"] == version]
    made = strict(schema["openAPIV3Schema"])
    made["properties"]["metadata"] = {"type": "object"}
    made["properties"]["kind"] = {"const": kind}
    made["required"] = sorted({*made.get("required", ()), "apiVersion", "kind", "metadata", "spec"})
    return _Validator(made)


def _unique(validator: Any, form: str, entries: Any, schema: Mapping[str, Any]) -> Iterator[jsonschema.ValidationError]:
    """Lists of the type "map" have one entry of each key, those of the type "set" each entry once."""
    if form == "atomic" or not validator.is_type(entries, "array"):
        return
    names = schema.get("x-kubernetes-list-map-keys")
    keys = [[entry.get(name) for name in names] if names else entry for entry in entries]
    for key in keys:
        if keys.count(key) > 1:
            yield jsonschema.ValidationError(f"{key!r} is there twice")


_Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"x-kubernetes-list-type": _unique})
