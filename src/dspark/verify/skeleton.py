"""skeleton: what JSON under a schema looks like before anything is filled in, as material for lookups.
It must never be taken for an answer: it follows the shape of a schema, not all of its rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 6
MAX_CHARACTERS = 8_000
INDENTS = (None, 2)
"""Models write JSON on one line, or indented by two."""


def skeletons(schema: Any) -> list[str]:
    """JSON texts with every property of the schema in its order, and the first of each choice; none for a schema that
    says nothing of a shape."""
    value = _example(schema, schema, MAX_DEPTH)
    if not isinstance(value, (dict, list)) or not value:
        return []
    texts = [json.dumps(value, indent=indent, ensure_ascii=False) for indent in INDENTS]
    return [text for text in texts if len(text) <= MAX_CHARACTERS]


def _example(schema: Any, root: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth == 0:
        return ""
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][0]
    if isinstance(schema.get("$ref"), str):
        return _example(_resolve(schema["$ref"], root), root, depth - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key] and "properties" not in schema:
            return _example(schema[key][0], root, depth - 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if isinstance(schema.get("properties"), Mapping):
        return {name: _example(part, root, depth - 1) for name, part in schema["properties"].items()}
    if "items" in schema:
        return [_example(schema["items"], root, depth - 1)]
    return {"integer": 0, "number": 0, "boolean": True, "null": None, "array": [], "object": {}}.get(str(kind), "")


def _resolve(reference: str, root: Any) -> Any:
    """Within the schema; None for what lies elsewhere."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
