"""Write docs/cli.md from the commands' own help: `python scripts/generate_cli_docs.py [--check]`.

In: the options that `pyspac --help` shows. Out: docs/cli.md. With --check nothing is written, and the exit
code is 1 if the file is not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer

REPOSITORY: Final = Path(__file__).resolve().parent.parent
CLI_DOCS: Final = REPOSITORY / "docs" / "cli.md"

INTRODUCTION: Final = """# Command line

<!-- written by scripts/generate_cli_docs.py from the commands' help: change the help, then run it -->

Flags have llama.cpp's names, except `--predict`, which names predictors (the number of tokens is `-n`).
`run`, `chat`, `bench`, `trace` and `serve` pass all other flags, and everything after `--`, on to
`llama-server` (`-t`, `-np`, `--temp`, `--lora` ...). Sizes are MiB (`8000`), GiB (`8G`), bytes
(`8000B`), a share of all experts (`25%`) or `auto`. Exit codes: 0 done, 1 failed, 2 bad input (nothing
is written), 130 stopped with Ctrl-C, after printing the figures so far. The text goes to stdout,
everything else to stderr; with `--json -` stdout holds only the JSON object.
"""


SHARED: Final = """## Options of several commands

| | |
|---|---|"""

JSON_FIELDS: Final = """## The object of `pyspac run --json`

`pyspac demo --json` writes `{"equal": ..., "split": ..., "stock": ...}`, with two of them. What was not
measured is `null`; without slots on a device only `experts.n_miss` counts.

| field | meaning |
|---|---|
| `mode` | `host` (no device, own kernels: the default without a GPU), `split`, `stock` (only llama.cpp) |
| `device`, `emulated` | ggml's name of the device; whether it, or the speed of its link, is emulated |
| `model`, `draft`, `mtp` | the files; `draft` and `mtp` (masks) are `null` unless they draft |
| `spec_type`, `draft_max` | who drafts, and how many tokens at most |
| `speculation` | what chose the draft lengths: `forecast`, `static`, ...; `null` where nothing drafts |
| `seed` | as given; 4294967295: none was |
| `text`, `token_ids`, `n_tokens` | what was generated, without the end token |
| `stop_reason` | `eog`, `length`, `context` (it is full) or `interrupted` |
| `n_prompt` | tokens of the prompt |
| `ttft_ms` | time to the first token: prompt processing |
| `tpot_ms`, `tps` | time per token after the first; tokens per second, 1000 / `tpot_ms` |
| `n_steps`, `n_drafted`, `n_accepted` | steps (draft and verify cycles); drafted and accepted tokens |
| `acceptance_rate` | `n_accepted` / `n_drafted` |
| `acceptance_length` | tokens per step: 1 + `n_accepted` / `n_steps` |
| `experts.n_slots`, `.pool_bytes` | experts that fit on the device at once; device memory for them |
| `experts.n_hit`, `.n_miss`, `.n_late` | distinct (layer, expert) asked for: on the device, not, in flight |
| `experts.n_loads`, `.n_evictions`, `.loaded_bytes` | copies to the device |
| `experts.n_staged`, `.staged_bytes`, `.staged_us`, `.stage_wait_us` | of these: for prompts |
| `experts.n_steps_with_both` | forward passes in which device and host experts both worked |
| `tier` | [experts on disk](memory-tier.md): slots, reads, waits; `null` where all are in memory |
| `prompt_read_bytes` | of `tier.read_bytes`: before the first token |
| `layers.split` | layers whose experts the engine computes: split, or with `mode` `host` by its kernels |
| `layers.declined` | `{reason: count}` of the others |
| `predictors[]` | one object per name of `--predict`: [look-ahead.md](look-ahead.md#what-the-figures-mean) |
| `layers.unpinned` | split layers whose experts the device cannot read directly from host memory |
| `scheduler.estimator`, `.step_us_p50`, `.step_us_p99` | estimator; the scheduler's time per step |
| `scheduler.copies` | [whether copies pay](policies.md#the-measured-fallback); `null`: does not apply |
| `.chosen` | `copies`; `frozen`: none; `whole`: only whole layers; `split`: copies, no whole layer |
| `.gain` | 0.05: 5 % faster than the best of the others; `null`: not known |
| `.n_trials`, `.n_switches` | times that another way was tried, and was taken |
| `scheduler.whole` | [whole layers](gpu.md#whole-layers); `null`: there can be none |
| `.layers`, `.predicted_gain` | which ones; 0.05: predicted to be 5 % faster than none |
| `.saved_us`, `.n_changes` | measured: what one saves per forward, by device; times others were wanted |
| `decisions`, `costs` | with `--explain`: each change of mind, by place; the times it rests on |
"""


def render(app: typer.Typer) -> str:
    """The whole page: options of several commands once, then a section per command with its own."""
    group: Any = typer.main.get_command(app)
    commands = list(_commands(group))
    shared = _shared(commands)
    return "\n".join(
        [
            INTRODUCTION,
            *(SHARED, *map(_row, shared.values()), ""),
            *(_section(name, command, shared) for name, command in commands),
            JSON_FIELDS,
        ]
    )


def _shared(commands: list[tuple[str, Any]]) -> dict[str, Any]:
    """Options that several commands have with the same help, by that help."""
    found: dict[str, list[Any]] = {}
    for _name, command in commands:
        for option in _options(command):
            found.setdefault(option.help, []).append(option)
    return {text: options[0] for text, options in found.items() if len(options) > 1}


def _options(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "option" and not param.hidden]


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command with its full name; a group's own commands instead of the group."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _section(name: str, command: Any, shared: dict[str, Any]) -> str:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    usage = " ".join(["pyspac", name, *map(_word, arguments), "[OPTIONS]"])
    rows = [f"| `{_word(param)}` | {param.help} |" for param in arguments]
    rows += [_row(option) for option in _options(command) if option.help not in shared]
    table = ["| | |", "|---|---|", *rows, ""] if rows else []
    others = [f"`{option.opts[0]}`" for option in _options(command) if option.help in shared]
    also = [f"[Also](#options-of-several-commands): {', '.join(others)}.", ""] if others else []
    return "\n".join([f"## pyspac {name}", "", f"    {usage}", "", command.help, "", *table, *also])


def _word(argument: Any) -> str:
    return str(argument.metavar if argument.required else f"[{argument.metavar}]")


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    value = f" `{_escape(option.metavar)}`" if option.metavar and not option.is_flag else ""
    return f"| {names}{value} | {_escape(option.help)}{_default(option)} |"


def _default(option: Any) -> str:
    if option.required:
        return " **Required.**"
    if option.is_flag or option.default in (None, "", []):
        return ""
    return f" Default: `{option.default}`."


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    from pyspac.cli import app

    text = render(app)
    if "--check" in sys.argv[1:]:
        return int(not CLI_DOCS.is_file() or CLI_DOCS.read_text(encoding="utf-8") != text)
    CLI_DOCS.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    sys.exit(main())
