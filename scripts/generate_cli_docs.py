"""Write docs/cli.md from the commands' own help: `python scripts/generate_cli_docs.py [--check]`.

In: the options that `pyspac --help` shows. Out: docs/cli.md. With --check nothing is written, and the exit
code is 1 if the file is not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer

REPOSITORY: Final = Path(__file__).resolve().parent.parent
CLI_DOCS: Final = REPOSITORY / "docs" / "cli.md"

INTRODUCTION: Final = """# Command line

<!-- written by scripts/generate_cli_docs.py from the commands' help: change the help, then run it -->

    pyspac COMMAND [MODEL] [OPTIONS]

`run`, `chat`, `bench`, `trace` and `serve` pass all other flags, and everything after `--`, to `llama-server`
(`-np`, `--temp`, `--lora` ...). Flags have llama.cpp's names, except `--predict`, which names predictors (the
number of tokens is `-n`).

- A size is MiB (`8000`), GiB (`8G`), bytes (`8000B`), a share of all experts (`25%`) or `auto`.
- Exit codes: 0 done, 1 failed, 2 bad input (nothing is written), 130 stopped with Ctrl-C (figures so far are
  printed).
- Text goes to stdout, everything else to stderr; with `--json -` stdout holds only the JSON object.
- JSON fields end with their unit (`_bytes`, `_us`, `_ms`, `_s`, `_gb_s`: 10^9 bytes per second); shares are
  0 to 1.
"""


SPECIAL: Final = """## For measurements and special machines

`--help-all` of each lists its options.

| | | |
|---|---|---|"""

PAGES: Final = {
    "profile": "speculation.md#pyspac-profile",
    "quality": "policies.md#lossy-if-you-ask-for-it",
    "trace": "policies.md",
    "lab": "policies.md#running-the-lab",
    "train-head": "train-head.md",
    "attach": "serving.md#two-processes",
}

SHARED: Final = """## Options of several commands

| | |
|---|---|"""

JSON_FIELDS: Final = """## The object of `pyspac run --json`

`pyspac demo --json` writes `{"equal": ..., "split": ..., "stock": ..., "tps": ...}`, with two of them.
What was not measured is `null`. Without slots on a device only `experts.n_miss` counts.

