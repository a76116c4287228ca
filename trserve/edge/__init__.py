"""Models at other hosts: the link agent and the edge port, and an SLM on ONNX Runtime."""
