"""Train the demo pair: in goes the running Python's standard library, out come two Hugging Face folders.

Run it again with the same command to go on from the last checkpoint. Ctrl-C writes one and stops.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final

from pyspac.train.packages import missing_packages

# those of the extra `train`; without them there is still --help
PACKAGES: Final = ("torch", "tokenizers", "safetensors", "tqdm")
EXAMPLES: Final = """\
examples:
  python -m tools.train_demo                    a full run: 30 minutes, made for 2 free cores
  python -m tools.train_demo --minutes 10       a quick, worse pair
  python -m tools.train_demo --export-only      write the folders from the last checkpoint
  then, for each of demo-moe and demo-draft:
  python scripts/convert_to_gguf.py build/demo-models/demo-moe pyspac/models/demo-moe.gguf --quant Q4_K_M
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_demo",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--work-dir",
        type=Path,
        default=Path("build/demo-models"),
        metavar="DIR",
        help="tokenizer, checkpoint, log, results; kept between runs (default: %(default)s)",
    )
    add(
        "--minutes",
        type=float,
        default=30,
        help="training time; the learning rate reaches zero at its end (default: %(default)s)",
    )
    add(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="one-thread processes (default: all %(default)s cores)",
    )
    add("--vocab", type=int, default=3072, help="vocabulary size (default: %(default)s)")
    add(
        "--report-every",
        type=float,
        default=3,
        metavar="MINUTES",
        help="held-out losses and expert balance (default: %(default)s)",
    )
    add("--export-only", action="store_true", help="no training: export the last checkpoint")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if missing := missing_packages(PACKAGES):
        print(f"train_demo: {missing}", file=sys.stderr)
        return 2
    from tools.train_demo.common import UserError
    from tools.train_demo.run import train_and_export

    try:
        return train_and_export(args)
    except UserError as error:
        print(f"train_demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
