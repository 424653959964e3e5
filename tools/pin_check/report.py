"""What the check found: lines for people, an object for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.pin_check.names import Lookup
from tools.pin_check.scratch import Applied
from tools.pin_check.sources import Compiled


@dataclass(frozen=True, slots=True)
class Report:
    """All three parts; `sources` is empty where compiling was left out."""

    tree: Path
    patches: list[Applied]
    names: list[Lookup]
    sources: list[Compiled]
    seconds: float

    @property
    def is_ok(self) -> bool:
        return not (
            any(patch.rejects for patch in self.patches)
            or any(not name.is_found for name in self.names)
            or any(source.error for source in self.sources)
        )

    def to_dict(self) -> dict[str, Any]:
        """The object of --json."""
        return {
            "tree": str(self.tree),
            "ok": self.is_ok,
            "seconds": round(self.seconds, 1),
            "patches": [asdict(patch) for patch in self.patches],
            "names": [asdict(name) for name in self.names],
            "sources": [asdict(source) for source in self.sources],
        }

    def lines(self) -> list[str]:
        """Counts, and every place that needs a hand."""
        return [
            *self._patch_lines(),
            *self._name_lines(),
            *self._source_lines(),
            f"{'fits' if self.is_ok else 'does not fit'}: {self.tree}, {self.seconds:.0f} s",
        ]

    def _patch_lines(self) -> list[str]:
        n_good = sum(not patch.rejects for patch in self.patches)
        lines = [f"patches: {n_good} of {len(self.patches)} apply"]
        for patch in self.patches:
            if patch.n_moved and not patch.rejects:
                lines.append(f"  ok      {patch.patch}: {patch.n_moved} hunks at other lines")
            for reject in patch.rejects:
                where = f"{reject.path}, hunk {reject.hunk}" if reject.hunk else reject.path
                lines.append(f"  FAILED  {patch.patch}: {where}: {reject.text}")
        return lines

    def _name_lines(self) -> list[str]:
        n_found = sum(name.is_found for name in self.names)
        lines = [f"names that are not public: {n_found} of {len(self.names)} found"]
        no_file = {name.path for name in self.names if not name.is_found and not name.name}
        for name in self.names:
            if not name.is_found and (not name.name or name.path not in no_file):
                what = f"{name.path} has no {name.name}" if name.name else f"there is no {name.path}"
                lines.append(f"  FAILED  {what} (tests: {', '.join(name.tests)})")
        return lines

    def _source_lines(self) -> list[str]:
        n_good = sum(source.error is None for source in self.sources)
        lines = [f"sources: {n_good} of {len(self.sources)} compile"] if self.sources else []
        return lines + [
            f"  FAILED  {source.source}: {source.error}" for source in self.sources if source.error
        ]
