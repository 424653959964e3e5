"""Which device llama.cpp gives each layer to, where shares of the layers are given (--tensor-split).

In: the shares and the number of layers. Out: a device's index per layer. The rule is that of `load_tensors`
in llama.cpp's src/llama-model.cpp, in its 32-bit floats; the output is shared out as one layer more.
"""

from __future__ import annotations

from collections.abc import Sequence


def device_of_layers(
    shares: Sequence[float], n_layer: int, n_gpu_layers: int | None = None
) -> list[int | None]:
    """The index of each layer's device, [n_layer]; None: the host's.

    `shares`: of each device, not all 0; `n_gpu_layers`: of the last layers, the output counted; None or
    less than 0: all.
    """
    import numpy as np  # loaded here: it takes longer than the rest of a command

    n_all = n_layer + 1
    n_gpu = n_all if n_gpu_layers is None or n_gpu_layers < 0 else min(n_gpu_layers, n_all)
    ends = np.cumsum(np.asarray(shares, np.float32), dtype=np.float32)
    ends /= ends[-1]
    first = n_all - n_gpu
    places = np.arange(n_gpu, dtype=np.float32) / np.float32(max(1, n_gpu))
    devices = np.searchsorted(ends, places, side="right").tolist()
    return [None if il < first else devices[il - first] for il in range(n_layer)]
