"""`pyspac quality`: what lossy modes cost in quality, as llama.cpp's llama-perplexity measures it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from pyspac.checks import check_int
from pyspac.commands import options as o
from pyspac.commands.common import (
    check_json_target,
    check_png,
    error_console,
    output_console,
    reports_errors,
)
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.commands.model_names import find_files
from pyspac.commands.quality_figure import Row, draw
from pyspac.errors import ConfigError, PyspacError, UsageError
from pyspac.forward.lossy import VARIABLE, check_can_be_lossy, check_lossy, copies_of
from pyspac.model.expert_copy import copies_bytes
from pyspac.model.geometry import read_geometry
from pyspac.model.gguf_header import read_header
from pyspac.model.memory_tier import asked_bytes
from pyspac.model.tensor_split import text_of
from pyspac.scheduler.baseline import VARIABLE as BASELINE
from pyspac.scheduler.baseline import check_baseline
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.policy import DEFAULT_POLICY, Policy
from pyspac.server.child import run_to_end
from pyspac.server.device_probe import probe_device
from pyspac.server.passed_on import check_passed
from pyspac.talk.remover import removed_if_killed

N_CTX: Final = 256
_ENGINE: Final = r"^(?:[\d.]+ )?(?:[A-Z] )?spac: "  # may follow the head of a line of llama.cpp's log thread
_REFUSED: Final = re.compile(rf"{_ENGINE}(.*)", re.MULTILINE)
_ATTACHED: Final = re.compile(rf"{_ENGINE}(\d+ of \d+ MoE layers split|experts stay on disk, )", re.MULTILINE)
_NUMBER: Final = r"\s*:\s*([-\d.]+|-?nan)"
_PATTERNS: Final = {
    "perplexity": re.compile(rf"Mean PPL\(Q\){_NUMBER}"),
    "perplexity_exact": re.compile(rf"Mean PPL\(base\){_NUMBER}"),
    "kl_divergence": re.compile(rf"Mean    KLD{_NUMBER}"),
    "same_top_share": re.compile(rf"Same top p{_NUMBER}"),
    "tokens_per_s": re.compile(r"prompt eval time =.*?([\d.]+) tokens per second"),
}

Text = Annotated[Path, typer.Option("-f", "--file", metavar="FILE", help="The text to measure on.")]
Rules = Annotated[
    list[str],
    typer.Option(
        "--lossy",
        metavar="KIND:STRENGTH",
        help="A rule, as of pyspac run: drop:N, lowbit:N:FILE, substitute:X, route:X; repeat for more rows.",
    ),
]
Context = Annotated[int, typer.Option("-c", "--ctx-size", metavar="N", help="Tokens of a piece of the text.")]


@reports_errors
def quality(
    file: Text,
    lossy: Rules,
    model_word: o.ModelWord = None,
    model: o.Model = None,
    hf_repo: o.HfRepo = None,
    cache: o.Cache = "auto",
    ram: o.Ram = None,
    device: o.Device = "auto",
    policy: o.Policy = DEFAULT_POLICY,
    ctx_size: Context = N_CTX,
    png: o.Png = None,
    json_file: o.JsonFile = None,
) -> None:
    """Measure what --lossy costs: perplexity, KL divergence and top-1 agreement with exact computation.

    llama.cpp's llama-perplexity reads the text token by token, once exactly and once for each rule.
    Example: pyspac quality MODEL.gguf -f TEXT --ram 8G --lossy drop:4 --lossy drop:2
    """
    from pyspac._native import bin_dir  # loaded here: --help needs no programs

    check_json_target(json_file)
    check_png(png)
    check_int("-c", ctx_size, 16, 1 << 20)
    _check_text(file)
    rules = list(dict.fromkeys(lossy))
    for rule in rules:
        check_lossy(rule, stock=False)
    check_passed(bin_dir(), ())  # llama-perplexity reads the same variables
    target, _ = find_files(model, hf_repo)
    env = _engine_env(target, cache, ram, device, rules) | _policy_env(policy, ram)
    with tempfile.TemporaryDirectory(prefix="pyspac-") as folder, removed_if_killed([Path(folder)]):
        base = Path(folder) / "exact.kld"
        argv = _argv(target, ram, ctx_size, base)
        _say("exact")
        exact = _perplexity([*argv, "-f", str(file)], env)
        if not base.exists() or base.stat().st_size < N_CTX:
            wanted = f"give a text of {2 * ctx_size} tokens or more, or a smaller -c"
            raise UsageError(f"{file} is too short: {wanted}")
        rows = [_measured(rule, [*argv, "--kl-divergence"], env) for rule in rules]
    exact_per_s = float(_found("tokens_per_s", exact))
    if json_file != STDOUT:
        output_console().print(_table(rows, exact_per_s))
    if png is not None:
        draw(rows, exact_per_s, png)
    if json_file is not None:
        found = {
            "model": str(target),
            "n_ctx": ctx_size,
            "exact_tokens_per_s": exact_per_s,
            "rows": [asdict(row) for row in rows],
        }
        write_json(json_file, found)


def _check_text(file: Path) -> None:
    """Raise ConfigError unless llama-perplexity can read it, which aborts at other bytes than UTF-8."""
    try:
        file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("-f", str(file), f"a text file in UTF-8 ({error})") from error


def _engine_env(model: Path, cache: str, ram: str | None, device: str, rules: list[str]) -> dict[str, str]:
    """For the engine in llama-perplexity, whose own policy places the experts. Raises UsageError."""
    header = read_header(model)
    geometry = read_geometry(header)
    if not geometry.is_moe:
        raise UsageError(f"{model} has no experts that could be left out: give a Mixture-of-Experts model")
    is_host = not probe_device(device, None, lambda: False).has_cache  # auto may find none
    ram_bytes = None if ram is None else asked_bytes(ram, geometry)
    is_all = ram_bytes is not None and ram_bytes >= geometry.experts_bytes
    for rule in rules:
        check_can_be_lossy(rule, is_host_only=is_host, ram_bytes=None if is_all else ram_bytes)
        copies_bytes(copies_of(rule), header)  # refuses other models' files
    env = {
        "PYSPAC_CACHE": "auto" if is_host else cache,
        "PYSPAC_DEVICE": device,
    }
    if any(copies_of(rule) for rule in rules):
        env["PYSPAC_HOST_KERNELS"] = "spac"  # for the exact pass, too: copies have no others
    return env if ram_bytes is None else env | {"PYSPAC_RAM": f"{ram_bytes}B"}


def _policy_env(text: str, ram: str | None) -> dict[str, str]:
    """EVICTION+MISS, and the speed of an emulated link. Raises UsageError."""
    policy = Policy.read(text)
    baseline = policy.config.baseline
    if replace(policy.config, baseline=None) != SchedulerConfig():
        raise UsageError(f"--policy {text} needs a scheduler, which quality has not: give EVICTION+MISS")
    check_baseline("--policy", policy.config, stock=False, ram_bytes=None if ram is None else 1)
    speeds = {"PYSPAC_COPY_GB_S": text_of(policy.copy_gb_s)} if policy.copy_gb_s else {}
    return speeds if baseline is None else speeds | {BASELINE: baseline}


def _argv(model: Path, ram: str | None, n_ctx: int, base: Path) -> list[str]:
    from pyspac._native import bin_dir  # loaded here: --help needs no programs

    argv = [str(bin_dir() / "llama-perplexity"), "-m", str(model), "-c", str(n_ctx), "-b", str(n_ctx)]
    # a token at a time, as text is written: a prompt's wide batches would be exact
    argv += ["-ub", "1", "--no-repack", "--perf", "-lv", "4", "--kl-divergence-base", str(base)]
    return argv if ram is None else [*argv, "--lazy-mode", "experts", "--no-warmup"]


def _measured(rule: str, argv: Sequence[str], env: Mapping[str, str]) -> Row:
    _say(rule)
    output = _perplexity(argv, {**env, VARIABLE: rule})
    found: dict[str, Any] = {name: float(_found(name, output)) + 0.0 for name in _PATTERNS}  # 0.0: no -0
    return Row(lossy=rule, **found | {"same_top_share": found["same_top_share"] / 100})


def _found(name: str, output: str) -> str:
    match = _PATTERNS[name].search(output)
    if match is None:
        raise PyspacError(f"llama-perplexity says no {name}: {output.strip()[-300:]}")
    return match[1]


def _perplexity(argv: Sequence[str], env: Mapping[str, str]) -> str:
    done = run_to_end("llama-perplexity", argv, env=env)
    output = done.stdout + done.stderr
    if done.exit_code != 0:
        lines = output.splitlines()
        refusals = _REFUSED.findall(output)
        # llama.cpp's own line about it may be lost, as a thread of its log writes it
        if refusals and not _ATTACHED.search(output):
            raise UsageError(refusals[-1])
        why = [line for line in lines if "spac:" in line] or [line for line in lines if " E " in line]
        why = why or lines[-3:] or ["no reason"]
        raise PyspacError(f"llama-perplexity ended with {done.exit_code}: {' '.join(why[-3:])}")
    return output


def _say(rule: str) -> None:
    console = error_console()
    if console.is_terminal:
        console.print(f"measuring: {rule}")


def _table(rows: Sequence[Row], exact_per_s: float) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("--lossy", overflow="fold")
    for name in ("perplexity", "exact", "KL divergence", "same best token", "tokens/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.lossy, f"{row.perplexity:.4f}", f"{row.perplexity_exact:.4f}", f"{row.kl_divergence:.5f}",
            f"{row.same_top_share:.2%}", f"{row.tokens_per_s:.1f}",
        )  # fmt: skip
    table.add_row("none", "", "", "", "", f"{exact_per_s:.1f}")
    return table
