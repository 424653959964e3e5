"""The tiny random models and adapters that cases ask for, each written once."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Final

from gguf import GGMLQuantizationType as Type

from tools.soak.adapters import DENSE, EXPERTS, write_adapter

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
gguf_models = importlib.import_module("gguf_models")  # the tests' own

N_VOCAB: Final = 259  # of all of them
# of each layer's experts: one type, or those of (gate, up, down); repeated
TYPES: Final = {
    "mixed": gguf_models.MIXED_TYPES,
    "k-quants": ((Type.Q4_K, Type.Q4_K, Type.Q6_K), (Type.Q5_K, Type.Q5_K, Type.Q8_0)),
    "q8": (Type.Q8_0,),
    "mxfp4": (Type.MXFP4,),
    "iq": ((Type.IQ4_XS, Type.Q3_K, Type.IQ2_XXS), (Type.Q2_K, Type.IQ3_S, Type.F16)),
}


def write_files(folder: Path, arch: str, types: str) -> dict[str, str]:
    """A model, and two adapters for it: of its attention, and of its experts."""
    model = folder / f"{arch}-{types}.gguf"
    paths = {"model": model}
    paths |= {name: folder / f"{model.stem}-{name}.gguf" for name in ("attention", "experts")}
    if not all(path.exists() for path in paths.values()):
        gguf_models.write_model(model, arch, TYPES[types])
        write_adapter(paths["attention"], model, DENSE, 0)
        write_adapter(paths["experts"], model, EXPERTS, 1)
    return {name: str(path) for name, path in paths.items()}
