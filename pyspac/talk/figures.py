"""What happened behind an answer: the engine's board and its scheduler in, objects of `--json` out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspac.engine import board_figures
from pyspac.engine.ahead import ahead_dict, in_engine
from pyspac.engine.board import Board
from pyspac.engine.board_figures import NO_EXPERTS, EngineInfo, read_declined, read_info
from pyspac.engine.device_stats import DeviceFigures, read_devices
from pyspac.engine.threads import threads_dict
from pyspac.engine.tier import read_tier, tier_dict

if TYPE_CHECKING:
    from pyspac.server.attachment import Attachment

NO_SCHEDULER = dict.fromkeys(("estimator", "step_us_p50", "step_us_p99", "balance", "copies", "whole"))
_TIMES = ("host_us", "device_us")


def way_dict(
    info: EngineInfo | None, device: str, n_ubatch: int | None, *, is_host_only: bool
) -> dict[str, Any]:
    """How a model is computed; `mode`: split, host (only own kernels, no device), or stock.

    `info`: None: llama.cpp computes it alone; `device`: then the device's name; `n_ubatch`: how many tokens
    of a prompt at once.
    """
    return {
        "mode": "stock" if info is None else "host" if is_host_only else "split",
        "device": info.device if info else device,
        "emulated": bool(info and info.is_emulated),
        "kernels": (info and info.kernels) or None,
        "n_ubatch": n_ubatch if info else None,
    }


class Figures:
    """Of one engine, since it was attached; `after_prompt` marks where decoding begins."""

    def __init__(
        self, board: Board | None, attachment: Attachment | None, predict: Sequence[str] = ()
    ) -> None:
        """`board`: None: there is no engine; `predict`: the predictors that were asked for."""
        self.board, self.attachment, self.predict = board, attachment, predict
        self._prompt_us = dict.fromkeys(_TIMES, 0)
        self.prompt_read_bytes: int | None = None  # of experts on disk, until the last prompt was computed

    def after_prompt(self) -> None:
        """Its first token is there."""
        if self.board is not None:
            self._prompt_us = {name: board_figures.time_us(self.board, name) for name in _TIMES}
        tier = self.tier()
        self.prompt_read_bytes = tier["read_bytes"] if tier else None

    def steps_us(self, name: str) -> int:
        """Sum over layers of `host_us` or `device_us`, since the last prompt."""
        return 0 if self.board is None else board_figures.time_us(self.board, name) - self._prompt_us[name]

    def experts(self) -> dict[str, int]:
        return dict(NO_EXPERTS) if self.board is None else board_figures.experts_dict(self.board)

    def coverage(self) -> float | None:
        return None if self.board is None else board_figures.coverage(self.board)

    def router_weight_kept(self) -> float | None:
        """What `--lossy` cost; None without it."""
        return None if self.board is None else board_figures.router_weight_kept(self.board)

    def kl_divergence(self) -> dict[str, Any] | None:
        """What `--max-kl` limits; None without it."""
        return None if self.board is None else board_figures.kl_divergence(self.board)

    def devices(self) -> list[DeviceFigures]:
        return [] if self.board is None else read_devices(self.board)

    def tier(self) -> dict[str, Any] | None:
        return None if self.board is None else tier_dict(read_tier(self.board))

    def threads(self) -> dict[str, Any] | None:
        return None if self.board is None else threads_dict(self.board)

    def declined(self) -> dict[str, int]:
        """How many layers are left to llama.cpp, by the reason."""
        return {} if self.board is None else dict(Counter(read_declined(self.board).values()))

    @property
    def n_split(self) -> int:
        """Layers that are split now: those that a LoRA adapter touches are not, as long as it is set."""
        if self.board is None:
            return 0
        info = read_info(self.board)
        return info.n_layer_split + info.n_layer_declined - sum(self.declined().values())

    def scheduler(self) -> dict[str, Any]:
        """None in all fields without one, and before its first step."""
        if self.attachment is None or self.board is None or not self.board.n_slots:
            return dict(NO_SCHEDULER)
        scheduler = self.attachment.scheduler
        stats = scheduler.stats()
        return {
            "estimator": scheduler.config.policy,
            "step_us_p50": stats.step_p50_us,
            "step_us_p99": stats.step_p99_us,
            "balance": scheduler.cost.to_dict() | {"is_balanced": scheduler.balancer.is_balanced},
            "copies": scheduler.fallback.to_dict() if scheduler.fallback else None,
            "whole": scheduler.layers.to_dict() if scheduler.layers.is_on else None,
        }

    def predictors(self) -> list[dict[str, Any]]:
        """What each said, and what came of it."""
        if self.board is None:
            return []
        found = self.attachment and (self.attachment.read_ahead or self.attachment.scheduler.foresight)
        names = in_engine(self.predict)
        return [*([found.to_dict()] if found else []), *(ahead_dict(self.board, name) for name in names)]

    def to_dict(self) -> dict[str, Any]:
        """What engine and scheduler did since they were attached."""
        info = None if self.board is None else read_info(self.board)
        return {
            "experts": self.experts(),
            "router_weight_kept": self.router_weight_kept(),
            "kl_divergence": self.kl_divergence(),
            "devices": [device.as_json() for device in self.devices()],
            "tier": self.tier(),
            "threads": self.threads(),
            "prompt_read_bytes": self.prompt_read_bytes,
            "layers": {
                "split": self.n_split,
                "declined": self.declined(),
                "unpinned": info.n_layer_unpinned if info else 0,
            },
            "tau": [] if self.board is None else self.board.tau.tolist(),
            "scheduler": self.scheduler(),
            "predictors": self.predictors(),
        }
