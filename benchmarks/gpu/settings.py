"""What a run of the GPU benchmark was asked for. Standard library only: wheels are unpacked later."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
PHASES = ("build", "tests", "model", "measure", "timeline", "compare")
DEFAULT_BUDGET_S = 570.0  # ends inside ten minutes

EPILOG = """\
phases, in this order; each is skipped with a reason if it cannot run or if the time is over:
  build     cmake and ninja, for the GPU that is present; kept, so that a second command starts at once
  tests     the engine's tests, logits of the split against stock, compute-sanitizer on the patched kernels
  model     a model of random weights in a real model's shape
  measure   GB/s of host memory and of the link
  timeline  when device, host experts and copies are at work: spans and a figure
  compare   stock, tuned --n-cpu-moe and the split, in turns, at equal device memory for experts

examples:
  run.py                                            everything, ten minutes
  run.py --phases build                             first command on a bare machine
  run.py --phases tests                             second command: the build is kept
  run.py --phases model,measure,timeline,compare    third command
  run.py --phases compare --arms stock-sd,split-ema --rounds 9
  run.py --device cpu --no-build --like small --layers 2 --budget 60      a rehearsal without a GPU (emulated)
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All values as plain types, so that they travel to the phases' processes as JSON."""

    device: str = "auto"
    rpc: str | None = None
    phases: tuple[str, ...] = PHASES
    budget_s: float = DEFAULT_BUDGET_S
    work: str = str(REPOSITORY / "build" / "gpu")  # build, model and other things that are kept
    out: str | None = None  # None: benchmarks/results; with the CPU as the device, a folder in `work`
    no_build: bool = False
    build_dir: str | None = None  # of cmake; None: in `work`
    jobs: int = 0
    flash_attention: bool = True
    like: str = "qwen3-30b-a3b"
    layers: int | None = None  # None: all, fewer if time is short
    model: str | None = None
    threads: int = 0
    split_threads: int = 0  # of the host's experts; 0: as the engine chooses
    cache: str = "17%"
    copy_gb_s: float = 0.0
    draft_max: int = 4
    acceptance: float = 0.75
    draft_ms: float = 0.0
    tokens: int = 128
    warm_up: int = 64
    rounds: int = 5
    arms: tuple[str, ...] = ()  # (): all
    sanitizer: bool = True
    seed: int = 0

    @property
    def cmake_dir(self) -> Path:
        return Path(self.build_dir) if self.build_dir else Path(self.work) / "cmake"

    def out_folder(self, is_real: bool) -> Path:
        """Rows and figures; those of rehearsals stay out of benchmarks/results."""
        if self.out:
            return Path(self.out)
        return REPOSITORY / "benchmarks" / "results" if is_real else Path(self.work) / "results"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**{**values, "phases": tuple(values["phases"]), "arms": tuple(values["arms"])})


def parse(argv: list[str] | None = None) -> Settings:
    """Read the command line; argparse ends the process with 2 on a wrong one."""
    parser = make_parser()
    args = parser.parse_args(argv)
    values = {field.name: getattr(args, field.name) for field in fields(Settings)}
    settings = Settings(**values)
    complaint = what_is_wrong(settings)
    if complaint:
        parser.error(complaint)
    return settings


def what_is_wrong(s: Settings) -> str | None:
    """The first value that cannot be, and what is allowed."""
    unknown = [name for name in s.phases if name not in PHASES]
    if unknown:
        return f"--phases {','.join(unknown)}: unknown; known: {', '.join(PHASES)}"
    if not 0 <= s.acceptance <= 1:
        return f"--acceptance {s.acceptance}: a probability, 0 to 1"
    if not 1 <= s.draft_max <= 15:
        return f"--draft-max {s.draft_max}: 1 to 15"
    if s.tokens < 8 or s.warm_up < 1 or s.rounds < 1:
        return "--tokens at least 8, --warm-up and --rounds at least 1"
    if s.model and not Path(s.model).is_file():
        return f"--model {s.model}: no such file"
    return None


