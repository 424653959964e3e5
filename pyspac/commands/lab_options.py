"""The options of `pyspac lab`: types, flags and help. Those that other commands have too are in `options`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyspac.lab.machine import PRESETS
from pyspac.scheduler.config import PARTS

# ---- of several commands

TraceFile = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="A trace of `pyspac trace`, or a CSV that begins # route_trace v1."),
]
Accept = Annotated[
    float,
    typer.Option("--accept", metavar="P", help="With --k: chance that a drafted token is accepted."),
]
PhaseName = Annotated[
    str,
    typer.Option("--phase", metavar="decode|all", help="all: treat the prompt as the first step."),
]
Accuracy = Annotated[
    float,
    typer.Option(
        "--accuracy",
        metavar="P",
        help="Assumed accuracy of guesses that the trace does not record.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="Seed for accepted drafts and assumed guesses.")
]
PolicyFiles = Annotated[
    list[Path] | None,
    typer.Option("--policy-file", metavar="FILE", help="A Python file with policies of your own."),
]

# ---- of `run`

Policy = Annotated[
    str | None,
    typer.Option("--policy", metavar="NAME", help="A named combination; see `pyspac lab list`."),
]
Without = Annotated[
    str,
    typer.Option(
        "--without",
        metavar="LIST",
        help="Leave parts out (comma-separated), to see what they are worth. "
        f"{'; '.join(map(': '.join, PARTS.items()))}.",
    ),
]
Eviction = Annotated[
    str,
    typer.Option(
        "--eviction",
        metavar="NAME",
        help="Which expert leaves a full cache; NAME:KNOB=NUMBER,... sets knobs.",
    ),
]
Prefetch = Annotated[
    str,
    typer.Option(
        "--prefetch", metavar="NAME", help="What is copied ahead; auto: utility for estimators, else none."
    ),
]
Miss = Annotated[
    str,
    typer.Option(
        "--miss", metavar="NAME", help="What happens to misses; auto: host for estimators, else fetch."
    ),
]
Routing = Annotated[
    str, typer.Option("--routing", metavar="NAME", help="Whether the cache may change the routing.")
]
Capacity = Annotated[
    str, typer.Option("--capacity", metavar="SIZE", help="A share of all experts' bytes (5%), or MiB.")
]
PerLayer = Annotated[
    bool,
    typer.Option(
        "--per-layer", help="Give each layer its own slots, instead of sharing among layers of equal layout."
    ),
]
DraftLength = Annotated[
    int | None,
    typer.Option(
        "--k", metavar="N", help="Emulated draft length. Default: as recorded; 0 if without drafts."
    ),
]
MachineName = Annotated[
    str,
    typer.Option(
        "--machine",
        metavar="NAME",
        help=f"{', '.join(PRESETS)}, disk=MODEL (experts on that file's disk, measured), or a JSON "
        "file (such as doctor writes).",
    ),
]
Cold = Annotated[
    bool,
    typer.Option(
        "--cold",
        help="Ignore the prompt, instead of learning from it and filling free slots.",
    ),
]
First = Annotated[
    int | None,
    typer.Option("--first", metavar="N", help="Also report coverage_first, of the first N decoded tokens."),
]
Oracle = Annotated[
    bool,
    typer.Option(
        "--oracle/--no-oracle", help="Also run the oracle, to tell the share of its speed that is reached."
    ),
]

# ---- of `sweep`

Rows = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Write all rows: .json (for `report`) or .csv."),
]
Policies = Annotated[
    str,
    typer.Option("--policies", metavar="LIST", help="Combinations or eviction policies, with commas."),
]
Capacities = Annotated[
    str, typer.Option("--capacities", metavar="LIST", help="Shares of all experts' bytes, or MiB.")
]
DraftLengths = Annotated[
    str | None,
    typer.Option("--k", metavar="LIST", help="Emulated draft lengths. Default: as recorded, or 0."),
]
MachineNames = Annotated[str, typer.Option("--machines", metavar="LIST", help="Machines, with commas.")]
Jobs = Annotated[int, typer.Option("-j", "--jobs", metavar="N", help="Worker processes; 0: one per core.")]
Dask = Annotated[
    str | None,
    typer.Option(
        "--dask", metavar="ADDRESS", help="Run on the workers of this Dask scheduler (tcp://HOST:PORT)."
    ),
]

# ---- of `report`

Results = Annotated[Path, typer.Argument(metavar="RESULTS", help="A JSON file of `pyspac lab sweep -o`.")]
Folder = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FOLDER", help="Write CSV and PNG figures there.")
]
