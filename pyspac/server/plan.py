"""ServeOptions in, what one start needs out (a Plan): all checks come before anything is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from pyspac._native import bin_dir
from pyspac.engine.ahead import DRAFT_GATE
from pyspac.engine.devices import Device, fits_memory
from pyspac.engine.limits import check_max_batch, check_n_threads
from pyspac.engine.rpc import split_endpoints
from pyspac.engine.rpc_servers import servers_that_fail
from pyspac.engine.values import read_device_kind
from pyspac.errors import ConfigError
from pyspac.forward.lossy import check_can_be_lossy, copies_of
from pyspac.forward.no_device import can_predict, check_can_predict
from pyspac.forward.options import CacheSize, ForwardOptions
from pyspac.forward.preflight import Preflight, check_run, has_own_kernels
from pyspac.model.checks import check_model_file
from pyspac.model.device_needs import N_UBATCH, Needs, estimate_needs
from pyspac.model.draft_files import check_drafter, gate_layers
from pyspac.model.expert_copy import copies_bytes
from pyspac.model.geometry import read_geometry
from pyspac.model.memory_tier import choose_ram
from pyspac.model.spec_types import DRAFT_MTP, names_of
from pyspac.model.tensor_split import check_reach
from pyspac.scheduler.baseline import check_baseline
from pyspac.scheduler.policy import FLAG as POLICY
from pyspac.server import board_file, log
from pyspac.server.arguments import Launch, given_threads, withheld
from pyspac.server.at_once import choose_n_ubatch, most_at_once
from pyspac.server.build_extras import build_extras
from pyspac.server.device_probe import probe_device
from pyspac.server.download import ModelFiles, find_models
from pyspac.server.health import choose_port, overlap
from pyspac.server.keep import prepare_folder
from pyspac.server.masks import MAX_SEQUENCES, fit_masks
from pyspac.server.memory import (
    check_n_ctx,
    choose_cache,
    choose_server_n_ctx,
    why_tight,
)
from pyspac.server.options import (
    GPU_LAYERS_FLAGS,
    OTHER_THREADS_FLAGS,
    TENSOR_SPLIT_FLAGS,
    THREADS_FLAGS,
    ServeOptions,
)
from pyspac.server.passed_on import check_environment, check_overrides, check_passed, check_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What follows from the models' headers and the device."""

    cache: str
    n_ctx: int
    is_copied: bool
    model_bytes: int
    n_ubatch: int = N_UBATCH
    has_engine: bool = True
    ram_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One start; `options` are those that were given, on the device that was found."""

    options: ServeOptions
    launch: Launch


def plan_launch(options: ServeOptions, is_stopped: Callable[[], bool]) -> Plan:
    """Raises ConfigError or ModelError; no server has been started then. `is_stopped` ends a download."""
    if options.max_batch is not None:
        check_max_batch("--max-batch", options.max_batch)
    if (text := given_threads(options)).isdecimal():
        check_n_threads(THREADS_FLAGS[0], int(text), 1)
    for flags in OTHER_THREADS_FLAGS:
        if (text := options.passed_value(*flags)).isdecimal():
            check_n_threads(flags[0], int(text), 0)
    if (n_slots := options.n_server_slots) > MAX_SEQUENCES:
        raise ConfigError("-np", n_slots, f"a number of server slots from 1 to {MAX_SEQUENCES}")
    check_environment(os.environ)
    folder = bin_dir()
    extras = build_extras(folder)
    check_passed(folder, options.passed, withheld(options))
    check_values(options)
    if options.board is not None:
        board_file.check_free(options.board)
    port = 0 if options.socket else choose_port(options.host, options.port)
    if port == options.attach.metrics_port and overlap(options.host, options.attach.metrics_host):
        raise ConfigError("--metrics-port", port, "another port: llama-server listens at this one (--port)")
    board = options.board or f"server-{port}"
    board_file.check_free(board)
    if options.attach.metrics_port:
        choose_port(options.attach.metrics_host, options.attach.metrics_port, "--metrics-port")
    if options.keep is not None:
        prepare_folder(options.keep)
    device = probe_device(options.device, options.rpc, is_stopped, is_split=not options.stock)
    is_auto = read_device_kind(options.device) == "auto"
    options = options.on(device)
    options = replace(options, attach=replace(options.attach, spec_type=options.wanted_spec_type))
    files = find_models(options, folder, is_stopped)
    sizes = _sizes(options, files, device)
    if options.mtp is not None:
        options = fit_masks(options, check_model_file(files.model), has_engine=sizes.has_engine)
    launch = Launch(
        port=port,
        board=board,
        cache=sizes.cache,
        devices=device.name if is_auto and (device.parts or options.rpc) else None,
        n_devices=_n_devices(options.rpc, device),
        n_ctx=sizes.n_ctx,
        n_ubatch=sizes.n_ubatch,
        is_copied=sizes.is_copied,
        model_bytes=sizes.model_bytes,
        has_page=extras.ui,
        has_engine=sizes.has_engine,
        ram_bytes=sizes.ram_bytes,
        model=files.model,
        device=device.name,
    )
    return Plan(options=options, launch=launch)


def _n_devices(rpc: str | None, device: Device) -> tuple[int, ...]:
    """How many each server has of those that were found: ggml describes them by their server's address."""
    endpoints = [] if rpc is None else split_endpoints(rpc)
    return tuple(sum(part.description == endpoint for part in device.each) for endpoint in endpoints)


