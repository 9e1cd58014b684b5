"""JSON schemas like those of real requests: tool calls, nested objects, enums, long strings."""

from __future__ import annotations

from typing import Any

INTEGER, FLAG = {"type": "integer"}, {"type": "boolean"}


def _object(**properties: Any) -> dict[str, Any]:
    """An object with all properties required, as in strict tools."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any], max_items: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": max_items}


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return _object(name={"const": name}, arguments=_object(**arguments))


def _text(max_length: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": max_length}


SCHEMAS: dict[str, dict[str, Any]] = {
    "weather tool": _call(
        "get_weather", location=_text(20), unit={"enum": ["celsius", "fahrenheit"]}, days=INTEGER
    ),
    "one of three tools": {
        "anyOf": [
            _call("search", query=_text(30), max_results=INTEGER),
            _call("open_file", path=_text(30), read_only=FLAG),
            _call("run_tests", directory=_text(30), verbose=FLAG, fail_fast=FLAG),
        ]
    },
    "person": _object(
        first_name=_text(12), last_name=_text(12), age=INTEGER, email=_text(24), active=FLAG
    ),
    "nested order": _object(
        order_id=INTEGER,
        customer=_object(name=_text(16), address=_object(street=_text(20), city=_text(16))),
        items=_list(_object(product=_text(16), quantity=INTEGER, in_stock=FLAG), 2),
    ),
    "classification": _object(
        category={"enum": ["bug", "feature_request", "question", "documentation"]},
        priority={"enum": ["low", "medium", "high", "critical"]},
        needs_reproduction=FLAG,
    ),
    "review": _object(
        summary=_text(120),
        verdict={"enum": ["approve", "request_changes", "comment"]},
        comments=_list(_object(line=INTEGER, message=_text(60)), 2),
    ),
    "settings": _object(
        database=_object(host=_text(16), port=INTEGER, use_ssl=FLAG),
        logging=_object(level={"enum": ["debug", "info", "warning", "error"]}, to_file=FLAG),
        max_connections=INTEGER,
        timeout_seconds=INTEGER,
    ),
}
