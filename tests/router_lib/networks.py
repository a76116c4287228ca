"""Small random checkpoints in the layouts of the official files, and what they compute in float64.

Written from the formulas with torch's own modules; shares no code with trserve. ``probability`` is
of one row: hidden state [H], sampled token, raw logits [V] of the tokenizer's ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]
TOP = 20
"""How many logits the small R2R networks read."""


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random numbers of a size that keeps sums of a row near 1."""
    return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])


def linear(generator: torch.Generator, name: str, outputs: int, inputs: int) -> Tensors:
    return {
        f"{name}.weight": draw(generator, outputs, inputs),
        f"{name}.bias": draw(generator, outputs),
    }


def norm(generator: torch.Generator, name: str, size: int) -> Tensors:
    return {
        f"{name}.weight": 1.0 + 0.3 * torch.randn(size, generator=generator),
        f"{name}.bias": 0.3 * torch.randn(size, generator=generator),
    }


# -- CITER and the edge system -------------------------------------------------------------------


def confidence_tensors(hidden: int, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    wide = 2 * hidden
    found = linear(generator, "mlp.0", wide, hidden)
    found |= norm(generator, "mlp.1", wide)
    found["mlp.1.running_mean"] = 0.2 * torch.randn(wide, generator=generator)
    found["mlp.1.running_var"] = 0.1 + torch.rand(wide, generator=generator)
    found["mlp.1.num_batches_tracked"] = torch.tensor(7)
    found |= linear(generator, "mlp.4", hidden, wide)
    found |= linear(generator, "linear", 1, hidden)
    found["linear.weight"] *= 4.0
    return found


def confidence_probability(tensors: Tensors, hidden: torch.Tensor) -> float:
    size = len(hidden)
    wide = 2 * size
    layers = [nn.Linear(size, wide), nn.BatchNorm1d(wide), nn.ReLU(), nn.Dropout(0.1)]
    mlp = nn.Sequential(*layers, nn.Linear(wide, size), nn.Dropout(0.1))
    model = nn.ModuleDict({"mlp": mlp, "linear": nn.Linear(size, 1)}).double()
    model.load_state_dict(tensors)
    model.train(False)
    return float(torch.sigmoid(model["linear"](mlp(hidden.double()[None]))).detach())


# -- R2R -----------------------------------------------------------------------------------------

R2R_CLASSES = (
    "HiddenStatesTokenLMHeadLogitsClassifier",
    "HiddenStatesLogitsClassifier",
    "HiddenStatesClassifier",
    "LogitsClassifier",
)


def r2r_tensors(
    name: str,
    hidden: int,
    dims: Sequence[int] = (32, 32),
    *,
    vocab: int | None = None,
    normalize: bool = False,
    seed: int = 0,
) -> Tensors:
    """``vocab`` adds the token embedding, as in the file that ends in ``_all.pt``."""
    generator = torch.Generator().manual_seed(seed)
    token = "Token" in name
    found: Tensors = {}
    if name == "LogitsClassifier":
        found |= linear(generator, "logits_projection", dims[0], TOP)
    elif name == "HiddenStatesClassifier":
        found |= linear(generator, "hidden_states_projection", dims[0], hidden)
    else:
        found |= linear(generator, "logits_projection", hidden, TOP)
        found |= linear(generator, "combined_projection", dims[0], hidden * (2 + token))
    if normalize and name == "HiddenStatesClassifier":
        found |= norm(generator, "layer_norm", hidden)
    elif normalize and name != "LogitsClassifier":
        found |= norm(generator, "layer_norm_hidden_states", hidden)
        if token:
            found |= norm(generator, "layer_norm_token", hidden)
    if vocab is not None and token:
        found["token_embeddings.weight"] = torch.randn(vocab, hidden, generator=generator)
    found |= linear(generator, "backbone.input_projection", dims[0], dims[0])
    for index, (inputs, outputs) in enumerate(zip(dims, [*dims[1:], dims[-1]], strict=True)):
        block = f"backbone.blocks.{index}"
        found |= norm(generator, f"{block}.layer_norm", inputs)
        found |= linear(generator, f"{block}.mlp.0", 4 * inputs, inputs)
        found |= linear(generator, f"{block}.mlp.3", outputs, 4 * inputs)
        if inputs != outputs:
            found |= linear(generator, f"{block}.dim_change", outputs, inputs)
    found |= norm(generator, "backbone.output_layer.0", dims[-1])
    found |= linear(generator, "backbone.output_layer.1", 1, dims[-1])
    found["backbone.output_layer.1.weight"] *= 3.0
    return found


def r2r_file(
    name: str, tensors: Tensors, *, threshold: float | None = 0.5, normalize: bool = False
) -> dict[str, Any]:
    """What the official code hands to ``torch.save``; its sizes in ``init_args`` are wrong."""
    return {
        "model_type": name,
        "init_args": {
            "hidden_states_size": 2048,
            "normalize_input": normalize,
            "pretrained_model_name": "somebody/some-model",
            "dtype": torch.bfloat16,
        },
        "common_args": {"threshold": threshold, "input_type": ["hidden_states", "token", "logits"]},
        "model_specific_args": {},
        "state_dict": tensors,
    }


def r2r_probability(
    name: str,
    tensors: Tensors,
    hidden: torch.Tensor,
    token: int,
    logits: torch.Tensor,
    embedding: torch.Tensor | None = None,
    *,
    normalize: bool = False,
) -> float:
    exact = {key: value.double() for key, value in tensors.items()}
    h, z = hidden.double(), logits.double().sort(descending=True).values[:TOP]
    table = exact.get("token_embeddings.weight", embedding)
    if normalize:
        z = torch.exp(z - z.max()) / torch.exp(z - z.max()).sum()
    if name == "LogitsClassifier":
        x = _linear(exact, "logits_projection", z)
    elif name == "HiddenStatesClassifier":
        x = _linear(exact, "hidden_states_projection", _norm(exact, "layer_norm", h, normalize))
    else:
        parts = [_norm(exact, "layer_norm_hidden_states", h, normalize)]
        if "Token" in name:
            assert table is not None
            e = table.double()[token]
            parts.append(_norm(exact, "layer_norm_token", e, normalize))
        parts.append(_linear(exact, "logits_projection", z))
        x = _linear(exact, "combined_projection", torch.cat(parts))
    x = _linear(exact, "backbone.input_projection", x)
    index = 0
    while f"backbone.blocks.{index}.mlp.0.weight" in exact:
        x = _block(exact, f"backbone.blocks.{index}", x)
        index += 1
    x = _norm(exact, "backbone.output_layer.0", x)
    logit = float(_linear(exact, "backbone.output_layer.1", x))
    return 1.0 / (1.0 + math.exp(-logit))


def _block(exact: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    inner = _linear(exact, f"{name}.mlp.0", _norm(exact, f"{name}.layer_norm", x))
    inner = 0.5 * inner * (1.0 + torch.erf(inner / math.sqrt(2.0)))
    change = f"{name}.dim_change"
    skipped = _linear(exact, change, x) if f"{change}.weight" in exact else x
    return skipped + _linear(exact, f"{name}.mlp.3", inner)


def _linear(exact: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return exact[f"{name}.weight"] @ x + exact[f"{name}.bias"]


def _norm(
    exact: Mapping[str, torch.Tensor], name: str, x: torch.Tensor, wanted: bool = True
) -> torch.Tensor:
    if not wanted:
        return x
    centred = (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5)
    return centred * exact[f"{name}.weight"] + exact[f"{name}.bias"]


# -- Co-LLM --------------------------------------------------------------------------------------


def defer_vector(hidden: int, seed: int = 0) -> torch.Tensor:
    return 2.0 * draw(torch.Generator().manual_seed(seed), 1, hidden)


def defer_probability(vector: torch.Tensor, hidden: torch.Tensor) -> float:
    logit = float(vector.double().flatten() @ hidden.double())
    return 1.0 / (1.0 + math.exp(-logit))
