"""What one expert costs on the host, on the device and on the link, fitted while the model runs.

Host:   T = n_experts * load_us + n_rows * row_us          (algorithms: bytes first, then activations)
Device: T = device_rest_us + n_experts * device_us         (MoE-SpAc, equation 8; rest: of a call itself)
Link:   T = bytes * link_us_per_byte
Unit times are per layout group, and so per device: a group's slots are one device's. Each device has a link
of its own. Until something is measured, the stated defaults hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import Board
from pyspac.engine.layout_groups import LayoutGroups
from pyspac.scheduler.activations import Activity
from pyspac.scheduler.config import DECAY

# Defaults, used only until the running graph has told: a host that streams weights at 20e9 bytes/s, one more
# row costs 10 % of loading the expert, a device 8 times as fast.
HOST_US_PER_BYTE = 1.0 / 20e3
ROW_SHARE = 0.1
DEVICE_SHARE = 1.0 / 8.0

_RIDGE = 0.2  # pull of row_us towards ROW_SHARE * load_us, in steps' worth: u and a mostly rise together
_EVERY = 4  # steps between fits after the first few: unit times change slowly
_N_WARM_UP = 4  # steps before a fit is believed
# the cheapest copy, in uses: replayed on routing of two models, cheaper ones were traffic without coverage
MIN_COPY_PRICE = 0.25
_N_LAYERS_TO_INFER = 3  # of a group; fewer say nothing about differences between layers


class CostModel:
    """Unit times per layout group, renewed by `update` once per step. O(n_layer)."""

    def __init__(self, board: Board, *, link_gb_s: float | None = None) -> None:
        """Start from the defaults; `link_gb_s` is the link's speed in 1e9 bytes/s where it is known."""
        self.groups = LayoutGroups(board)
        n_group = self.groups.n_group
        # [n_group] each
        self.load_us = self.groups.expert_bytes * HOST_US_PER_BYTE  # host, per distinct expert
        self.row_us = ROW_SHARE * self.load_us  # host, per (token, expert)
        self.device_us = DEVICE_SHARE * self.load_us  # device, per distinct expert
        self.device_rest_us = np.zeros(n_group)  # device, per call
        self.is_host_measured = np.zeros(n_group, bool)
        self.is_device_measured = np.zeros(n_group, bool)
        # False: device and host experts share the same cores, one after the other
        self.is_concurrent = not board.devices["is_in_graph"].any()
        self.draft_us = 0.0  # per step
        self.step_us = 0.0  # per forward, drafting included; 0: not seen
        self.host_us = 0.0  # of it, in which the host computes experts
        self._n_updates = 0
        self._timed_at = -_EVERY  # update that took in the device's own times last
        self._fit = np.zeros((n_group, 5))  # decayed sums: x1 x1, x1 x2, x2 x2, x1 y, x2 y
        self._n_fit = np.zeros(n_group, np.int64)
        self._layer_fit = np.zeros((n_group, 5))  # the same for _infer_device
        self._n_layer_fit = np.zeros(n_group, np.int64)
        self._device_fit = np.zeros(
            (n_group, 5)
        )  # decayed sums over calls: 1, experts, us, experts^2, experts us
        # decayed sums, by device; lists, as these are single numbers
        self._link_us = [0.0] * self.groups.n_device
        self._link_bytes = [0.0] * self.groups.n_device
        self._link_known = None if link_gb_s is None else 1e-3 / link_gb_s

    def link_us_per_byte(self, device: int = 0) -> float | None:
        """Return microseconds per byte copied to a device; None: neither measured nor given."""
        us, n_bytes = self._link_us[device], self._link_bytes[device]
        return us / n_bytes if n_bytes > 0.0 and us > 0.0 else self._link_known

    def layer_links(self) -> NDArray[np.float64]:
        """Return [n_layer] microseconds per byte, 0 where they are not known."""
        links = [self.link_us_per_byte(device) or 0.0 for device in range(self.groups.n_device)]
        return np.array(links)[self.groups.device_of_layer]

    @property
    def is_balanceable(self) -> bool:
        """Return whether host and device work at once and both sides' times are measured."""
        return self.is_concurrent and bool(self.is_host_measured.all() and self.is_device_measured.all())

    def update(self, activity: Activity, n_after: NDArray[np.int64] | None = None) -> None:
        """Take in one step; one without split forwards changes only the link.

        n_after: [n_layer] whole layers that follow each: its `layer_us` has their time, too.
        """
        self._update_link(activity)
        if activity.counter("n_forward") == 0:
            return
        self._update_step(activity)
        self._n_updates += 1
        stats = activity.layer_stats
        is_early = self._n_updates <= _N_WARM_UP
        is_due = is_early or self._n_updates % _EVERY == 0
        if is_due:
            self._update_host(stats)
        # some devices are timed in a few forwards only, which need not be those in which a fit is due
        if stats["n_timed_calls"].any():
            if is_early or self._n_updates - self._timed_at >= _EVERY:
                self._timed_at = self._n_updates
                self._update_device(stats)
        elif is_due and self.is_concurrent and not self._device_fit.any():
            if n_after is not None and n_after.any():
                stats = stats.copy()
                stats["layer_us"][n_after > 0] = 0  # not known
            self._infer_device(stats)

    def _update_link(self, activity: Activity) -> None:
        for device, (n_bytes, us) in enumerate(activity.copies):
            if n_bytes > 0:
                self._link_us[device] = DECAY * self._link_us[device] + us
                self._link_bytes[device] = DECAY * self._link_bytes[device] + n_bytes

    def _update_host(self, stats: NDArray[Any]) -> None:
        """Least squares over layers and steps of host_us = load_us * x1 + extra * x2.

        x1 = u + ROW_SHARE * a, x2 = a, for u experts and a rows; row_us = ROW_SHARE * load_us + extra. A
        layer whose time is far off the fit weighs less.
        """
        x = _columns(stats, "n_host_experts", "n_host_rows", "host_us")  # [n_layer, 3]: u, a, y
        weighted = x * self._weights(x)[:, None]
        for g, layers in enumerate(self.groups.layers):
            (uu, ua, uy), (_, aa, ay), _ = (weighted[layers].T @ x[layers]).tolist()
            if uu <= 0.0 or uy <= 0.0:
                continue
            x1x1, x1x2 = uu + 2 * ROW_SHARE * ua + ROW_SHARE**2 * aa, ua + ROW_SHARE * aa
            x1y = uy + ROW_SHARE * ay
            self._fit[g] = DECAY * self._fit[g] + (x1x1, x1x2, aa, x1y, ay)
            self._n_fit[g] += 1
            ridge = _RIDGE / min(int(self._n_fit[g]), 20)
            self.load_us[g], self.row_us[g] = _solve_host(*self._fit[g].tolist(), ridge=ridge)
            self.is_host_measured[g] = True

    def _weights(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [n_layer] weights: 1 near the fit, falling with distance (a page fault, a lost core)."""
        group = self.groups.of_layer
        fit = self.load_us[group] * x[:, 0] + self.row_us[group] * x[:, 1]
        weight = np.minimum(1.0, fit / np.maximum(np.abs(x[:, 2] - fit), 1e-9))
        weight[self._n_fit[group] < _N_WARM_UP] = 1.0
        return np.asarray(np.maximum(weight, 1e-3))  # a fit that is far off must still move

    def _update_device(self, stats: NDArray[Any]) -> None:
        """Fit the device's own times, which the engine has seen: us = rest + device_us * experts."""
        x = _columns(stats, "n_timed_calls", "n_timed_experts", "device_us")  # [n_layer, 3]
        calls = np.maximum(x[:, 0], 1.0)
        experts, us = x[:, 1] / calls, x[:, 2] / calls
        weight = x[:, 0] * self._device_weights(experts, us)
        sums = np.stack((weight, weight * experts, weight * us, weight * experts**2, weight * experts * us))
        for g, layers in enumerate(self.groups.layers):
            if not x[layers, 0].any():
                continue
            self._device_fit[g] = DECAY * self._device_fit[g] + sums[:, layers].sum(axis=1)
            if self._device_fit[g, 1] > 0.0:
                self.device_us[g], self.device_rest_us[g] = _solve_timed(*self._device_fit[g].tolist())
                self.is_device_measured[g] = True

    def _device_weights(self, experts: NDArray[np.float64], us: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [n_layer] weights: 1 near the fit, falling with distance, as `_weights`."""
        group = self.groups.of_layer
        fit = self.device_rest_us[group] + self.device_us[group] * experts
        weight = np.minimum(1.0, fit / np.maximum(np.abs(us - fit), 1e-9))
        weight[self._device_fit[group, 0] < _N_WARM_UP * 2] = 1.0
        return np.asarray(np.maximum(weight, 1e-3))

    def _infer_device(self, stats: NDArray[Any]) -> None:
        """Fit layer_us = rest + share * host_us + device_us * n_experts over a step's layers, per group.

        An executor's layer takes rest + max(host, device): where the device holds layers up, device_us is its
        cost; where the host does, it comes out near 0, which is right as well: more experts on the device
        cost nothing. Sums are taken about each step's mean, so that `rest` may drift (it grows with the
        context).
        """
        x = _columns(stats, "host_us", "n_device_experts", "layer_us")
        for g, layers in enumerate(self.groups.layers):
            timed = x[layers][x[layers, 2] > 0]  # the last layer's time is not known
            if len(timed) < _N_LAYERS_TO_INFER:
                continue
            timed -= timed.mean(axis=0)
            (hh, hd, hy), (_, dd, dy), _ = (timed.T @ timed).tolist()
            self._layer_fit[g] = DECAY * self._layer_fit[g] + (hh, hd, dd, hy, dy)
            self._n_layer_fit[g] += 1
            is_varied = self._layer_fit[g, 2] > 0.0  # else the layers' device experts were all as many
            if is_varied and self._n_layer_fit[g] >= _N_WARM_UP:
                self.device_us[g] = min(_solve_device(*self._layer_fit[g].tolist()), self.load_us[g])
                self.is_device_measured[g] = True

    def _update_step(self, activity: Activity) -> None:
        """Renew the times per step: from step records if there are any, else from layer times."""
        n_steps, total_us = activity.totals.n_steps, activity.totals.total_us
        if n_steps > 0:
            self.draft_us = _smooth(self.draft_us, activity.totals.draft_us / n_steps)
        else:
            n_steps, total_us = activity.counter("n_forward"), int(activity.layer_stats["layer_us"].sum())
        if total_us > 0:
            self.step_us = _smooth(self.step_us, total_us / n_steps)
            self.host_us = _smooth(self.host_us, int(activity.layer_stats["host_us"].sum()) / n_steps)

    def layer_rests(self) -> NDArray[np.float64]:
        """Return [n_layer] device_rest_us."""
        return self.device_rest_us[self.groups.of_layer]

    def layer_units(self) -> NDArray[np.float64]:
        """Return [3, n_layer]: load_us, row_us and device_us."""
        return np.stack((self.load_us, self.row_us, self.device_us))[:, self.groups.of_layer]

    def to_dict(self) -> dict[str, Any]:
        """What the balancer goes by, per layout group: microseconds; None: not measured."""
        host, device = self.is_host_measured, self.is_device_measured
        return {
            "host_expert_us": _told(self.load_us, host),
            "host_row_us": _told(self.row_us, host),
            "device_expert_us": _told(self.device_us, device),
            "device_rest_us": _told(self.device_rest_us, device),
        }

    def copy_prices(self) -> NDArray[np.float64]:
        """Return [n_device]: how many uses on the host a copy to it has to save, to be worth its bytes.

        A copy moves the same bytes over the host's memory bus as one use on the host, so its price is one
        use while the host computes, and nothing while it rests. Beside a real device it rests for a part of
        the step, and a use saves what the device does not take. 1 where device and host share their cores,
        and until times are measured; never below MIN_COPY_PRICE, as every copy delays others.
        """
        if not self.is_balanceable or self.step_us <= 0.0:
            return np.ones(self.groups.n_device)
        kept_share = np.zeros(self.groups.n_device)
        np.maximum.at(kept_share, self.groups.device, self.device_us / np.maximum(self.load_us, 1e-9))
        price = min(self.host_us / self.step_us, 1.0) / np.maximum(1.0 - kept_share, 1e-9)
        return np.clip(price, MIN_COPY_PRICE, 1.0 / MIN_COPY_PRICE)

    def layer_starts_us(self) -> NDArray[np.float64]:
        """Return [n_layer] when each layer begins, in microseconds after the forward does."""
        n_layer = len(self.groups.of_layer)
        return np.asarray(np.arange(n_layer) / n_layer * max(self.step_us - self.draft_us, 0.0))

    def step_budget_bytes(self, share: float, device: int = 0) -> int | None:
        """Return the bytes a link can copy in `share` of one step; None: link or step not measured yet."""
        link = self.link_us_per_byte(device)
        if link is None or self.step_us <= 0.0:
            return None
        return int(share * self.step_us / link)


def _columns(stats: NDArray[Any], *names: str) -> NDArray[np.float64]:
    """Return [n_layer, len(names)]: some of the fields of spac_layer_stats."""
    return np.array([stats[name] for name in names], np.float64).T


def _told(us: NDArray[Any], is_measured: NDArray[np.bool_]) -> list[float | None]:
    return [float(value) if known else None for value, known in zip(us, is_measured, strict=True)]


def _solve_host(
    s11: float, s12: float, s22: float, s1y: float, s2y: float, *, ridge: float
) -> tuple[float, float]:
    """Solve the normal equations of one group for load_us and row_us; neither may fall below 0."""
    s22 *= 1.0 + ridge
    det = s11 * s22 - s12 * s12
    extra = (s11 * s2y - s12 * s1y) / det if det > 1e-9 * s11 * s22 else 0.0
    load = (s1y - s12 * extra) / s11
    row = ROW_SHARE * load + extra
    if load <= 0.0 or row < 0.0:  # fit only the default ratio
        load = s1y / s11
        row = ROW_SHARE * load
    return load, row


def _solve_timed(n: float, x: float, y: float, xx: float, xy: float) -> tuple[float, float]:
    """Solve y = rest + device_us * x for device_us and rest; neither may fall below 0."""
    det = n * xx - x * x
    slope = (n * xy - x * y) / det if det > 1e-6 * n * xx else -1.0
    rest = (y - slope * x) / n
    if slope <= 0.0 or rest < 0.0:  # all calls were alike, or there is no rest
        return y / x, 0.0
    return slope, rest


def _solve_device(hh: float, hd: float, dd: float, hy: float, dy: float) -> float:
    """Return device_us >= 0 of y = share * h + device_us * d, with the host's share held within 0 .. 1."""
    det = hh * dd - hd * hd
    share = (hy * dd - dy * hd) / det if det > 1e-6 * hh * dd else 0.0
    share = min(max(share, 0.0), 1.0)
    return max((dy - share * hd) / dd, 0.0)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else 0.9 * old + 0.1 * new