| field | meaning |
|---|---|
| `mode` | `host` (own kernels: the default without a GPU), `split`, `stock` (llama.cpp) |
| `device`, `emulated` | ggml's name of the device; whether it, or its link's speed, is emulated |
| `model`, `draft`, `mtp` | files; `draft` and `mtp` (masks) are `null` unless they draft |
| `spec_type`, `draft_max`, `speculation` | what drafts, how many tokens at most, what chose the lengths |
| `kernels`, `n_ubatch` | the kernels' name (`null`: ggml); tokens of a prompt at once (`null`: `stock`) |
| `seed` | as given; 4294967295: none |
| `text`, `token_ids`, `n_tokens` | what was generated, without the end token |
| `stop_reason` | `eog`, `length`, `context` (full) or `interrupted` |
| `n_prompt`, `n_cached` | tokens of the prompt; those already in the cache |
| `ttft_ms`, `tpot_ms`, `tps` | time to the first token; per token after it; 1000 / `tpot_ms` |
| `n_steps`, `n_drafted`, `n_accepted` | steps (draft and verify cycles); drafted and accepted tokens |
| `acceptance_rate` | `n_accepted` / `n_drafted` |
| `acceptance_length` | tokens per step: 1 + `n_accepted` / `n_steps` |
| `experts.n_slots`, `.pool_bytes` | experts that fit on the device; memory for them |
| `experts.n_hit`, `.n_miss`, `.n_late` | distinct (layer, expert) asked for: on the device, not, in flight |
| `experts.n_loads`, `.n_evictions`, `.loaded_bytes` | copies to the device |
| `experts.n_staged`, `.staged_bytes`, `.staged_us`, `.stage_wait_us` | those for prompts |
| `experts.n_steps_with_both` | forward passes in which device and host experts both worked |
| `tier` | [experts on disk](memory-tier.md): slots, reads, waits; `null` if all are in memory |
| `prompt_read_bytes` | those of `tier`, before the first token; `null` without it, or in `Llama.stats()` |
| `devices[]` | [each device](devices.md#what-can-be-seen) |
| `threads` | [of the CPU](host-experts.md#beside-other-programs) |
| `router_weight_kept`, `kl_divergence` | [with `--lossy`, `--max-kl`](policies.md#lossy-if-you-ask-for-it) |
| `tau[]` | each layer's threshold |
| `layers.split`, `.declined` | layers whose experts the engine computes; `{reason: count}` of the others |
| `layers.unpinned` | split layers whose experts the device cannot read directly from host memory |
| `predictors[]` | [by name of `--predict`](look-ahead.md#what-the-figures-mean) |
| `scheduler.estimator`, `.step_us_p50`, `.step_us_p99` | estimator; the scheduler's time per step |
| `scheduler.balance` | times on host and device that the balancer measured; `null`: no device |
| `scheduler.copies` | [whether copies pay](policies.md#the-measured-fallback); `null`: does not apply |
| `.chosen` | `copies`; `frozen`: none; `whole`: only whole layers; `split`: copies, no whole layer |
| `.gain` | 0.05: 5 % faster than the best alternative; `null`: unknown |
| `.n_trials`, `.n_switches` | alternatives tried; taken |
| `scheduler.whole` | [whole layers](gpu.md#whole-layers); `null`: there can be none |
| `.layers`, `.predicted_gain` | which; 0.05: predicted to be 5 % faster than none |
| `.saved_us`, `.n_changes` | measured saving per forward, by device; times the choice changed |
| `decisions`, `costs` | with `--explain`: each change of mind; the times it rests on |
"""


def render(app: typer.Typer) -> str:
    """The whole page: what several commands have once, then a section per command with its own."""
    group: Any = typer.main.get_command(app)
    commands = [(name, command) for name, command, is_special in _commands(group) if not is_special]
    special = [(name, command) for name, command, is_special in _commands(group) if is_special]
    shared = _shared(commands)
    return "\n".join(
        [
            INTRODUCTION,
            *(
                SHARED,
                *map(_argument_row, shared.arguments.values()),
                *map(_row, shared.options.values()),
                "",
            ),
            *(_section(name, command, shared) for name, command in commands),
            _special(special),
            JSON_FIELDS,
        ]
    )


class _Shared(NamedTuple):
    """What several commands have with the same help, by that help."""

    arguments: dict[str, Any]
    options: dict[str, Any]


def _shared(commands: list[tuple[str, Any]]) -> _Shared:
    return _Shared(_repeated(commands, _arguments), _repeated(commands, _options))


def _repeated(commands: list[tuple[str, Any]], params_of: Callable[[Any], list[Any]]) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    for _name, command in commands:
        for param in params_of(command):
            found.setdefault(param.help, []).append(param)
    return {text: params[0] for text, params in found.items() if len(params) > 1}


def _arguments(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "argument"]


def _options(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "option" and not param.hidden]


def _commands(group: Any) -> Iterator[tuple[str, Any, bool]]:
    """Every command with its full name, a group's own instead of it, and whether it is a special one."""
    from pyspac.commands.grouped_help import MORE

    for name, command in group.commands.items():
        if command.hidden:
            continue
        is_special = getattr(command, "rich_help_panel", None) == MORE
        for sub, found in getattr(command, "commands", {"": command}).items():
            yield f"{name} {sub}".strip(), found, is_special


def _section(name: str, command: Any, shared: _Shared) -> str:
    arguments = _arguments(command)
    rows = [_argument_row(argument) for argument in arguments if argument.help not in shared.arguments]
    rows += [_row(option) for option in _options(command) if option.help not in shared.options]
    table = ["| | |", "|---|---|", *rows, ""] if rows else []
    own = any(argument.help not in shared.arguments for argument in arguments)
    usage = [f"    {_usage(name, command)}", ""] if own else []
    others = [f"`{option.opts[0]}`" for option in _options(command) if option.help in shared.options]
    also = [f"[Also](#options-of-several-commands): {', '.join(others)}.", ""] if others else []
    return "\n".join([f"## pyspac {name}", "", *usage, command.help, "", *table, *also])


def _special(commands: list[tuple[str, Any]]) -> str:
    """Commands for measurements and special machines: `pyspac --help` leaves them to --help-all, too."""
    rows = [
        f"| `{_usage(name, command)}` | {_summary(command)} | {_page(name)} |" for name, command in commands
    ]
    return "\n".join([SPECIAL, *rows, ""])


def _summary(command: Any) -> str:
    return str(command.help).partition("\n\n")[0].removesuffix(".")


def _page(name: str) -> str:
    page = PAGES[name.split()[0]]
    return f"[{page.partition('#')[0]}]({page})"


def _usage(name: str, command: Any) -> str:
    return " ".join(["pyspac", name, *map(_word, _arguments(command)), "[OPTIONS]"])


def _argument_row(argument: Any) -> str:
    return f"| `{argument.metavar}` | {argument.help} |"


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
