"""The edge study's parts: its scores, the paper's method, what counts as a handoff's bytes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.edge import _arguments, estimated_s, main, settings_of
from bench.edge_measured import Answer, means
from bench.edge_paper import FullPrefill, PaperMethod, Seen
from bench.edge_scores import ANSWER_TOKENS, THRESHOLDS, EmulatedConfidence, score, share_below
from bench.edge_tables import PAPER, PUBLISHED, TRSERVE, Setting, row, verdicts, with_ratios
from bench.edge_trserve import after_first_contact
from bench.http_client import Connection
from trserve.demo import model_path
from trserve.gateway.tokenizer import Tokenizer
from trserve.router_lib.base import RouterContext, StepResult

SHAPE = {
    "vocab_size": 700,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_path("tiny"))


# -- scores ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("threshold", PUBLISHED)
def test_as_many_tokens_are_routed_as_the_papers_were(seed: int, threshold: float) -> None:
    scores = [score(seed, position) for position in range(ANSWER_TOKENS)]
    assert sum(each < threshold for each in scores) == PUBLISHED[threshold][0]
    assert min(scores) > 0.3


def test_the_fit_is_monotone_and_seeds_differ() -> None:
    shares = [share_below(threshold) for threshold in THRESHOLDS]
    assert shares == sorted(shares)
    places = {tuple(p for p in range(100) if score(seed, p) < 0.7) for seed in range(20)}
    assert len(places) == 20


def routed(threshold: float, visit: float, position: int, model: int) -> list[int]:
    context = RouterContext(model, ("slm", "llm"), 10, {"threshold": 0.7})
    router = EmulatedConfidence(context)
    request = SimpleNamespace(
        params=SimpleNamespace(sampling=SimpleNamespace(seed=3)),
        committed_len=7 + position,
        prompt_len=7,
        extras=(7 + position).to_bytes(4, "little"),
    )
    values = {"threshold": threshold, "visit_tokens": visit, "hysteresis": 0.0}
    params = {name: torch.tensor([value]) for name, value in values.items()}
    nothing: Any = torch.zeros(1)
    result = StepResult(nothing, nothing, nothing, params, [request], nothing)
    return [int(each) for each in router.route(result)]


def test_the_router_routes_by_the_scores() -> None:
    for position in range(ANSWER_TOKENS):
        assert routed(0.8, 1.0, position, model=0) == [int(score(3, position) < 0.8)]
    assert routed(0.8, 1.0, 5, model=1) == [1]
    assert routed(0.8, 4.0, 5, model=1) == [0]


# -- the paper's method ------------------------------------------------------------------------


class Cloud:
    """Answers every completion with ``text``; remembers what was asked."""

    def __init__(self, text: str, reason: str = "length") -> None:
        choice = {"text": text, "finish_reason": reason}
        self.body = json.dumps({"choices": [choice]}).encode()
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            self.asked.append(json.loads(await reader.readexactly(length)))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(self.body))
            writer.write(self.body)


def paper(
    tokenizer: Tokenizer, cloud: Cloud, threshold: float, most: int, **more: Any
) -> tuple[Answer, list[int]]:
    """An answer to a fixed prompt, every other token of which is below a threshold of 0.5."""

    async def run() -> tuple[Answer, list[int]]:
        server = await asyncio.start_server(cloud, "127.0.0.1", 0)
        connection = await Connection.open(*server.sockets[0].getsockname()[:2])
        slm = FullPrefill.drawn(SHAPE, tokenizer.size, torch.float32)
        method = PaperMethod(slm, tokenizer, connection, "llm", every_other, **more)
        prompt = [1, *tokenizer.encode("Eva has 71 pencils.", add_special_tokens=False)]
        answer = await method.answer(prompt, 0, threshold, most, frozenset({2}))
        connection.close()
        server.close()
        return answer, prompt

    return asyncio.run(run())


def every_other(seen: Seen) -> float:
    return seen.position % 2


def test_one_call_a_routed_token_with_the_text_so_far(tokenizer: Tokenizer) -> None:
    cloud = Cloud(" pencils")
    answer, prompt = paper(tokenizer, cloud, 0.5, 5)
    assert (answer.tokens, answer.routed, answer.visits, answer.drawn) == (5, 3, 3, 5)
    assert [each["max_tokens"] for each in cloud.asked] == [1, 1, 1]
    assert cloud.asked[0]["prompt"] == tokenizer.decode(prompt, skip_special_tokens=True)
    assert "<|" not in cloud.asked[0]["prompt"]
    row = [*prompt, *answer.token_ids[:4]]
    assert cloud.asked[2]["prompt"] == tokenizer.decode(row, skip_special_tokens=True)
    assert answer.handoffs == 4
    assert answer.bytes > 4 * 60
    assert answer.compute_s > 0
    assert paper(tokenizer, cloud, 0.0, 5)[0].routed == 0


def test_text_on_the_wire_loses_tokens_inside_words(tokenizer: Tokenizer) -> None:
    (digit,) = tokenizer.encode("7", add_special_tokens=False)
    kept, _ = paper(tokenizer, Cloud("7"), 0.5, 1, spaced=False)
    changed, _ = paper(tokenizer, Cloud("7"), 0.5, 1)
    assert kept.token_ids == [digit]
    assert changed.token_ids != [digit]


def test_the_llms_end_is_the_end(tokenizer: Tokenizer) -> None:
    answer, _ = paper(tokenizer, Cloud("", "stop"), 0.5, 9)
    assert answer.token_ids == [2]


def test_every_step_computes_the_whole_row() -> None:
    lengths: list[int] = []

    class Net(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool, **more: Any) -> Any:
            assert not use_cache
            lengths.append(input_ids.shape[1])
            return SimpleNamespace(logits=torch.tensor([[[0.0, 1.0, 5.0]]]))

    slm = FullPrefill(Net(), size=2)
    assert [slm.next([0] * n)[0] for n in (3, 4)] == [1, 1]
    assert lengths == [3, 4]


# -- what was measured -------------------------------------------------------------------------


def test_bytes_of_handoffs_begin_behind_the_first_answer() -> None:
    log = [(0.0, True, 900), (0.1, True, 50), (0.2, False, 70), (0.3, True, 40), (0.4, False, 60)]
    assert after_first_contact(log, handoffs=4) == (100, 2)
    assert after_first_contact(log[:3], handoffs=2) == (0, 0)
    assert after_first_contact([], handoffs=0) == (0, 0)


def answer(times: Sequence[float], **more: Any) -> Answer:
    return Answer(list(times), **more)


def test_means() -> None:
    found = means(
        [
            answer([1.0, 1.5, 2.0], routed=1, bytes=100, handoffs=2),
            answer([3.0, 4.0], routed=3, bytes=500, handoffs=2),
        ]
    )
    assert (found.ttft_ms, found.total_s, found.routed) == (2000, 3.0, 2)
    assert found.tbt_ms == pytest.approx(1e3 * 2 / 3)
    assert found.bytes_per_handoff == 150
    assert means([answer([1.0])]).tbt_ms is None
    assert means([answer([1.0])]).bytes_per_handoff is None


def rows_of(total_s: float, handoff_bytes: int) -> list[dict[str, Any]]:
    paper = answer([1.0, 30.0], routed=1, drawn=2)
    sizes = {"bytes": 3 * handoff_bytes, "handoffs": 1, "frame_bytes": handoff_bytes, "frames": 1}
    ours = answer([0.1, total_s], routed=1, drawn=2, **sizes)
    settings = [Setting(PAPER, "float32", 0.0, 0.7), Setting(TRSERVE, "bfloat16", 0.0, 0.7)]
    pairs = zip(settings, (paper, ours), strict=True)
    return with_ratios([row(each, means([found]), (1, 10)) for each, found in pairs])


@pytest.mark.parametrize(("total_s", "size", "ok"), [(5.0, 200, True), (7.0, 201, False)])
def test_what_is_judged(total_s: float, size: int, ok: bool) -> None:
    rows = rows_of(total_s, size)
    assert [each["ok"] for each in verdicts(rows)] == [ok, ok, None]
    assert rows[1]["times_faster"] == pytest.approx(30 / total_s)
    assert rows[1]["cost"] == pytest.approx((2 + 10) / 20)
    assert rows[0]["published_total_s"] == 40.1
    interface = ("method", "threshold", "ttft_ms", "tbt_ms", "routed_tokens", "total_s")
    assert {*interface, "accuracy", "bytes_per_handoff", "cost"} <= set(rows[1])


def test_parts_are_merged_into_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for number, total_s in enumerate((7.0, 5.0)):
        rows = [each | {"service_s": 0.9 * (1 - number)} for each in rows_of(total_s, 150)]
        files.append(tmp_path / f"{number}.json")
        command = ["python", "-m", "bench.edge", "--part", str(number)]
        files[-1].write_text(json.dumps({"command": command, "results": rows}))
    merged = tmp_path / "merged.json"
    main(["--merge", *map(str, files), "--json", str(merged)])
    results = json.loads(merged.read_text())["results"]
    assert [(each["service_s"], each["method"]) for each in results] == [
        (0.0, PAPER),
        (0.0, TRSERVE),
        (0.9, PAPER),
        (0.9, TRSERVE),
    ]
    assert results[1]["times_faster"] == 6.0 and results[1]["run"] == "bench.edge --part 1"
    assert "2 runs" in capsys.readouterr().out


def test_settings_cover_every_threshold_and_the_longer_visit() -> None:
    settings = settings_of(_arguments([]))
    for service in (0.9, 0.0):
        for method in (PAPER, TRSERVE):
            own = [s for s in settings if (s.method, s.service_s, s.visit) == (method, service, 1)]
            assert tuple(dict.fromkeys(each.threshold for each in own)) == THRESHOLDS
        assert Setting(TRSERVE, "bfloat16", service, 0.8, 4) in settings
    both = [each.threshold for each in settings if (each.method, each.dtype) == (PAPER, "bfloat16")]
    assert both == [0.7, 0.8]


def test_the_duration_that_is_announced() -> None:
    args = _arguments(["--delay-ms", "100"])
    paper = Setting(PAPER, "float32", 0.9, 0.8)
    assert estimated_s([paper], 2, args, 0.25) == pytest.approx(2 * (25 + 65 * 1.1))
    visits = 100 / (4 + 0.35 / 0.65)
    ours = Setting(TRSERVE, "bfloat16", 0.0, 0.8, 4)
    assert estimated_s([ours], 1, args, 0.25) == pytest.approx(2 + 0.2 * visits)


@pytest.mark.parametrize("flags", [["--jitter-ms", "90"], ["--stall-chance", "2"]])
def test_a_way_that_makes_no_sense_is_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _arguments(flags)
    assert "error" in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_study(tmp_path: Path) -> None:
    """Both methods, real servers, one question; the machine may be busy, so nothing is judged."""
    result = tmp_path / "edge.json"
    flags = ["--quick", "--questions", "1", "--thresholds", "0.6,0.8", "--delay-ms", "10"]
    flags += ["--paper-dtype", "bfloat16", "--json", str(result)]
    command = [sys.executable, "-m", "bench.edge", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "minutes" in done.stderr
    rows = json.loads(result.read_text())["results"]
    study = [each for each in rows if "service_s" in each]
    found = {(r["method"], r["threshold"], r["visit_tokens"]): r for r in study}
    for method in (PAPER, TRSERVE):
        assert found[method, 0.6, 1]["routed_tokens"] == 1
        assert found[method, 0.8, 1]["routed_tokens"] == 65
    assert found[TRSERVE, 0.8, 4]["visits"] < 30
    assert found[TRSERVE, 0.8, 1]["bytes_per_handoff"] <= 200
    accuracy = {(r["method"], r["threshold"]): r["accuracy"] for r in rows if "problems" in r}
    assert accuracy["llm-alone", None] > accuracy["slm-alone", None]
    best = max(a for (method, _), a in accuracy.items() if method == TRSERVE)
    assert best > accuracy["slm-alone", None]
