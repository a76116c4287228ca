"""One row's runs: its tokens in, its logits out, its keys and values where they are.

Binding names to memory takes as long as a small layer, so a row binds once what does not change
(its caches), and what changes (ids, outputs) only when it does. Knows one session and shapes;
nothing of steps, requests or torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trserve.edge.onnx.kv_rows import CPU, KVRows

if TYPE_CHECKING:
    import onnxruntime

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class Row:
    """Row ``index`` of ``kv`` in ``session``.

    An output that is not bound is not computed for anybody: taps, where nobody keeps them.
    """

    def __init__(self, session: onnxruntime.InferenceSession, kv: KVRows, index: int) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._last = np.zeros(1, np.int32)
        self._length = np.zeros((), np.int32)
        self._bound: dict[str, tuple[int, tuple[int, ...]]] = {}
        kv.bind(index, self._binding)
        self._input("last", self._last)
        self._input("length", self._length)

    def run(
        self, ids: Ids, length: int, wanted: Ids, logits: Floats, hidden: Floats, tap: Floats | None
    ) -> None:
        """Compute ``ids`` [S], after which the row has ``length`` tokens.

        Args:
            ids: contiguous, and alive until this returns; so are all arrays.
            wanted: [K], indices into ``ids`` of which ``hidden`` is, the last one last.
            logits: [V], written: after the last token.
            hidden: [K, hidden_size], written.
            tap: as ``hidden``, where taps are kept: in every run or in none.
        """
        self._last[0] = length - 1
        self._length[...] = length
        self._input("ids", ids[None])
        self._input("wanted", wanted)
        self._output("logits", logits[None])
        self._output("hidden", hidden)
        if tap is not None:
            self._output("tap", tap)
        self._session.run_with_iobinding(self._binding)

    def _input(self, name: str, array: npt.NDArray[np.generic]) -> None:
        place = array.ctypes.data, array.shape
        if self._bound.get(name) != place:
            self._bound[name] = place
            self._binding.bind_input(name, CPU, 0, array.dtype.type, array.shape, place[0])

    def _output(self, name: str, array: Floats) -> None:
        place = array.ctypes.data, array.shape
        if self._bound.get(name) != place:
            self._bound[name] = place
            self._binding.bind_output(name, CPU, 0, np.float32, array.shape, place[0])
