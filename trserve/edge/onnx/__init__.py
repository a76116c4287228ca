"""Models on ONNX Runtime: written by ``trserve export-onnx``, run by ``--device onnx``."""
