"""A command line that runs a llama-server, as `ServeOptions`: of `run`, `chat` and `serve` alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyspac.checks import check_int
from pyspac.commands.model_names import hub_arguments
from pyspac.errors import UsageError
from pyspac.forward.options import CacheSize
from pyspac.model.memory_tier import given_ram
from pyspac.model.spec_types import parse_spec_type
from pyspac.scheduler.config import NO_PREDICTOR, parse_predictors
from pyspac.scheduler.policy import DEFAULT_POLICY, Policy
from pyspac.server.options import (
    MAX_TOKENS,
    AttachOptions,
    ServeOptions,
    drafting_of,
    names_draft,
)

# of a server with one client: one slot with all of the context, no prompts kept aside, no warm-up
OWN_FLAGS: Final = ("-np", "1", "--cache-ram", "0", "--no-warmup")
SERVE_ONLY: Final = ("--host", "--port", "--api-key", "--api-key-file", "--api-prefix", "--ssl-key-file")
_SERVER_FIELDS: Final = ("host", "port", "board", "max_batch", "restart", "keep", "keep_mib")
_ATTACH_FIELDS: Final = ("metrics_port", "metrics_host", "cpu_share", "warm_start", "log_json")


def serve_options(given: Mapping[str, Any], passed: Sequence[str]) -> ServeOptions:
    """Of `pyspac serve`. `given`: the command's parameters by their names; `passed`: for llama-server.

    Raises ConfigError.
    """
    fields = {name: given[name] for name in _SERVER_FIELDS} | {"drain_s": given["drain"]}
    return _options(given, tuple(passed), _attach_fields(given, _ATTACH_FIELDS), fields)


def own_options(given: Mapping[str, Any], passed: Sequence[str]) -> ServeOptions:
    """Of a command with a server of its own, as of `serve_options`. Raises ConfigError."""
    if "n_predict" in given:
        check_int("-n", given["n_predict"], -1, MAX_TOKENS)
    for text in passed:
        if text.partition("=")[0] in SERVE_ONLY:
            raise UsageError(f"{text} is for a server that others use: give it to pyspac serve")
    fields = {
        "stock": bool(given.get("stock")),
    }
    return _options(given, (*OWN_FLAGS, *passed), {"warm_start": False}, fields)


def _attach_fields(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: given[name] for name in names}


def _options(
    given: Mapping[str, Any], passed: tuple[str, ...], attach: dict[str, Any], fields: dict[str, Any]
) -> ServeOptions:
    passed = (*passed, *hub_arguments(given.get("hf_repo"), given.get("hf_repo_draft")))
    kind = parse_spec_type(given.get("spec_type"))
    draft, mtp = given.get("model_draft"), given.get("mtp")
    controller, n_draft_max = drafting_of(
        kind, passed, given.get("speculation"), given.get("draft_max"),
        has_draft=draft is not None or mtp is not None or names_draft(passed),
    )  # fmt: skip
    policy = Policy.read(DEFAULT_POLICY if given.get("policy") is None else given["policy"])
    predict = parse_predictors(given.get("predict") or NO_PREDICTOR, "--predict")
    config = policy.with_drafts(n_draft_max, predict)
    return ServeOptions(
        model=given.get("model"), draft=draft, mtp=mtp, spec_type=kind, rpc=given.get("rpc"),
        cache=CacheSize(text=given.get("cache") or "auto"), device=given.get("device") or "auto",
        lossy=given.get("lossy"), max_kl=given.get("max_kl"),
        ram=given_ram(given.get("ram"), is_stock=bool(fields.get("stock"))),
        host_kernels=given.get("host_kernels") or "auto", cpu_range=given.get("cpu_range"),
        n_ctx=given.get("ctx_size"), passed=passed, copy_gb_s=policy.copy_gb_s,
        attach=AttachOptions(scheduler=config, speculation=controller, **attach), **fields,
    )  # fmt: skip
