"""`pyspac bench --report`: what a comparison found as one JSON file that others can read, and as Markdown.

Nothing in it names a person, a folder or a host. `benchmarks/community/schema.json` is its schema.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from pyspac.commands.bench_report import Findings
from pyspac.commands.bench_ways import PROMPTS
from pyspac.commands.json_file import json_text, write_result
from pyspac.model.geometry import MoeGeometry, read_geometry
from pyspac.model.gguf_header import read_header
from pyspac.server.model_identity import model_hash
from pyspac.units import number_text

FORMAT: Final = 1
SUFFIX: Final = ".json"
_HOST_FLAG: Final = "--rpc"


def report(findings: Findings) -> dict[str, Any]:
    """The object of the file."""
    path = findings.given.model
    own, other, ratio = findings.rivals(findings.turns.generation())
    return {
        "format": FORMAT,
        "machine": findings.machine,
        "model": {"file": path.name, "hash": model_hash(path), **_geometry(read_geometry(read_header(path)))},
        "at_once": findings.at_once,
        "rows": list(_rows(findings)),
        "winner": findings.winner,
        "rivals": [own, other],
        "ratio": asdict(ratio),
    }


def _geometry(geometry: MoeGeometry) -> dict[str, Any]:
    fields = (
        "architecture", "n_layer", "n_moe_layer", "n_expert", "n_expert_used", "n_embd", "model_bytes",
        "experts_bytes",
    )  # fmt: skip
    types = sorted({layer.layout for layer in geometry.moe_layers})
    return {name: getattr(geometry, name) for name in fields} | {"experts": types}


def _rows(findings: Findings) -> Iterator[dict[str, Any]]:
    turns = findings.turns
    for name, way in findings.ways.items():
        kinds = {kind: asdict(turns.generation(kind).of(name)) for kind in PROMPTS}
        yield {
            "way": name,
            "is_pyspac": way.is_own,
            "flags": _without_places(way.flags),
            "n_rounds": len(turns.generation().tps[name]),
            "generation_tps": asdict(turns.generation().of(name)),
            "prompt_tps": asdict(turns.prompts().of(name)),
            "kinds_tps": kinds,
            "acceptance": turns.acceptance(name),
        }


def _without_places(flags: str) -> str:
    """Of files the names stay, of servers nothing."""
    words = shlex.split(flags)
    names = (Path(word).name if "/" in word else word for word in words)
    hidden = (
        "HOST:PORT" if before == _HOST_FLAG else name
        for before, name in zip(("", *words), names, strict=False)
    )
    return shlex.join(hidden)


def markdown(found: dict[str, Any]) -> str:
    """A table of the rows, the machine and the model in one line each."""
    machine, model = found["machine"], found["model"]
    ratio = found["ratio"]
    own, other = found["rivals"]
    lines = [
        f"**{model['file']}** ({model['architecture']}, {model['model_bytes'] / 1e9:.3g} GB, "
        f"{model['n_expert']} experts, {model['n_expert_used']} used) on {machine.get('cpu')}, "
        f"{machine.get('n_cores')} cores, {machine.get('memory_gib')} GiB; pyspac "
        f"{machine.get('pyspac')} ({machine.get('pyspac_commit')}), llama.cpp "
        f"{machine.get('llama_cpp_pin')}; {machine.get('date')}",
        "",
        "| way | flags | generation, tokens/s | prompts, tokens/s | accepted |",
        "|---|---|---|---|---|",
        *(_line(row) for row in found["rows"]),
        "",
        f"`{own}` generates {ratio['median']:.2f} times as fast as `{other}` ({ratio['least']:.2f} to "
        f"{ratio['most']:.2f} over {found['rows'][0]['n_rounds']} rounds).",
    ]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    accepted = "" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
    cells = (row["way"], f"`{row['flags']}`", _spread(row["generation_tps"]), _spread(row["prompt_tps"]))
    return f"| {' | '.join(cells)} | {accepted} |"


def _spread(value: dict[str, float]) -> str:
    median, low, high = (number_text(value[name]) for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def markdown_path(path: Path) -> Path:
    return path.with_suffix(".md")


def write_report(path: Path, findings: Findings) -> None:
    """Both files, each whole or not at all. Raises PyspacError."""
    found = report(findings)
    write_result(path, json_text(found).encode(), "report")
    write_result(markdown_path(path), markdown(found).encode(), "report's table")
