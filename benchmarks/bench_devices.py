"""Loads, coverage and waits per device: one, two equal ones, and two of which one has a slower link.

The devices are ggml-rpc-servers on this machine, which compute on its CPU, and their links are emulated: the
numbers say how experts are shared out, and nothing about the speed of GPUs. No layer is held whole: the one
device has slots for that, the two have not. Needs only the demo models:

    python benchmarks/bench_devices.py --rounds 5
    python benchmarks/bench_devices.py --json -
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from machine import describe, one_line

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.rpc_servers import rpc_server  # noqa: E402

MODEL = ROOT / "pyspac" / "models" / "demo-moe.gguf"
PROMPT = "def parse(self, text):\n"
CACHE = "25%"  # of the experts of a device's layers
# emulated links, in 1e9 bytes/s: an expert of the demo takes 0.07 ms, by the slow one 35 ms, a few steps
CASES = {"one": "1", "two equal": "1,1", "two unequal": "1,0.002"}
EQUAL_SHARES = "3,4"  # of the demo's six layers and its output
SUMMED = ("n_loads", "loaded_bytes", "wait_s", "coverage")


def run_once(case: str, endpoints: list[str], n_predict: int) -> dict[str, Any]:
    """One run, as `pyspac run --json` says it."""
    links = CASES[case]
    rpc = ",".join(endpoints[: links.count(",") + 1])
    argv = [sys.executable, "-m", "pyspac", "run", "-m", MODEL, "-p", PROMPT, "-n", n_predict, "--temp", 0,
            "-t", 1, "--rpc", rpc, "--cache", CACHE, "--policy", f"without=['whole']\ncopy_gb_s=[{links}]",
            "--json", "-",
            *(["-ts", EQUAL_SHARES] if "," in rpc else [])]  # fmt: skip
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{case}: pyspac run exited with {done.returncode}: {done.stderr.strip()[-500:]}")
    return dict(json.loads(done.stdout))


def row_of(case: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds, of the run and of each device."""
    devices = []
    for index, first in enumerate(runs[0]["devices"]):
        of_rounds = [run["devices"][index] for run in runs]
        medians = {name: statistics.median(device[name] for device in of_rounds) for name in SUMMED}
        fixed = {name: first[name] for name in ("name", "n_layers", "n_slots")}
        links = [device["link_gb_s"] for device in of_rounds if device["link_gb_s"] is not None]
        devices.append(fixed | medians | {"link_gb_s": statistics.median(links) if links else None})
    return {
        "case": case,
        "emulated_links_gb_s": [float(text) for text in CASES[case].split(",")],
        "n_rounds": len(runs),
        "tokens_per_s": statistics.median(run["tps"] for run in runs),
        "devices": devices,
        "texts_equal": len({tuple(run["token_ids"]) for run in runs}) == 1,
    }


def measure(n_rounds: int, n_predict: int) -> list[dict[str, Any]]:
    """The cases take turns."""
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    with ExitStack() as stack:
        endpoints = [f"127.0.0.1:{stack.enter_context(rpc_server())}" for _ in range(2)]
        for _ in range(n_rounds):
            for case in CASES:
                runs[case].append(run_once(case, endpoints, n_predict))
    return [row_of(case, of_case) for case, of_case in runs.items()]


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"devices and links are emulated; {one_line(describe())}")
    print("case         device  link GB/s layers slots  loads  covered  waited s")
    for row in rows:
        for device, link in zip(row["devices"], row["emulated_links_gb_s"], strict=True):
            print(
                f"{row['case']:12} {device['name']:7} {link:9g} {device['n_layers']:6} {device['n_slots']:5} "
                f"{device['n_loads']:6g} {device['coverage']:8.1%} {device['wait_s']:9.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-n", type=int, default=200, help="tokens of a run")
    parser.add_argument("--json", metavar="FILE", help="rows, one object per line; -: to stdout, no table")
    arguments = parser.parse_args()
    rows = measure(arguments.rounds, arguments.n)
    if arguments.json != "-":
        print_table(rows)
    if arguments.json:
        text = "".join(json.dumps(row | {"machine": describe()}) + "\n" for row in rows)
        sys.stdout.write(text) if arguments.json == "-" else Path(arguments.json).write_text(text)


if __name__ == "__main__":
    main()
