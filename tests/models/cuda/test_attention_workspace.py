"""What flashinfer's planner asks for, by its own arithmetic for known shapes."""

import pytest

from trserve.models.cuda.attention_workspace import (
    MOST_PROCESSORS,
    Heads,
    eager_bytes,
    graph_bytes,
    workspace_bytes,
)
from trserve.workers.cuda.buckets import Buckets

MIB = 2**20


@pytest.mark.parametrize(
    ("heads", "rows", "width", "mib"),
    [
        (Heads(64, 8, 128), 2, 8, 133),
        (Heads(64, 8, 128), 64, 8, 383),
        (Heads(64, 8, 128), 256, 1, 193),
        (Heads(32, 8, 128), 64, 8, 159),
        (Heads(28, 4, 128), 64, 8, 160),
        (Heads(16, 8, 128), 128, 8, 144),
    ],
)
def test_graphs_on_132_multiprocessors(heads, rows, width, mib):
    """Worked out by hand from the planner's source; all are more than 128 MiB."""
    assert round(graph_bytes(heads, 132, rows, width) / MIB) == mib
    assert workspace_bytes(heads, 132, [(rows, width)]) >= graph_bytes(heads, 132, rows, width)


def planned(heads, processors, widths, chunk):
    """The planner's own steps for rows without a graph, where each row's keys make ``chunk``
    shares; None where it does not share them out."""
    group = heads.query // heads.kv
    packed = [width * group for width in widths]
    average = sum(packed) // len(packed)
    if heads.size >= 512:
        tile = 16 if average <= 32 else 32
    else:
        tile = 128 if average > 64 and heads.size < 256 else 64 if average > 16 else 16
    programs = sum(-(-length // tile) * chunk for length in packed)
    if programs > 2 * processors // heads.kv:
        return None
    return heads.query * programs * tile * (heads.size + 1) * 4


@pytest.mark.parametrize("heads", [Heads(64, 8, 128), Heads(8, 1, 256), Heads(14, 2, 64)])
@pytest.mark.parametrize("processors", [40, 132])
def test_no_step_without_a_graph_asks_for_more(heads, processors):
    found = [
        planned(heads, processors, widths, chunk)
        for widths in ([1], [9], [16], [700], [3, 5, 40], [1] * 30)
        for chunk in range(1, 300)
    ]
    asked = [size for size in found if size is not None]
    assert asked and max(asked) <= eager_bytes(heads, processors)


def test_a_decode_without_tensor_cores_asks_for_less():
    """32 programs a multiprocessor, a row of every head of the group each."""
    for heads in (Heads(16, 8, 128), Heads(12, 12, 64), Heads(24, 8, 512)):
        rows = heads.query // heads.kv * 32 * 132
        assert rows * (heads.size + 1) * 4 <= eager_bytes(heads, 132)


def test_all_shapes_of_a_worker_are_served():
    heads = Heads(64, 8, 128)
    shapes = [
        (bucket.rows, bucket.width)
        for bucket in Buckets.of(max_rows=64, max_tokens=2048).largest_first
    ]
    size = workspace_bytes(heads, 132, shapes)
    assert size == 383 * MIB
    assert all(graph_bytes(heads, 132, *shape) <= size for shape in shapes)
    assert size <= workspace_bytes(heads, MOST_PROCESSORS, shapes)


def test_small_models_get_what_is_recommended():
    assert workspace_bytes(Heads(14, 2, 64), 132, [(8, 8)]) == 128 * MIB