def names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Build, test and measure pyspac on a CUDA machine, in ten minutes and without a network.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    d = Settings()
    add_general(parser, d)
    add_build(parser.add_argument_group("build"), d)
    add_model(parser.add_argument_group("model"), d)
    comparison = parser.add_argument_group("comparison")
    add_memory_and_drafts(comparison, d)
    add_visits(comparison, d)
    return parser


def add_general(parser: argparse.ArgumentParser, d: Settings) -> None:
    add = parser.add_argument
    add("--phases", type=names, default=PHASES, metavar="LIST", help="which phases (default: all)")
    add(
        "--budget",
        dest="budget_s",
        type=float,
        default=d.budget_s,
        metavar="S",
        help=f"seconds for everything (default: {d.budget_s:.0f})",
    )
    add("--device", default=d.device, help="auto (the GPU), cpu (emulated), or a name such as CUDA0")
    add("--rpc", metavar="HOST:PORT", help="use the device of a ggml-rpc-server")
    add("--work", default=d.work, metavar="DIR", help="what is kept between commands (default: build/gpu)")
    add(
        "--out",
        default=d.out,
        metavar="DIR",
        help="rows (default: benchmarks/results; of rehearsals, a folder in --work)",
    )


def add_build(build: argparse._ArgumentGroup, d: Settings) -> None:
    build.add_argument("--no-build", action="store_true", help="use the build that `make build` made")
    build.add_argument("--build-dir", metavar="DIR", help="cmake's folder (default: in --work)")
    build.add_argument("--jobs", type=int, default=d.jobs, help="compilations at once (default: all cores)")
    build.add_argument(
        "--no-flash-attention",
        dest="flash_attention",
        action="store_false",
        help="leave those kernels out: about half the build time; stock is then slower as well",
    )
    build.add_argument("--no-sanitizer", dest="sanitizer", action="store_false", help="no compute-sanitizer")


def add_model(model: argparse._ArgumentGroup, d: Settings) -> None:
    model.add_argument("--like", default=d.like, metavar="NAME", help=f"its shape (default: {d.like})")
    model.add_argument("--layers", type=int, help="layers (default: all; fewer if time or memory is short)")
    model.add_argument("--model", metavar="FILE", help="a GGUF file instead of a synthetic one")


def add_memory_and_drafts(runs: argparse._ArgumentGroup, d: Settings) -> None:
    runs.add_argument(
        "--cache",
        default=d.cache,
        metavar="SIZE",
        help=f"device memory for experts, 17%% or MiB (default: {d.cache.replace('%', '%%')})",
    )
    runs.add_argument(
        "--copy-gb-s",
        type=float,
        default=d.copy_gb_s,
        metavar="GB/S",
        help="slow copies down to this speed, to emulate a slower link; 0: no (default)",
    )
    runs.add_argument("--draft-max", type=int, default=d.draft_max, help=f"default: {d.draft_max}")
    runs.add_argument(
        "--acceptance",
        type=float,
        default=d.acceptance,
        metavar="P",
        help=f"that a drafted token is the right one (default: {d.acceptance})",
    )
    runs.add_argument(
        "--draft-ms",
        type=float,
        default=d.draft_ms,
        metavar="MS",
        help="time that drafting one token is made to take (default: 0)",
    )


def add_visits(runs: argparse._ArgumentGroup, d: Settings) -> None:
    runs.add_argument(
        "--tokens", type=int, default=d.tokens, help=f"measured per visit (default: {d.tokens})"
    )
    runs.add_argument(
        "--warm-up",
        type=int,
        default=d.warm_up,
        metavar="N",
        help=f"tokens before them, not measured (default: {d.warm_up})",
    )
    runs.add_argument(
        "--rounds", type=int, default=d.rounds, help=f"default: {d.rounds}, fewer if time is short"
    )
    runs.add_argument("--arms", type=names, default=(), metavar="LIST", help="only these; see arms.py")
    runs.add_argument(
        "--threads", type=int, default=0, help="CPU threads (default: the better of two counts)"
    )
    runs.add_argument(
        "--split-threads",
        type=int,
        default=0,
        metavar="N",
        help="of the engine's host experts (default: the engine's own, one less than stock's above 4)",
    )
    runs.add_argument("--seed", type=int, default=0, help="of the drafts (default: 0)")
