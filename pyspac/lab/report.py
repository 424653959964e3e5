"""Rows of runs in; tables, CSV and JSON out."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from pyspac.errors import ConfigError, PyspacError
from pyspac.lab.predict.assumed import ASSUMED

Row = dict[str, Any]
FORMATS: Final = (".json", ".csv")  # that `write_rows` knows

COLUMNS: Final = {  # field: (heading, format)
    "policy": ("policy", ""),
    "capacity": ("capacity", ""),
    "k": ("K", ""),
    "machine": ("machine", ""),
    "coverage": ("covered", ".3f"),
    "misses": ("misses", ""),
    "collision_misses": ("collided", ""),
    "gb_moved": ("GB", ".1f"),
    "predicted_tps": ("TPS*", ".1f"),
    "predictor": ("guesses", ""),
    "oracle_share": ("of oracle", ".0%"),
    "fidelity": ("fidelity", ".2f"),
}

RESTS_ON_GUESSES: Final = (
    "coverage", "coverage_first", "expert_coverage", "predicted_stall_ms", "predicted_tpot_ms",
    "predicted_tps", "oracle_share",
)  # fmt: skip


def is_assumed(row: Row) -> bool:
    """Whether the run rests on guesses whose accuracy was assumed."""
    return str(row.get("predictor")).startswith(ASSUMED)


def policy_label(row: Row) -> str:
    """Return the policy's name, and beside it what was assumed of its guesses."""
    return f"{row['policy']} ({row['predictor']})" if is_assumed(row) else str(row["policy"])


def make_table(rows: list[Row]) -> Table:
    """Return one line per run; columns that never vary are left to the title."""
    constant = {name for name in ("k", "machine", "capacity") if len({row[name] for row in rows}) == 1}
    said = ", ".join(f"{COLUMNS[name][0]} {rows[0][name]}" for name in COLUMNS if name in constant)
    title = f"{rows[0]['model']}{': ' if said else ''}{said}\n* predicted, not measured"
    has_guesses = any(row.get("predictor") for row in rows)
    shown = [name for name in COLUMNS if name not in constant and (name != "predictor" or has_guesses)]
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left")
    for name in shown:
        is_text = name in ("policy", "machine")
        table.add_column(COLUMNS[name][0], justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row, name) for name in shown))
    return table


def _cell(row: Row, name: str) -> str:
    value = row["bytes_moved"] / 1e9 if name == "gb_moved" else row.get(name)
    return "-" if value is None else format(value, COLUMNS[name][1])


def run_table(row: Row) -> Table:
    """Return all measures of one run, one per line; lists are left out."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for name, value in row.items():
        if not isinstance(value, (list, dict)) and value is not None:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            rests_on_guesses = name in RESTS_ON_GUESSES and is_assumed(row)
            table.add_row(name, f"{text}  (guesses {row['predictor']})" if rests_on_guesses else text)
    for predictor in row["predictors"]:
        table.add_row("predicted by", _predictor_text(predictor))
    return table


def _predictor_text(predictor: dict[str, Any]) -> str:
    recall, precision = (
        "-" if predictor[name] is None else f"{predictor[name]:.2f}" for name in ("recall", "precision")
    )
    return f"{predictor['name']}: recall {recall}, precision {precision} ({predictor['source']})"


def write_csv(rows: list[Row], path: Path) -> None:
    """Write the scalars of every run."""
    names = [name for name, value in rows[0].items() if not isinstance(value, (list, dict))]
    with _open(path) as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def write_rows(rows: list[Row], path: Path) -> None:
    """Write everything as one JSON array, or as CSV if the name says so."""
    if path.suffix == ".csv":
        write_csv(rows, path)
        return
    with _open(path) as file:
        json.dump(rows, file, indent=1)
        file.write("\n")


def _open(path: Path) -> Any:
    try:
        return path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise PyspacError(f"{path}: this file cannot be written ({error.strerror})") from error


def read_rows(path: Path) -> list[Row]:
    """Read the JSON that a sweep wrote; ConfigError if it is something else."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "RESULTS", str(path), f"a JSON file that `pyspac lab sweep` wrote ({error})"
        ) from error
    is_rows = (
        isinstance(rows, list) and rows and all(isinstance(r, dict) and "predicted_tps" in r for r in rows)
    )
    if not is_rows:
        raise ConfigError("RESULTS", str(path), "a JSON file that `pyspac lab sweep` wrote")
    return list(rows)
