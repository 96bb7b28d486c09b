"""Keep `gateway.settings` of the chart's schema equal to the gateway's own settings.

``python -m tests.chart.values_schema`` rewrites helm/values.schema.json: all of it is written by
hand except the definition `settings`, which comes from `gateway.settings_model`, so that a
misspelt setting stops `helm install` and not the pods. A test fails while the file is stale.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from gateway.settings_model import Settings

SCHEMA: Final = Path(__file__).parents[2] / "helm" / "values.schema.json"

OWNED: Final = frozenset(
    {"port", "replicas", "store", "name", "discovery", "auth", "dns", "kubernetes"}
)
"""Settings and groups that have values of their own in the chart."""

OWNED_INSIDE: Final = {"timeouts": {"drain_s"}}

_WIDTH: Final = 120
_NOT_NEEDED: Final = ("title", "description", "default", "format", "writeOnly", "$defs")
_RENAMED: Final = {
    "gt": "exclusiveMinimum",
    "ge": "minimum",
    "lt": "exclusiveMaximum",
    "le": "maximum",
}


def main() -> None:
    """Rewrite the file."""
    SCHEMA.write_text(render(), encoding="utf-8")


def render() -> str:
    """Return the file as it should be."""
    schema: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["definitions"]["settings"] = settings_schema()
    return _laid_out(schema, 0) + "\n"


def settings_schema() -> dict[str, Any]:
    """Return the schema of `gateway.settings`: every setting that the chart does not set itself."""
    model = Settings.model_json_schema()
    found: dict[str, Any] = _plain(model, model.get("$defs", {}))
    properties = {k: v for k, v in found["properties"].items() if k not in OWNED}
    for group, names in OWNED_INSIDE.items():
        for name in names:
            del properties[group]["properties"][name]
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _plain(node: Any, definitions: dict[str, Any]) -> Any:
    """Put definitions where they are used, and drop what only describes."""
    if isinstance(node, list):
        return [_plain(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _plain(definitions[node["$ref"].rpartition("/")[2]], definitions)
    kept = {_RENAMED.get(k, k): v for k, v in node.items() if k not in _NOT_NEEDED}
    if kept.get("type") == "array" and "minLength" in kept:
        kept["minItems"] = kept.pop("minLength")
    if "properties" in kept:  # whose keys are names, not words of JSON Schema
        inner = {k: _plain(v, definitions) for k, v in kept.pop("properties").items()}
        return {**{k: _plain(v, definitions) for k, v in kept.items()}, "properties": inner}
    return {k: _plain(v, definitions) for k, v in kept.items()}


def _laid_out(node: Any, depth: int, taken: int = 0) -> str:
    """Return JSON in which what fits into a line stands on one, and short members share lines."""
    short = json.dumps(node, ensure_ascii=False)
    if not isinstance(node, dict | list) or len(short) + 2 * depth + taken <= _WIDTH:
        return short
    opening, closing = "{}" if isinstance(node, dict) else "[]"
    pad = "  " * (depth + 1)
    lines = [""]
    for text in _members(node, depth):
        if "\n" in text or "\n" in lines[-1] or len(pad + lines[-1] + text) + 2 > _WIDTH:
            lines.append(text)
        else:
            lines[-1] = f"{lines[-1]}, {text}" if lines[-1] else text
    body = ",\n".join(pad + line for line in lines if line)
    return f"{opening}\n{body}\n{'  ' * depth}{closing}"


def _members(node: dict[str, Any] | list[Any], depth: int) -> list[str]:
    if isinstance(node, list):
        return [_laid_out(item, depth + 1) for item in node]
    return [f"{json.dumps(k)}: {_laid_out(v, depth + 1, len(k) + 4)}" for k, v in node.items()]


if __name__ == "__main__":
    main()
