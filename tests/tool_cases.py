"""Twenty ways in which functions take arguments: flat, nested, optional, enums, arrays, several at once.
They must never need a model that knows what it says: whatever fits the schema is right."""

from __future__ import annotations

from typing import Any


def tool(name: str, properties: Any, required: Any = (), **more: Any) -> dict[str, Any]:
    """A function of OpenAI's `tools`."""
    parameters = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters | more}}


SHORT = {"type": "string", "maxLength": 3}
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
CASES: dict[str, list[dict[str, Any]]] = {
    "flat string": [tool("say", {"text": SHORT}, ["text"])],
    "flat integer": [tool("wait", {"seconds": SMALL}, ["seconds"])],
    "flat number": [tool("scale", {"by": {"enum": [0.5, 1.25]}}, ["by"])],
    "flat boolean": [tool("lamp", {"on": {"type": "boolean"}}, ["on"])],
    "null": [tool("clear", {"what": {"type": "null"}}, ["what"])],
    "two fields": [tool("move", {"x": SMALL, "y": SMALL}, ["x", "y"])],
    "no fields": [tool("stop", {})],
    "no parameters": [{"type": "function", "function": {"name": "ping"}}],
    "optional": [tool("find", {"word": SHORT, "most": SMALL}, ["word"])],
    "all optional": [tool("list", {"a": SMALL, "b": SMALL})],
    "enum": [tool("paint", {"colour": {"enum": ["red", "green", "blue"]}}, ["colour"])],
    "mixed enum": [tool("set", {"value": {"enum": [1, "one", None]}}, ["value"])],
    "const": [tool("mode", {"mode": {"const": "fast"}}, ["mode"])],
    "array": [tool("sum", {"of": {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 3}}, ["of"])],
    "array of enums": [tool("tags", {"t": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}}, ["t"])],
    "nested": [tool("book", {"who": {"type": "object", "properties": {"age": SMALL}, "required": ["age"],
                                     "additionalProperties": False}}, ["who"])],
    "array of objects": [tool("cart", {"items": {"type": "array", "minItems": 1, "maxItems": 2, "items": {
        "type": "object", "properties": {"n": SMALL}, "required": ["n"], "additionalProperties": False}}}, ["items"])],
    "any of": [tool("id", {"id": {"anyOf": [SMALL, {"enum": ["x"]}]}}, ["id"])],
    "several functions": [tool("a.b-c_1", {"x": SMALL}, ["x"]), tool("other", {"y": SMALL}, ["y"])],
    "signs": [tool("echo", {"s": {"enum": ['a "quoted" }', "</tool_call>", "line\nbreak", "é日"]}}, ["s"])],
}  # fmt: skip
