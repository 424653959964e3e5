"""The contenders: stock, tuned --n-cpu-moe and the split, at equal device memory for experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from settings import Settings

from pyspac.engine.params import EngineParams
from pyspac.forward.options import CacheSize, ForwardOptions
from pyspac.model.geometry import MoeGeometry
from pyspac.scheduler.config import SchedulerConfig

Placement = Literal["host", "ncmoe"]
BASELINE = "stock-sd"  # ratios are against stock with speculation
# not the paper's system to the letter: README.md says what pyspac does otherwise
SPAC = "MoE-SpAc's Algorithm 1 and balancer, in pyspac's engine"
PAPER_ABLATIONS = ("specue", "adabc", "hetwb", "prefetch", "evict", "sd")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOptions(ForwardOptions):
    """How a model is loaded, and how the host's experts are computed."""

    host_mode: str = "auto"

    def engine_params(self, device: str, ram_bytes: int | None = None) -> EngineParams:
        return replace(ForwardOptions.engine_params(self, device), host_mode=self.host_mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`placement`: where the routed experts are; `group`: arms of a group take turns."""

    name: str
    group: str
    what: str
    placement: Placement = "host"
    speculates: bool = True
    is_split: bool = False
    estimator: str = "ema"
    without: frozenset[str] = frozenset()
    host_kernels: str = "auto"
    host_mode: str = "auto"

    def options(self, path: Path, s: Settings) -> ArmOptions:
        n_draft_max = s.draft_max if self.speculates else 0
        return ArmOptions(
            model=path,
            stock=not self.is_split,
            device=s.device,
            rpc=s.rpc,
            n_threads=s.split_threads or None,  # of the engine: its context is opened by bench.py
            cache=CacheSize(text=s.cache),
            width=1 + n_draft_max,
            scheduler=SchedulerConfig(
                estimator=self.estimator, without=self.without, n_draft_max=n_draft_max
            ),
            copy_gb_s=s.copy_gb_s if self.is_split else 0.0,
            host_kernels=self.host_kernels,
            host_mode=self.host_mode,
        )


def all_arms() -> list[Arm]:
    """Controls first; each group has the baseline, so that its ratios are paired within the group."""
    return controls() + ablations()


def controls() -> list[Arm]:
    """Stock, with its experts on the host or placed by layers, and the split with each estimator."""
    return [
        Arm(
            name="stock-ar",
            group="controls",
            what="stock, all experts on the host, no drafts",
            speculates=False,
        ),
        Arm(name=BASELINE, group="controls", what="stock, all experts on the host, with drafts"),
        Arm(
            name="ncmoe-ar",
            group="controls",
            what="stock, tuned --n-cpu-moe, no drafts",
            placement="ncmoe",
            speculates=False,
        ),
        Arm(
            name="ncmoe-sd", group="controls", what="stock, tuned --n-cpu-moe, with drafts", placement="ncmoe"
        ),
        *(
            Arm(
                name=f"split-{name}",
                group="controls",
                what=f"split, estimator {name}, with drafts",
                is_split=True,
                estimator=name,
            )
            for name in ("ema", "spac", "lru")
        ),
        Arm(
            name="split-ema-shared",
            group="controls",
            what="split, estimator ema, no layer whole, with drafts",
            is_split=True,
            without=frozenset(["whole"]),
        ),
        Arm(
            name="split-ema-stops",
            group="controls",
            what="split, estimator ema, the graph stops in each layer, with drafts",
            is_split=True,
            host_mode="executor",
        ),
        Arm(
            name="split-ema-ggml",
            group="controls",
            what="split, estimator ema, ggml's kernels on the host, with drafts",
            is_split=True,
            host_kernels="ggml",
        ),
    ]


def ablations() -> list[Arm]:
    """The paper's system, whole and with one part left out."""
    return [
        Arm(name=BASELINE, group="ablations", what="stock, all experts on the host, with drafts"),
        Arm(
            name="split-spac",
            group="ablations",
            what=f"split, {SPAC}",
            is_split=True,
            estimator="spac",
        ),
        *(
            Arm(
                name=f"spac-without-{name}",
                group="ablations",
                what=f"split, {SPAC}, without {name}",
                is_split=True,
                estimator="spac",
                without=frozenset([name]),
                speculates=name != "sd",
            )
            for name in PAPER_ABLATIONS
        ),
    ]


def chosen_arms(s: Settings) -> list[Arm]:
    """Those of --arms (all if not given), and the baseline of their groups; ValueError if one is unknown."""
    arms = all_arms()
    unknown = sorted(set(s.arms) - {arm.name for arm in arms})
    if unknown:
        known = ", ".join(dict.fromkeys(arm.name for arm in arms))
        raise ValueError(f"--arms {','.join(unknown)}: unknown; known: {known}")
    if not s.arms:
        return arms
    named = {name for name in s.arms if name != BASELINE} or {"stock-ar"}
    groups = {arm.group for arm in arms if arm.name in named}
    if "controls" in groups and not any(
        arm.name in named and arm.group == "ablations" and arm.name.startswith("spac-") for arm in arms
    ):
        groups.discard("ablations")  # split-spac is in both groups: once is enough
    return [arm for arm in arms if arm.group in groups and (arm.name in named or arm.name == BASELINE)]


def device_layers(geometry: MoeGeometry, cache_bytes: int) -> list[int]:
    """The layers whose experts fit into `cache_bytes`, the last ones, as with --n-cpu-moe."""
    chosen: list[int] = []
    left = cache_bytes
    for layer in reversed(geometry.moe_layers):
        need = layer.n_expert * layer.expert_bytes
        if need > left:
            break
        left -= need
        chosen.append(layer.il)
    return chosen


def host_pattern(geometry: MoeGeometry, on_device: list[int]) -> bytes:
    """A regular expression of the expert tensors that stay on the host, as --n-cpu-moe makes it."""
    layers = [str(layer.il) for layer in geometry.moe_layers if layer.il not in on_device]
    return rb"blk\.(" + "|".join(layers).encode() + rb")\.ffn_(up|down|gate|gate_up)_(ch|)exps"
