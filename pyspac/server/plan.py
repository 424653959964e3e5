"""ServeOptions in, what one start needs out (a Launch): all checks come before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from pyspac.devices import Device
from pyspac.geometry import read_geometry
from pyspac.options import RunOptions
from pyspac.preflight import Preflight, check_model_file, check_run
from pyspac.server import board_file, log
from pyspac.server.arguments import Launch
from pyspac.server.health import choose_port
from pyspac.server.memory import choose_cache, choose_n_ctx, estimate_needs, probe_device, why_tight
from pyspac.server.options import ServeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What follows from the models' headers and the device."""

    cache: str
    n_ctx: int | None


def plan_launch(options: ServeOptions) -> Launch:
    """Raises ConfigError or ModelError; nothing has been started or written then."""
    if options.board is not None:
        board_file.check_free(options.board)
    port = choose_port(options.host, options.port)
    board = options.board or f"server-{port}"
    board_file.check_free(board)
    if options.attach.metrics_port:
        choose_port(options.attach.metrics_host, options.attach.metrics_port, "--metrics-port")
    device = probe_device(options.device)
    sizes = _sizes(options, device)
    return Launch(
        port=port, board=board, cache=sizes.cache, n_ctx=sizes.n_ctx, is_real_device=not device.is_cpu
    )


def _sizes(options: ServeOptions, device: Device) -> Sizes:
    """Without the model's file (-hf), the engine and llama-server choose."""
    if options.model is None:
        return Sizes(cache=options.cache.text, n_ctx=options.n_ctx)
    _check(options, device)
    header = check_model_file(options.model)
    draft = check_model_file(options.draft) if options.draft else None
    geometry = read_geometry(header)
    n_ctx = choose_n_ctx(options.n_ctx, geometry)
    needs = estimate_needs(header, draft, n_ctx)
    cache = choose_cache(options.cache.text, geometry, needs, device)
    if reason := why_tight(cache, geometry, needs, device):
        log.warning(f"this may not fit: {reason}")
    return Sizes(cache=cache, n_ctx=n_ctx)


def _check(options: ServeOptions, device: Device) -> Preflight:
    """The checks of `pyspac run`: a MoE model that is whole, a draft of its vocabulary, a cache that fits."""
    assert options.model is not None
    run = RunOptions(model=options.model, draft=options.draft, cache=options.cache, device=options.device)
    return check_run(run, device)
