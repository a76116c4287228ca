"""Opening graphs in ONNX Runtime. Knows its options; nothing of what a graph computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trserve.edge.onnx.files import PIP
from trserve.errors import ModelUnavailableError

if TYPE_CHECKING:
    import onnxruntime


def load_runtime() -> Any:
    """The package ``onnxruntime``. ModelUnavailableError where it is not installed."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ModelUnavailableError(
            f"--device onnx needs ONNX Runtime, which is not installed ({error})\n{PIP}"
        ) from None
    return onnxruntime


def open_session(graph: Path, threads: int) -> onnxruntime.InferenceSession:
    """The graph in the file ``graph``, run by ``threads`` threads of a CPU.

    Raises:
        ModelUnavailableError: the file is damaged, or this version of the runtime cannot run it.
    """
    runtime = load_runtime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # Within a run, threads that spin for their next part save a third of it; after it they would
    # take the cores from the link and the gateway, which share them on a small device.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return runtime.InferenceSession(
            str(graph), sess_options=options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # the runtime has a class of its own for each kind of failure
        reason = str(error).strip().partition("\n")[0]
        raise ModelUnavailableError(
            f"{graph} cannot be run by onnxruntime {runtime.__version__}: {reason}\n"
            "export the model again: trserve export-onnx"
        ) from None
