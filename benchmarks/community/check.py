#!/usr/bin/env python3
"""Refuse reports that are not what `pyspac bench --report` writes: files in, exit code 1 and reasons out.

    python benchmarks/community/check.py benchmarks/community/*/*.json

Beside the schema: spreads are in order, the winner has a row, each way ran equally often, and no text holds a
path. It needs only Python.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

SCHEMA: Final = Path(__file__).with_name("schema.json")
MAX_BYTES: Final = 1 << 20
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip
_A_PATH: Final = re.compile(r"(^|[\s=\"'])(/|~/|[A-Za-z]:\\)")


def problems(value: Any) -> list[str]:
    """What is wrong with one report; empty: nothing."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    found = list(_by_schema(value, schema, "report"))
    return found or [*_by_sense(value), *_paths(value, "report")]


def _by_schema(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    """The part of JSON Schema that schema.json uses."""
    types = schema.get("type", [])
    names = [types] if isinstance(types, str) else types
    if names and not any(_is(value, name) for name in names):
        yield f"{where} is {value!r:.60}: wanted is {' or '.join(names)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r}: wanted is {', '.join(map(str, schema['enum']))}"
    yield from _bounds(value, schema, where)
    if isinstance(value, dict):
        yield from _fields(value, schema, where)
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _by_schema(item, schema.get("items", {}), f"{where}[{i}]")


def _is(value: Any, name: str) -> bool:
    is_bool = isinstance(value, bool)
    return isinstance(value, _TYPES[name]) and (is_bool == (name == "boolean"))


def _bounds(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    if _is(value, "number") and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{where} is {value}: out of bounds"  # or no number (NaN)
    pattern = schema.get("pattern", "")
    if isinstance(value, str) and not (
        len(value) >= schema.get("minLength", 0) and re.search(pattern, value)
    ):
        yield f"{where} is {value!r:.60}: not of the form {pattern or 'of a text'}"
    if isinstance(value, list) and not (
        schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    ):
        yield f"{where} has {len(value)} entries"


def _fields(value: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    known = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    for name in schema.get("required", []):
        if name not in value:
            yield f"{where} lacks {name}"
    for name, item in value.items():
        if name in known:
            yield from _by_schema(item, known[name], f"{where}.{name}")
        elif others is False:
            yield f"{where} has {name!r:.40}, which is not known"
        elif isinstance(others, dict):
            yield from _by_schema(item, others, f"{where}.{name}")


def _by_sense(value: dict[str, Any]) -> Iterator[str]:
    rows = {row["way"]: row for row in value["rows"]}
    for name in (value["winner"], *value["rivals"]):
        if name not in rows:
            yield f"{name!r} has no row"
    if len(rows) != len(value["rows"]) or len({row["n_rounds"] for row in value["rows"]}) != 1:
        yield "rows: two of one way, or ways that did not run equally often"
    if len({row["is_pyspac"] for row in value["rows"]}) != 2:
        yield "rows: one of pyspac and one of llama.cpp at least"
    spreads = [value["ratio"]]
    for row in value["rows"]:
        spreads += [row["generation_tps"], row["prompt_tps"], *row["kinds_tps"].values()]
    for one in spreads:
        order = [one[name] for name in ("least", "low", "median", "high", "most")]
        if order != sorted(order) or order[0] <= 0:
            yield f"a spread is out of order: {order}"


def _paths(value: Any, where: str) -> Iterator[str]:
    """Where a text shows a folder of somebody's."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _paths(item, f"{where}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item, where)
    elif isinstance(value, str) and _A_PATH.search(value):
        yield f"{where} holds a path: {value!r:.60}"


def check(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_BYTES:
            return [f"{path}: larger than {MAX_BYTES} bytes"]
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return [f"{path}: {error}"]
    return [f"{path}: {text}" for text in problems(value)]


def main(argv: Sequence[str] | None = None) -> int:
    paths = [Path(text) for text in (sys.argv[1:] if argv is None else argv)]
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    found = [text for path in paths for text in check(path)]
    for text in found:
        print(text, file=sys.stderr)
    print(f"{len(paths)} reports, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
