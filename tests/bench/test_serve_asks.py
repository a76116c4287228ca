"""Prompts, data sets and traces in tiny made-up files; arrival times."""

import itertools
import json
import statistics

import pytest

from bench.serve_asks import random_asks, read_dataset
from bench.serve_load import arrivals
from bench.serve_traces import read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:48.6805901,396,109
2023-11-16 18:15:47.1805900,10,1
"""
MOONCAKE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 5000, "input_length": 1030, "output_length": 20, "hash_ids": [0, 1, 3]},
    {"timestamp": 5000, "input_length": 600, "output_length": 20, "hash_ids": [7, 8]},
]


def written(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def common(one, other):
    return sum(
        1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(one, other, strict=False))
    )


def test_random_prompts_have_their_lengths_and_begin_differently():
    one, other = itertools.islice(random_asks(40, 8, seed=1, spread=0.0), 2)
    assert len(one.prompt) == one.prompt_tokens == 40 and one.max_tokens == 8
    assert common(one.prompt, other.prompt) < 5
    assert next(random_asks(40, 8, seed=1, spread=0.0)) == one
    lengths = [len(a.prompt) for a in itertools.islice(random_asks(40, 8, seed=1, spread=0.5), 50)]
    assert 20 <= min(lengths) < 30 < 50 < max(lengths) <= 60


def test_azure(tmp_path):
    (tmp_path / "a.csv").write_text(AZURE)
    asks = list(read_trace("azure", tmp_path / "a.csv", speed_up=2.0).asks())
    assert [round(a.at_s, 3) for a in asks] == [0, 0.25, 1]  # sorted, from the first, sped up
    assert [(len(a.prompt), a.max_tokens) for a in asks] == [(374, 44), (10, 1), (396, 109)]
    short = read_trace("azure", tmp_path / "a.csv", scale=0.1, longest=45)
    assert short.left_out == 1 and [len(a.prompt) for a in short.asks()] == [37, 1]


def test_mooncake_prompts_share_what_their_hashes_share(tmp_path):
    path = written(tmp_path / "m.jsonl", MOONCAKE)
    one, two, three = read_trace("mooncake", path).asks()
    assert [a.at_s for a in (one, two, three)] == [0, 2, 2] and one.max_tokens == 500
    assert [len(a.prompt) for a in (one, two, three)] == [1100, 1030, 600]
    assert 1024 <= common(one.prompt, two.prompt) < 1028
    assert common(one.prompt, three.prompt) < 4
    assert one.prompt[:512] != one.prompt[512:1024]
    # Scaled, blocks are shorter and still stand where they stood.
    one, two, _ = read_trace("mooncake", path, scale=0.1).asks()
    assert [len(one.prompt), len(two.prompt)] == [110, 103]
    assert common(one.prompt, two.prompt) >= 102
    assert next(read_trace("mooncake", path, seed=5).asks()).prompt != one.prompt


def test_what_no_hash_covers_is_the_requests_own(tmp_path):
    rows = [{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [4]}] * 2
    one, two = read_trace("mooncake", written(tmp_path / "m.jsonl", rows)).asks()
    assert len(one.prompt) == 600 and 512 <= common(one.prompt, two.prompt) < 516


def test_a_trace_of_ones_own(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 5, "output_length": 3},
        {"timestamp": 1500, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    ]
    lengths, said = read_trace("jsonl", written(tmp_path / "t.jsonl", rows)).asks()
    assert len(lengths.prompt) == 5 and lengths.max_tokens == 3
    assert said.prompt == rows[1]["messages"] and said.at_s == 1.5 and said.max_tokens == 9


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("azure", "TIME,ContextTokens\nx,1\n", "line 2: expected TIMESTAMP"),
        ("azure", "", "no requests"),
        ("mooncake", '{"timestamp": 1}', "line 1: expected timestamp, input_length"),
        ("mooncake", "nothing", "line 1: no JSON"),
        ("jsonl", '{"timestamp": 1}', "expected timestamp and input_length"),
        ("jsonl", "[]", "expected an object"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, kind, text, said):
    (tmp_path / "file").write_text(text)
    with pytest.raises(SystemExit, match=said):
        read_trace(kind, tmp_path / "file")
    with pytest.raises(SystemExit, match="cannot be read"):
        read_trace(kind, tmp_path / "missing")


def test_all_requests_too_long_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="--longest 5"):
        read_trace("mooncake", written(tmp_path / "m", MOONCAKE), longest=5)


def test_sharegpt(tmp_path):
    talk = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "x" * 41}]
    entries = [{"conversations": talk}, {"conversations": talk[:1]}, {"conversations": []}]
    (tmp_path / "s.json").write_text(json.dumps(entries))
    (ask,) = read_dataset(tmp_path / "s.json", None, 64)
    assert ask.prompt == "Hello?" and ask.max_tokens == 11 and not ask.ignore_eos
    (ask,) = read_dataset(tmp_path / "s.json", 20, 64)
    assert ask.max_tokens == 20 and ask.ignore_eos


def test_json_lines(tmp_path):
    rows = [{"prompt": "a", "output_len": 5}, {"prompt": [1, 2]}, {"question": "b", "answer": "c"}]
    asks = read_dataset(written(tmp_path / "d.jsonl", rows), None, 64)
    assert [(a.prompt, a.max_tokens) for a in asks] == [("a", 5), ([1, 2], 64), ("b", 64)]
    with pytest.raises(SystemExit, match="line 2: has no prompt"):
        read_dataset(written(tmp_path / "d.jsonl", [rows[0], {"text": "a"}]), None, 64)


def gaps(rate, shape, count=4000):
    return [b - a for a, b in itertools.pairwise(itertools.islice(arrivals(rate, shape, 3), count))]


def test_arrivals_have_their_rate_and_their_burstiness():
    assert gaps(50, None, 10) == pytest.approx([0.02] * 9)
    for shape in (0.25, 1.0, 4.0):
        found = gaps(50, shape)
        mean = statistics.mean(found)
        assert mean == pytest.approx(0.02, rel=0.15)
        # The coefficient of variation of a Gamma distribution is shape ** -0.5.
        assert statistics.stdev(found) / mean == pytest.approx(shape**-0.5, rel=0.12)
