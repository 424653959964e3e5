#!/usr/bin/env python3
"""Train a drafter into a model: an adapter that makes mask tokens guess what the model will say next.

    MODEL_DIR -> texts that the model writes itself -> adapter -> scripts/convert_mtp_to_gguf.py -> GGUF

The model is not changed, and the adapter acts only at masks: ordinary tokens are computed as without it, to
the last bit in a batch of the same tokens. Behind the token at hand, K masks guess the K tokens that follow
the model's own next one, in the forward that verifies the guesses before. More: docs/gated-lora.md.

Run it again with the same command to go on from the last checkpoint. Ctrl-C writes one, reports and stops;
a second Ctrl-C leaves the report out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tools/
from pyspac.errors import UsageError
from pyspac.train.packages import missing_packages

# those of the extra `train`; without them there is still --help
PACKAGES: Final = ("torch", "transformers", "tokenizers", "safetensors", "tqdm")
EXAMPLES: Final = """\
examples:
  a model's Hugging Face folder, and a GGUF that was made of it:
    python scripts/train_mtp.py Qwen3-30B-A3B --text my-texts/ --work-dir build/qwen3-mtp
    python scripts/convert_mtp_to_gguf.py build/qwen3-mtp Qwen3-30B-A3B-Q4_K_M.gguf qwen3-mtp.gguf
    pyspac run -m Qwen3-30B-A3B-Q4_K_M.gguf --mtp qwen3-mtp.gguf -p "What is a router?"
  the demo's model, whose folder is made of its GGUF:
    python scripts/gguf_to_hf.py pyspac/models/demo-moe.gguf build/demo-hf
    python scripts/train_mtp.py build/demo-hf --work-dir build/demo-mtp
    python scripts/convert_mtp_to_gguf.py build/demo-mtp pyspac/models/demo-moe.gguf demo-mtp.gguf
    pyspac run -m pyspac/models/demo-moe.gguf --mtp demo-mtp.gguf -p "def main("

what to choose:
  --masks   4 is a good start: the fourth is right a third as often as the first
  --text    what the model will be used for: texts like your prompts; one piece in twenty is held out for the
            report. Without it, the model goes on from Python's standard library
  --rank    more is better and larger: 32 is 0.7 MB for the demo's model, 53 MB for Qwen3-30B-A3B
memory:
  the model's weights, 2 bytes each on a GPU (61 GB for Qwen3-30B-A3B), 4 bytes on a CPU; and what every layer
  computes for the tokens of a step, --rows * (192 + --groups * --masks) of them: 960 by default. Where that
  is too much, give a smaller --groups, or --rows 1
exit codes: 0 done, 1 the memory was too small, 2 something given cannot be used (the message says what),
            130 stopped by Ctrl-C"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "model",
        type=Path,
        metavar="MODEL_DIR",
        help="Hugging Face folder: config.json, *.safetensors, tokenizer",
    )
    add("--masks", type=int, default=4, metavar="K", help="tokens to draft at most (default: %(default)s)")
    add("--rank", type=int, default=32, help="rank of the adapter's matrices (default: %(default)s)")
    add("--minutes", type=float, default=20, help="time for training only (default: %(default)s)")
    add("--text", type=Path, metavar="PATH", help="text file or folder that the model's texts begin with")
    add(
        "--work-dir",
        type=Path,
        default=Path("build/mtp"),
        metavar="DIR",
        help="texts, checkpoint, log; kept between runs (default: %(default)s)",
    )
    add("--texts", type=int, default=2048, help="how many texts the model writes (default: %(default)s)")
    add("--rows", type=int, default=2, help="texts per step of the optimiser (default: %(default)s)")
    add("--groups", type=int, default=72, help="anchors per text (default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="highest learning rate (default: %(default)s)")
    add(
        "--report-every",
        type=float,
        default=5,
        metavar="MINUTES",
        help="held-out report (default: %(default)s)",
    )
    add(
        "--threads",
        type=int,
        default=1,
        help="of torch; more than one helps only if the cores are idle (default: %(default)s)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The exit code; see --help."""
    args = parse_args(argv)
    if missing := missing_packages(PACKAGES):
        print(f"train_mtp: {missing}", file=sys.stderr)
        return 2
    from tools.train_mtp.run import train

    try:
        return train(args)
    except UsageError as error:
        print(f"train_mtp: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a folder that is a file, a full disk
        print(f"train_mtp: {error.filename or args.work_dir}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before or after the training itself, which hears it and saves
        print("train_mtp: stopped; the same command goes on from what was saved", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
