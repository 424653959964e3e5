"""Makes every table and figure of docs/policies.md, from the two routing traces that it names.

    python benchmarks/policy_tables.py --traces DIR            rewrites docs/policies.md and its figures
    python benchmarks/policy_tables.py --traces DIR --check    writes nothing; exit code 1 if tables differ

DIR holds qwen.route.csv and gemma.route.csv; the third trace, of the demo model, is in tests/data. Routing is
replayed, times are predicted, drafts are emulated; each table says so, and what it assumes. Runs that were
made already, by this code and of these traces, are taken from build/policy-tables.jsonl: stop it and start it
again as you like. About 300 runs, 4 minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

from policy_bench import DEMO, FILES, Bench, Row
from policy_sections import FIGURES, SECTIONS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pyspac.errors import ConfigError, PyspacError
from pyspac.lab.job import Job
from pyspac.lab.sweep import run_all

ROOT = Path(__file__).resolve().parents[1]
DEMO_TRACE = ROOT / "tests" / "data" / "demo-trace.parquet"
SOURCES = sorted(
    [
        *(ROOT / "pyspac").glob("*.py"),
        *(path for room in ("engine", "scheduler", "lab") for path in (ROOT / "pyspac" / room).rglob("*.py")),
    ]
)
MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help=f"folder with {', '.join(FILES.values())}")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs/policies.md", help="file with the tables")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs", help="folder for the figures")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/policy-tables.jsonl", help="runs so far")
    parser.add_argument("--only", default="", help="names of tables, with commas; no figures then")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: one per core")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if tables differ")
    return parser.parse_args()


def find_traces(folder: Path) -> dict[str, Path]:
    """Return the traces by name; ConfigError names the first that is missing."""
    traces = {name: folder / file for name, file in FILES.items()} | {DEMO: DEMO_TRACE}
    for path in traces.values():
        if not path.is_file():
            raise ConfigError("--traces", str(folder), f"a folder with {path.name}")
    return traces


class Cache:
    """Results of runs, one JSON object per line; a run's key holds its settings, the code and the trace."""

    def __init__(self, path: Path, traces: dict[str, Path]) -> None:
        """Read what is there; a line that was cut off is left out."""
        self.path = path
        code = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()
        self.digests = {
            str(trace): code + hashlib.sha256(trace.read_bytes()).hexdigest() for trace in traces.values()
        }
        self.rows: dict[str, Row] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            self.rows[entry["key"]] = entry["row"]

    def key(self, job: Job) -> str:
        return hashlib.sha256(f"{job!r} {self.digests[job.replay.source]}".encode()).hexdigest()

    def fill(self, jobs: list[Job], n_workers: int) -> dict[Job, Row]:
        """Run what is missing, write it down as it comes, and return the rows of all jobs."""
        keys = {job: self.key(job) for job in jobs}
        missing = [job for job in jobs if keys[job] not in self.rows]
        if not missing:
            return {job: self.rows[key] for job, key in keys.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file, progress() as bar:
            file.write("\n")  # the last line may have been cut off
            task = bar.add_task("runs", total=len(jobs), completed=len(jobs) - len(missing))
            for index, row in run_all(missing, n_workers):
                key = keys[missing[index]]
                self.rows[key] = row
                file.write(json.dumps({"key": key, "row": row}) + "\n")
                file.flush()
                bar.advance(task)
        return {job: self.rows[key] for job, key in keys.items()}


def progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def replace_tables(text: str, tables: dict[str, str]) -> str:
    """Put the tables between their markers; ConfigError if a table has none."""
    missing = sorted(tables.keys() - {found["name"] for found in MARKED.finditer(text)})
    if missing:
        raise ConfigError("--docs", missing[0], "tables with a place: <!-- table: NAME --> <!-- /table -->")

    def put(found: re.Match[str]) -> str:
        new = tables.get(found["name"])
        return found[0] if new is None else f"{found[1]}{new}\n{found[3]}"

    return MARKED.sub(put, text)


def make_tables(bench: Bench, names: list[str]) -> dict[str, str]:
    tables = {}
    for name in names:
        bench.seen.clear()
        body = SECTIONS[name](bench)
        tables[name] = f"{bench.made_of()}\n\n{body}"
    return tables


def update(args: argparse.Namespace) -> int:
    traces = find_traces(args.traces)
    names = [name.strip() for name in args.only.split(",") if name.strip()] or list(SECTIONS)
    unknown = sorted(set(names) - SECTIONS.keys())
    if unknown:
        raise ConfigError("--only", unknown[0], ", ".join(SECTIONS))
    figures = {} if args.only or args.check else FIGURES
    bench = Bench(traces)
    make_tables(bench, names)
    for rows, _ in figures.values():
        rows(bench)
    before = args.docs.read_text(encoding="utf-8")
    replace_tables(before, dict.fromkeys(names, ""))  # whether all have a place, before they are made
    bench = Bench(traces, Cache(args.cache, traces).fill(list(bench.wanted), args.jobs))
    after = replace_tables(before, make_tables(bench, names))
    if args.check:
        print(f"{args.docs}: {'as it should be' if before == after else 'tables would change'}")
        return int(before != after)
    args.docs.write_text(after, encoding="utf-8")
    print(f"{args.docs}: {len(names)} tables, {'unchanged' if before == after else 'rewritten'}")
    for file, (rows, draw) in figures.items():
        print(f"{draw(rows(bench), args.figures / file)}: drawn")
    return 0


def main() -> int:
    try:
        return update(parse_arguments())
    except (PyspacError, OSError) as error:
        print(f"policy_tables: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
