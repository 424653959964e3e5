"""The scheduler's numbers for Prometheus: an `Attachment` in, metric families out whenever they are scraped.

Nothing is counted twice: the engine's counters are read from the board at the scrape; a step costs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from pyspac.engine.ahead import ahead_dict, at_work
from pyspac.engine.board import Residency
from pyspac.engine.device_stats import read_devices
from pyspac.engine.threads import threads_dict
from pyspac.engine.tier import read_tier
from pyspac.errors import ConfigError
from pyspac.server import log
from pyspac.server.attachment import Attachment

# metric, the board's counter, factor, help
_COUNTERS: Final = (
    ("forwards", "n_forward", 1, "Graph evaluations that took the split path"),
    ("loads", "n_loads", 1, "Copies of experts to the device"),
    ("load_failures", "n_load_failures", 1, "Copies that failed"),
    ("evictions", "n_evictions", 1, "Experts that left the device"),
    ("loaded_bytes", "loaded_bytes", 1, "Bytes copied to the device"),
    ("load_seconds", "load_us", 1e-6, "Time spent copying"),
    ("dispatch_seconds", "dispatch_us", 1e-6, "Time in the dispatch nodes"),
    ("wait_seconds", "wait_us", 1e-6, "Time the graph waited for the host's experts"),
    ("left_out_activations", "n_left_out_rows", 1, "(token, expert) pairs not computed exactly (--lossy)"),
    ("router_weight", "router_weight", 1e-6, "Router weight of all experts, with --lossy"),
    ("router_weight_kept", "router_weight_kept", 1e-6, "Router weight of the experts computed exactly"),
    ("kl_tokens", "n_kl_tokens", 1, "Tokens whose KL divergence is limited (--max-kl)"),
    ("kl_nats", "kl_total", 1e-6, "Their KL divergence from exact ones, as estimated"),
    ("kl_samples", "n_kl_samples", 1, "Tokens computed both ways to estimate it"),
    ("kl_sampled_nats", "kl_sampled", 1e-6, "The KL divergence of these"),
    ("decisions", "n_decisions", 1, "Decisions that the engine took over"),
)
# metric, the tier's figure, kind, factor, help; nothing without experts on disk
_TIER: Final = (
    ("memory_slots", "n_slots", GaugeMetricFamily, 1, "Experts that fit into memory, of those on disk"),
    ("memory_resident_experts", "n_resident", GaugeMetricFamily, 1, "Experts in memory, of those on disk"),
    ("memory_hits", "n_hit", CounterMetricFamily, 1, "Experts asked for and in memory, or on their way"),
    ("memory_misses", "n_miss", CounterMetricFamily, 1, "Experts asked for and read while the layer waits"),
    ("disk_reads_ahead", "n_ahead", CounterMetricFamily, 1, "Experts read before they were asked for"),
    ("disk_reads", "n_reads", CounterMetricFamily, 1, "Reads, of one matrix of an expert each"),
    ("disk_read_bytes", "read_bytes", CounterMetricFamily, 1, "Bytes read"),
    ("disk_read_seconds", "read_us", CounterMetricFamily, 1e-6, "Time of all reads, added up"),
    ("disk_busy_seconds", "busy_us", CounterMetricFamily, 1e-6, "Time in which a read was under way"),
    (
        "disk_device_copies",
        "n_to_device_read",
        CounterMetricFamily,
        1,
        "Experts copied to the device that memory had not",
    ),
    ("disk_wait_seconds", "wait_us", CounterMetricFamily, 1e-6, "Time in which a layer waited for reads"),
)
# metric, the figure of `predictors` in `--json`, kind, factor, help
_PREDICTORS: Final = (
    (
        "predictor_recall",
        "recall",
        GaugeMetricFamily,
        1,
        "Share of what was used that was predicted",
    ),
    ("predictor_precision", "precision", GaugeMetricFamily, 1, "Share of what was predicted that was used"),
    ("predictor_known", "known", GaugeMetricFamily, 1, "Share of the tokens that anything was predicted for"),
    ("predictor_tokens", "n_tokens", CounterMetricFamily, 1, "Tokens that it learned from"),
    ("predictor_seconds", "us", CounterMetricFamily, 1e-6, "Time spent predicting and learning"),
    ("predictor_refused", "n_refused", CounterMetricFamily, 1, "Absent predicted experts not copied"),
    ("predictor_late", "n_late", CounterMetricFamily, 1, "Of these, whose copy would have come too late"),
    ("predictor_copies", "n_copied", CounterMetricFamily, 1, "Copies that only a prediction asked for"),
    ("predictor_copies_used", "n_copies_used", CounterMetricFamily, 1, "Of these, used before they left"),
)
# metric, the figure of each device, kind, help
_DEVICES: Final = (
    ("device_slots", "n_slots", GaugeMetricFamily, "Experts that fit on the device"),
    ("device_resident_experts", "n_resident", GaugeMetricFamily, "Experts on the device"),
    ("device_activations", "n_device_rows", CounterMetricFamily, "(token, expert) pairs that it computed"),
    ("device_missed_activations", "n_host_rows", CounterMetricFamily, "Of its layers, that the host did"),
    ("device_loads", "n_loads", CounterMetricFamily, "Copies of experts to the device"),
    ("device_loaded_bytes", "loaded_bytes", CounterMetricFamily, "Bytes copied to the device"),
    ("device_load_seconds", "load_s", CounterMetricFamily, "Time spent copying to the device"),
    ("device_wait_seconds", "wait_s", CounterMetricFamily, "Time its layers waited for the host's experts"),
)
_WHERE: Final = (("device", "n_hit_rows"), ("host", "n_miss_rows"), ("late", "n_late_rows"))


class SchedulerCollector(Collector):
    """Reads the attachment; a board that was closed meanwhile yields nothing."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def collect(self) -> Iterable[Metric]:
        board = self.attachment.board
        counters = np.array(board.counters)[0]
        yield self._info()
        for name, field, factor, text in _COUNTERS:
            yield CounterMetricFamily(f"pyspac_{name}", text, value=float(counters[field]) * factor)
        yield _activations(counters)
        yield from self._steps()
        yield from self._gauges()
        yield from self._layers()
        yield from self._own()
        yield from self._predictors()
        yield from self._tier()
        yield from self._threads()
        yield from self._devices()

    def _info(self) -> Metric:
        board, config = self.attachment.board, self.attachment.scheduler.config
        sizes = {name: str(getattr(board, name)) for name in ("n_layer", "n_expert", "n_expert_used")}
        values = {"board": self.attachment.name or "", "estimator": config.policy, **sizes}
        return InfoMetricFamily("pyspac", "What is scheduled, and how", value=values)

    def _steps(self) -> Iterable[Metric]:
        totals = self.attachment.totals
        for name, value, text in (
            ("steps", totals.n_steps, "Decoding steps recorded"),
            ("steps_lost", totals.n_lost, "Step records overwritten before they were read"),
            ("generated_tokens", totals.n_tokens, "Tokens generated in the recorded steps"),
            ("draft_tokens", totals.n_draft, "Tokens drafted"),
            ("accepted_tokens", totals.n_accepted, "Drafted tokens that were accepted"),
        ):
            yield CounterMetricFamily(f"pyspac_{name}", text, value=value)
        seconds = CounterMetricFamily("pyspac_step_seconds", "Time of the recorded steps", labels=["phase"])
        seconds.add_metric(["draft"], totals.draft_us * 1e-6)
        seconds.add_metric(["verify"], totals.verify_us * 1e-6)
        seconds.add_metric(["process"], totals.process_us * 1e-6)
        yield seconds

    def _gauges(self) -> Iterable[Metric]:
        board = self.attachment.board
        budget = sum(board.byte_budget.tolist())
        yield GaugeMetricFamily("pyspac_slots", "Experts that fit on the device", value=board.n_slots)
        yield GaugeMetricFamily(
            "pyspac_byte_budget", "Bytes that may be copied per forward; +Inf: no limit",
            value=float("inf") if budget >= 2**63 else budget,
        )  # fmt: skip
        limits = GaugeMetricFamily(
            "pyspac_draft_limit", "Draft-length limits in force", labels=["server_slot"]
        )
        for slot in np.flatnonzero(np.array(board.n_draft_max) >= 0):
            limits.add_metric([str(slot)], int(board.n_draft_max[slot]))
        yield limits

    def _layers(self) -> Iterable[Metric]:
        board = self.attachment.board
        n_resident = np.count_nonzero(board.residency == Residency.RESIDENT, axis=1)
        resident = GaugeMetricFamily("pyspac_resident_experts", "Experts on the device", labels=["layer"])
        tau = GaugeMetricFamily(
            "pyspac_threshold", "Utility from which experts belong there", labels=["layer"]
        )
        for il in np.flatnonzero(board.expert_bytes > 0):
            resident.add_metric([str(il)], int(n_resident[il]))
            tau.add_metric([str(il)], int(board.tau[il]))
        return (resident, tau)

    def _own(self) -> Iterable[Metric]:
        stats = self.attachment.scheduler.stats()
        yield CounterMetricFamily("pyspac_scheduler_steps", "Steps of the scheduler", value=stats.n_steps)
        yield CounterMetricFamily(
            "pyspac_planned_loads", "Copies that it asked for", value=stats.n_loads_planned
        )
        yield from self._fallback()
        yield from self._whole()
        times = GaugeMetricFamily("pyspac_scheduler_step_seconds", "Of its last steps", labels=["quantile"])
        times.add_metric(["0.5"], stats.step_p50_us * 1e-6)
        times.add_metric(["0.99"], stats.step_p99_us * 1e-6)
        yield times

    def _fallback(self) -> Iterable[Metric]:
        """Whether copies pay; nothing where the user decides, no gain before it was measured."""
        fallback = self.attachment.scheduler.fallback
        if fallback is None:
            return
        yield GaugeMetricFamily(
            "pyspac_copies_chosen", "1: experts are copied; 0: measured to be faster without copies",
            value=fallback.chosen in ("copies", "split"),
        )  # fmt: skip
        yield CounterMetricFamily(
            "pyspac_copies_trials", "Times that the other way was tried", value=fallback.n_trials
        )
        if fallback.gain is not None:
            yield GaugeMetricFamily(
                "pyspac_copies_gain", "Tokens/s of the chosen way against the other, less 1",
                value=fallback.gain,
            )  # fmt: skip

    def _whole(self) -> Iterable[Metric]:
        """Layers that the device holds whole; nothing where none may be, no gain before one was predicted."""
        layers = self.attachment.scheduler.layers
        if not layers.is_on:
            return
        yield GaugeMetricFamily(
            "pyspac_whole_layers", "Layers of which the device has all experts", value=layers.n_whole
        )
        if layers.gain is not None:
            yield GaugeMetricFamily(
                "pyspac_whole_predicted_gain", "Of the layers' speed against none that is whole, less 1",
                value=layers.gain,
            )  # fmt: skip

    def _tier(self) -> Iterable[Metric]:
        """Experts on disk, and the memory that holds some of them."""
        figures = read_tier(self.attachment.board)
        if figures["n_slots"]:
            for name, field, kind, factor, text in _TIER:
                yield kind(f"pyspac_{name}", text, value=figures[field] * factor)

    def _threads(self) -> Iterable[Metric]:
        """Without a device: how many compute, and how much of a core others leave them."""
        if (threads := threads_dict(self.attachment.board)) is not None:
            yield GaugeMetricFamily("pyspac_threads", "Threads that compute", value=threads["n_threads"])
            yield GaugeMetricFamily(
                "pyspac_thread_share", "Of the time in which it wanted a core: the thread that had one least",
                value=threads["share"],
            )  # fmt: skip

    def _devices(self) -> Iterable[Metric]:
        devices = read_devices(self.attachment.board)
        for name, field, kind, text in _DEVICES:
            family = kind(f"pyspac_{name}", text, labels=["device"])
            for device in devices:
                family.add_metric([device.name], getattr(device, field))
            yield family

    def _predictors(self) -> Iterable[Metric]:
        """What predictors said, and what came of it; what one does not tell, or not yet, is left out."""
        board, scheduler = self.attachment.board, self.attachment.scheduler
        figures = [ahead_dict(board, name) for name in at_work(board, scheduler.config.predict)]
        token = self.attachment.read_ahead or scheduler.foresight
        if token is not None:
            figures.insert(0, token.to_dict())
        for name, field, kind, factor, text in _PREDICTORS:
            family = kind(f"pyspac_{name}", text, labels=["predictor"])
            for said in figures:
                if (value := said.get(field)) is not None:
                    family.add_metric([said["name"]], value * factor)
            yield family


def _activations(counters: Any) -> Metric:
    text = "(token, expert) pairs; late: the copy was under way"
    family = CounterMetricFamily("pyspac_activations", text, labels=["where"])
    for where, field in _WHERE:
        family.add_metric([where], float(counters[field]))
    return family


@contextlib.contextmanager
def serve_metrics(attachment: Attachment, host: str, port: int) -> Iterator[int]:
    """Answer at http://host:port/metrics meanwhile; yields the port. Raises ConfigError if it is taken."""
    registry = CollectorRegistry()
    registry.register(SchedulerCollector(attachment))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            "--metrics-port", port, f"a port that is free at {host} ({error.strerror})"
        ) from error
    bound = int(server.server_address[1])
    log.event(f"metrics: http://{host}:{bound}/metrics", event="metrics", port=bound)
    try:
        yield bound
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