def without_lost(given: ServeOptions, n_devices: Sequence[int]) -> ServeOptions:
    """The same without RPC servers that do not answer any more, as long as one does.

    `n_devices`: of each server, when all were there: what is given for each device goes with them. Where
    devices are named all stay: the names of the rest would change.
    """
    endpoints = [] if given.rpc is None else split_endpoints(given.rpc)
    if len(endpoints) < 2 or read_device_kind(given.device) != "auto":
        return given
    failing = servers_that_fail(endpoints)
    stays = [endpoint not in failing for endpoint in endpoints]
    if not any(stays) or all(stays):
        return given
    of_devices = [stay for stay, n in zip(stays, n_devices, strict=True) for _ in range(n)]
    lost = ", ".join(failing)
    log.warning(f"going on without {lost}: {'; '.join(failing.values())}", event="rpc_lost", endpoints=lost)
    return replace(
        given,
        rpc=",".join(compress(endpoints, stays)),
        cache=CacheSize(text=_of_those(given.cache.text, of_devices)),
        passed=_passed_to(given, of_devices),
    )


def _of_those(text: str, stays: Sequence[bool]) -> str:
    """Of a list with a value for each device those that stay; else the same."""
    values = text.split(",")
    return ",".join(compress(values, stays)) if len(values) == len(stays) else text


def _passed_to(given: ServeOptions, stays: Sequence[bool]) -> tuple[str, ...]:
    """What is passed on, with the layers' shares of the devices that stay."""
    before = ("", *given.passed)
    return tuple(
        _of_those(text.replace("/", ","), stays) if flag in TENSOR_SPLIT_FLAGS else text
        for flag, text in zip(before, given.passed, strict=False)
    )


def _sizes(options: ServeOptions, files: ModelFiles, device: Device) -> Sizes:
    header = _check(options, files, device).header
    draft = check_model_file(files.draft) if files.draft else None
    if draft is not None or not options.has_draft:  # else llama-server fetches what is not known here
        check_drafter(options.wanted_spec_type, header, draft)
    if draft is not None and DRAFT_GATE in options.attach.scheduler.predict:
        gate_layers(f"--predict {DRAFT_GATE}", header, draft, options.wanted_spec_type)
    geometry = read_geometry(header)
    n_bytes = geometry.model_bytes
    check_overrides(options.passed, geometry)
    check_n_ctx(options, geometry)
    most = most_at_once(options, geometry, device, is_on_disk=options.ram is not None)
    n_ctx = choose_server_n_ctx(options.n_ctx, header, draft, device, options.n_server_slots, most)

    def at_once(*, is_on_disk: bool) -> tuple[int, Needs]:
        n = choose_n_ubatch(options, header, n_ctx, device, is_on_disk=is_on_disk)
        has_head = DRAFT_MTP in names_of(options.wanted_spec_type)
        return n, estimate_needs(header, draft, n_ctx, n, has_head=has_head)

    if options.stock:
        return Sizes(
            cache="", n_ctx=n_ctx, is_copied=not device.is_cpu, model_bytes=n_bytes, has_engine=False
        )
    _, needs = at_once(is_on_disk=True)
    ram = choose_ram(
        options.ram, geometry, device, needs, cache_bytes=options.cache.n_bytes(geometry.experts_bytes),
        host_kernels=options.host_kernels, copies_bytes=copies_bytes(copies_of(options.lossy), header),
        is_split=bool(options.given_value("LLAMA_ARG_N_GPU_LAYERS", *GPU_LAYERS_FLAGS)),
    )  # fmt: skip
    check_baseline(POLICY, options.attach.scheduler, stock=options.stock, ram_bytes=ram)
    n_ubatch, needs = at_once(is_on_disk=ram is not None)
    check_can_be_lossy(options.lossy, is_host_only=options.is_host_only, ram_bytes=ram)
    if options.is_host_only:
        has_engine = ram is not None or has_own_kernels(header)
        can = can_predict(is_host_only=True, ram_bytes=ram)
        if note := check_can_predict(options.attach.scheduler.predict, options.ram, can=can):
            log.warning(note)
        is_copied = has_engine and (ram is not None or fits_memory(n_bytes))
        return Sizes(
            cache="0",
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            is_copied=is_copied,
            model_bytes=n_bytes,
            has_engine=has_engine,
            ram_bytes=ram,
        )
    shares = options.tensor_split
    check_reach(shares, device, geometry, options.n_gpu_layers)
    cache = choose_cache(options.cache.text, geometry, needs, device, shares)
    if reason := why_tight(cache, geometry, needs, device, shares):
        log.warning(f"this may not fit: {reason}")
    is_copied = ram is not None or not device.is_cpu
    return Sizes(
        cache=cache, n_ctx=n_ctx, n_ubatch=n_ubatch, is_copied=is_copied, model_bytes=n_bytes, ram_bytes=ram
    )


def _check(options: ServeOptions, files: ModelFiles, device: Device) -> Preflight:
    """All but the draft: a MoE model that is whole, a cache that fits."""
    run = ForwardOptions(model=files.model, cache=options.cache, device=options.device, stock=options.stock)
    return check_run(run, device)
