"""Flags of llama.cpp's programs that a command here has not: what to do instead, in one sentence each.

They are found before the command line is parsed, as -fa would be read as `-f a`, and -ctk as `-c tk`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import typer

from pyspac.commands.grouped_help import GroupedCommand
from pyspac.errors import UsageError

_SERVER: Final = "a server has it: pyspac serve -m FILE -- {flag} ..."
_SAMPLING: Final = "sampling has --temp, --top-k, --top-p, --min-p and --seed here; " + _SERVER
_ADVICE: Final[tuple[tuple[str, str], ...]] = (
    (
        "-cmoe --cpu-moe -ncmoe --n-cpu-moe -ot --override-tensor",
        "leave it out: experts are on the host, and --cache SIZE is what some may take of a GPU's memory",
    ),
    ("-fa --flash-attn", "leave it out: llama.cpp chooses it itself"),
    ("-ctk --cache-type-k -ctv --cache-type-v", "the context's cache is F16 here; " + _SERVER),
    (
        "--mlock --mmap --no-mmap -lm --load-mode --no-repack",
        "leave it out: weights are copied into memory where they fit, and else stay in the file",
    ),
    (
        "--numa",
        "leave it out, and begin the command with numactl --interleave=all where there are several nodes",
    ),
    ("-b --batch-size -ub --ubatch-size -tb --threads-batch", "leave it out: what suits is chosen"),
    (
        "-sm --split-mode -mg --main-gpu",
        "name the devices with --device, such as --device CUDA0,CUDA1; whole layers are shared out, as "
        "--tensor-split says",
    ),
    (
        "-ts --tensor-split",
        "leave it out: run, chat, bench, profile and trace take shares of the layers, and serve after --",
    ),
    ("-ngl --gpu-layers --n-gpu-layers", "leave it out: all layers that can be are on the GPU"),
    (
        "--repeat-penalty --repeat-last-n --presence-penalty --frequency-penalty --typical --typical-p "
        "--mirostat --dry-multiplier --xtc-probability --samplers --grammar --grammar-file -j --json-schema "
        "--logit-bias --ignore-eos",
        _SAMPLING,
    ),
    (
        "-i --interactive -if --interactive-first -cnv --conversation -r --reverse-prompt",
        "pyspac chat is for talking",
    ),
    ("-no-cnv --no-conversation", "leave it out: pyspac run -p TEXT goes on with plain text"),
    ("-st --single-turn", "pyspac run --chat -p TEXT answers once"),
    ("--chat-template", "give a file with --chat-template-file; without it the model's own template is used"),
    (
        "--jinja --warmup --no-warmup --no-display-prompt --simple-io -co --color --perf --no-perf "
        "-e --escape",
        "leave it out",
    ),
    ("--lora --lora-scaled --control-vector --mmproj -mm --image --audio", _SERVER),
    ("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx", _SERVER),
    ("--draft --draft-n --spec-draft-n-max", "give --draft-max N"),
    ("--draft-min --draft-n-min --spec-draft-n-min", "leave it out: --speculation chooses how long to draft"),
    (
        "-ngld --gpu-layers-draft --n-gpu-layers-draft -devd --device-draft -cd --ctx-size-draft",
        "leave it out: the draft model is where the other one is",
    ),
    ("-hff --hf-file -mu --model-url", "name the file with -hf USER/MODEL:QUANT, or download it and give -m"),
    ("-mmu --mmproj-url -mmdev --mmproj-device -cram --cache-ram", _SERVER),
    (
        "-fit -fitt -fitc --fit -nkvo --no-kv-offload -kvo --kv-offload -nopo --no-op-offload --op-offload "
        "-sp --special -ptc --print-token-count -kvu --kv-unified",
        "leave it out",
    ),
    ("-mli --multiline-input", "in pyspac chat Alt+Enter begins a new line"),
    ("-sys --system-prompt -sysf --system-prompt-file", "pyspac chat has -sys TEXT"),
    (
        "--log-disable --log-file --log-colors -lv --log-verbosity --verbosity",
        "leave it out: llama.cpp's log is shown with -v alone, on stderr",
    ),
    ("--version", "pyspac --version shows it"),
    ("-td --threads-draft -ctkd -ctvd", "leave it out: the draft model runs as the other one does"),
    ("-np --parallel -cb --cont-batching --host --port --api-key", "that is for a server: pyspac serve"),
)
# flags of llama-bench, and of run, that mean something else in another command
_IN_COMMAND: Final = {
    "bench": {
        "-p": "leave it out: bench has four prompts of its own",
        "-r": "give --rounds N",
        "-pg": "leave it out: bench has four prompts of its own, and -n says how much is generated",
        "-o": "give --json FILE",
    },
    "chat": {
        "-p": "type it when the chat has begun; pyspac run --chat -p TEXT answers once",
        "-f": "pyspac run --chat -f FILE answers once",
    },
}
FLAGS: Final = {flag: advice for flags, advice in _ADVICE for flag in flags.split()}


def find_flag(
    command: str, arguments: Sequence[str], known: Collection[str], with_value: Collection[str]
) -> tuple[str, str] | None:
    """The first flag of llama.cpp's that is not `known` to the command, and what to do instead.

    What follows one of `with_value` is its value and may be anything.
    """
    own = _IN_COMMAND.get(command, {})
    for i, text in enumerate(arguments):
        flag = text.split("=", 1)[0]
        if text == "--":
            break
        if flag in known or (i > 0 and arguments[i - 1] in with_value):
            continue
        if advice := own.get(flag) or FLAGS.get(flag):
            return flag, advice.format(flag=flag)
    return None


def find_short_with_equals(arguments: Sequence[str], with_value: Collection[str]) -> str | None:
    """The first `-p=TEXT`, whose value would begin with the sign; None: there is none."""
    for i, text in enumerate(arguments):
        if text == "--":
            break
        is_value = i > 0 and arguments[i - 1] in with_value
        if not is_value and text[:2] in with_value and text[2:3] == "=":
            return text
    return None


def find_single_dash(
    arguments: Sequence[str], known: Collection[str], with_value: Collection[str]
) -> str | None:
    """The first long option with one dash, such as -temp, which would be read as `-t emp`; None: no such."""
    for i, text in enumerate(arguments):
        if text == "--":
            break
        flag = text.split("=", 1)[0]
        is_value = i > 0 and arguments[i - 1] in with_value
        if not is_value and flag not in known and f"-{flag}" in known:
            return flag
    return None


def check_short_options(arguments: Sequence[str], parameters: Sequence[Any]) -> None:
    """Say what to give instead of `-p=TEXT` and exit with 2, if there is one such."""
    if (text := find_short_with_equals(arguments, flags_with_value(parameters))) is None:
        return
    flag, value = text[:2], text[3:]
    long = [name for one in parameters if flag in one.opts for name in one.opts if name.startswith("--")]
    ways = " or ".join([f'{flag} "{value}"', *(f'{name}="{value}"' for name in long[:1])])
    typer.echo(
        f"pyspac: error: {text}: after a short option comes its value, without =: give {ways}", err=True
    )
    raise typer.Exit(UsageError.exit_code)


def flags_with_value(parameters: Sequence[Any]) -> set[str]:
    """The flags of a command after which a value follows."""
    return {name for one in parameters for name in one.opts if not getattr(one, "is_flag", False)}


class ModelCommand(GroupedCommand):
    """A command that runs a model, to which flags of llama.cpp are given by habit."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer, after a look at the flags."""
        known = {name for one in self.params for name in (*one.opts, *one.secondary_opts)}
        if found := find_flag(self.name or "", args, known, flags_with_value(self.params)):
            flag, advice = found
            typer.echo(f"pyspac: error: {self.name} has no option {flag}: {advice}", err=True)
            raise typer.Exit(UsageError.exit_code)
        if text := find_single_dash(args, known, flags_with_value(self.params)):
            typer.echo(f"pyspac: error: {self.name} has no option {text}: give -{text}", err=True)
            raise typer.Exit(UsageError.exit_code)
        check_short_options(args, self.params)
        return super().parse_args(ctx, args)
