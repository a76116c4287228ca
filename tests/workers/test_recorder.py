"""What the recorder appends, and what the reader makes of it, over workers without weights."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.fakes import VOCAB, Worker, World, hash_route, router_class, world
from trserve.errors import ConfigError
from trserve.ipc.baton import Finish
from trserve.params import RequestParams, SamplingParams, encode_params
from trserve.record_format import HEADER_BYTES, RecordHeader, read_rows, rows_path
from trserve.recording import EndLog, plan_record
from trserve.records import ModelRows, Recording, RequestRecord
from trserve.workers import recorder as recorder_module
from trserve.workers.recorder import Recorder
from trserve.workers.runner import ForwardOutput

TOP_K = 3
PROMPT = [3, 1, 4, 1, 5]


def header(index: int, models: int = 2, run: str = "r1") -> RecordHeader:
    return RecordHeader(
        run=run,
        index=index,
        models=[f"m{model}" for model in range(models)],
        dtype="float32",
        weights="w",
        hidden_size=2,
        tokenizer_size=VOCAB,
        top_k=TOP_K,
    )


def replace_header(old: RecordHeader, **changes: Any) -> RecordHeader:
    values = {name: getattr(old, name) for name in old.__struct_fields__}
    return RecordHeader(**values | changes)


def attach(worker: Worker, directory: Path, max_rows: int = 8, run: str = "r1") -> Recorder:
    """Have ``worker`` record; the hidden state of a row is its best token and its model."""
    recorder = Recorder(directory, header(worker.index, run=run), max_rows)
    forward = worker.runner.forward

    def forward_with_hidden(inputs: Any, also: Any = None) -> ForwardOutput:
        output = forward(inputs, also)
        best = output.logits.argmax(-1).float()
        hidden = torch.stack((best, torch.full_like(best, worker.index)), dim=1)
        return replace(output, hidden=hidden)

    worker.runner.forward = forward_with_hidden  # type: ignore[method-assign]
    worker.cycle._recorder = recorder
    return recorder


@contextmanager
def recorded(directory: Path, **settings: Any) -> Iterator[World]:
    with world(**settings) as w:
        recorders = [attach(worker, directory) for worker in w.workers]
        yield w
        for recorder in recorders:
            recorder.close()


def only(directory: Path) -> RequestRecord:
    (record,) = Recording(directory)
    return record


def check_rows(rows: ModelRows, model: int) -> None:
    """Greedy: what was sampled is the best, and the two best are what the fake runner says."""
    assert (rows.top_ids[:, 0] == rows.token_ids).all()
    assert (rows.top_ids[:, 1] == (rows.token_ids + 1) % VOCAB).all()
    assert (rows.logits == 2.0).all()
    total = np.log(np.exp(2.0) + np.exp(1.0) + VOCAB - 2)
    np.testing.assert_allclose(rows.logsumexp, total, rtol=1e-6)
    np.testing.assert_allclose(rows.top_logprobs[:, 0], 2.0 - total, rtol=1e-5)
    assert (rows.hidden[:, 0] == rows.token_ids).all()
    assert (rows.hidden[:, 1] == model).all()


def test_records_are_the_answers_whoever_wrote_them(tmp_path: Path) -> None:
    router = router_class(hash_route(1, 40), hash_route(1, 30))
    prompts = [PROMPT, PROMPT[:2], PROMPT * 3]
    with recorded(tmp_path, router=router, max_tokens=8) as w:
        slots = [w.submit(prompt, limit=40) for prompt in prompts]
        w.run(*slots)
        outcomes = [w.outcome(slot) for slot in slots]
    records = list(Recording(tmp_path))
    assert [record.request_id for record in records] == ["r1:1", "r1:2", "r1:3"]
    for record, prompt, outcome in zip(records, prompts, outcomes, strict=True):
        assert record.complete and record.finish_reason is None
        assert record.prompt_ids.tolist() == prompt
        assert [*prompt, *record.token_ids.tolist()] == outcome.row
        assert record.sources.tolist() == outcome.sources
        for model, name in enumerate(record.models):
            rows = record.rows(name)
            assert rows.positions.tolist() == np.flatnonzero(record.sources == model).tolist()
            assert (record.token_ids[rows.positions] == rows.token_ids).all()
            check_rows(rows, model)


def test_discarded_tokens_are_there_for_those_who_ask(tmp_path: Path) -> None:
    with recorded(tmp_path, router=router_class(hash_route(1, 60))) as w:
        slot = w.submit(PROMPT, limit=30)
        w.run(slot)
    record = only(tmp_path)
    rows = record.rows(0, discarded=True)
    thrown = ~rows.committed
    assert thrown.any()
    assert (record.sources[rows.positions[thrown]] == 1).all()
    assert len(record.rows(0).positions) == rows.committed.sum()
    check_rows(rows, 0)


def test_a_torn_tail_is_left_out_and_a_successor_goes_on_behind_it(tmp_path: Path) -> None:
    with world(workers=1) as w:
        attach(w.workers[0], tmp_path).close()
    path = rows_path(tmp_path, header(0))
    with path.open("ab") as file:
        file.write(b"torn")
    assert len(read_rows(path, header(0).row, start=HEADER_BYTES)) == 0
    with recorded(tmp_path, workers=1) as w:
        slot = w.submit(PROMPT, limit=8)
        w.run(slot)
        row = w.outcome(slot).row
    with path.open("ab") as file:
        file.write(b"torn again")
    assert [*PROMPT, *only(tmp_path).token_ids.tolist()] == row


def rows_of(request: int, tokens: Sequence[tuple[int, int, int]]) -> Any:
    """Rows of (position, token, committed)."""
    rows = np.zeros(len(tokens), header(0).row)
    rows["request"] = request
    rows["position"], rows["token"], rows["committed"] = zip(*tokens, strict=True)
    return rows


def write(directory: Path, index: int, rows: Any, prompt: Sequence[int] = ()) -> None:
    path = rows_path(directory, header(index))
    path.write_bytes(header(index).encode() + rows.tobytes())
    prompts = [(1, at, token) for at, token in enumerate(prompt)]
    path.with_suffix(".prompts").write_bytes(
        np.array(prompts, [("request", "<u8"), ("position", "<u4"), ("token", "<i4")]).tobytes()
    )


def test_of_two_rows_of_one_position_the_later_counts(tmp_path: Path) -> None:
    """A worker that was killed had committed what its successor gave to the peer."""
    write(tmp_path, 0, rows_of(1, [(2, 5, 1), (3, 6, 1), (3, 7, 0), (2, 5, 1)]), [8, 9])
    write(tmp_path, 1, rows_of(1, [(3, 60, 1)]))
    record = only(tmp_path)
    assert (record.token_ids.tolist(), record.sources.tolist()) == ([5, 60], [0, 1])
    assert record.rows(0, discarded=True).token_ids.tolist() == [5, 7]
    assert record.complete


def test_overshoot_is_dropped_where_the_end_is_known(tmp_path: Path) -> None:
    write(tmp_path, 0, rows_of(1, [(1, 5, 1), (2, 6, 1), (3, 7, 1)]), [8])
    ends = EndLog(plan_record(tmp_path, [header(0), header(1)]))
    ends.add(1, 2, "stop")
    record = only(tmp_path)
    assert (record.token_ids.tolist(), record.finish_reason) == ([5, 6], "stop")
    assert record.complete
    assert record.rows(0, discarded=True).token_ids.tolist() == [5, 6]


def test_an_answer_is_cut_where_rows_are_missing_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, 0, rows_of(1, [(1, 5, 1), (3, 7, 1)]), [8])
    record = only(tmp_path)
    assert record.token_ids.tolist() == [5]
    assert not record.complete


def test_requests_that_want_no_record_have_none(tmp_path: Path) -> None:
    with recorded(tmp_path, workers=1) as w:
        kept = w.submit(PROMPT, limit=10)
        sampling = SamplingParams(temperature=0.0, eos_token_ids=())
        blob = encode_params(RequestParams(sampling=sampling, record=False))
        secret = w.slots.publish(PROMPT, blob, limit=10, entry=0)
        w.run(kept, secret)
        assert w.baton(secret).finish is Finish.LENGTH
    assert only(tmp_path).request_id == "r1:1"


def test_logits_that_are_not_finite_have_no_row(tmp_path: Path) -> None:
    def token(model: int, row: Sequence[int]) -> int:
        return -1 if len(row) == 7 else 20

    with recorded(tmp_path, workers=1, token=token) as w:
        slot = w.submit(PROMPT, limit=20)
        w.run(slot)
        assert w.baton(slot).finish is Finish.NUMERIC_ERROR
    assert only(tmp_path).token_ids.tolist() == [20, 20]


def test_hidden_states_beyond_float16_are_its_largest(tmp_path: Path) -> None:
    with world(workers=1) as w:
        recorder = attach(w.workers[0], tmp_path)
        forward = w.workers[0].runner.forward

        def huge(inputs: Any, also: Any = None) -> ForwardOutput:
            output = forward(inputs, also)
            return replace(output, hidden=torch.tensor([[1e6, -1e6]]))

        w.workers[0].runner.forward = huge  # type: ignore[method-assign]
        slot = w.submit(PROMPT, limit=6)
        w.run(slot)
        recorder.close()
    assert only(tmp_path).rows(0).hidden.tolist() == [[65504.0, -65504.0]]


def test_a_full_disk_stops_recording_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = 3

    def write_all(fd: int, data: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.write(fd, b"part of a row")
            raise OSError(errno.ENOSPC, "No space left on device")
        os.write(fd, data.tobytes())

    with recorded(tmp_path, workers=1, token=lambda model, row: 20) as w:
        monkeypatch.setattr(recorder_module, "write_all", write_all)
        slot = w.submit(PROMPT, limit=15)
        with caplog.at_level(logging.ERROR):
            w.run(slot)
        assert w.baton(slot).finish is Finish.LENGTH
    (message,) = caplog.messages
    assert "No space left" in message and "the requests go on" in message
    recording = Recording(tmp_path)
    assert ["stopped early" in problem for problem in recording.problems] == [True]
    (record,) = recording
    assert record.token_ids.tolist() == [20, 20]  # after the prompt, two rows


def test_a_directory_of_other_models_is_refused(tmp_path: Path) -> None:
    headers = [header(0), header(1)]
    plan_record(tmp_path, headers)
    for each in headers:
        rows_path(tmp_path, each).write_bytes(each.encode())
    assert plan_record(tmp_path, [header(i, run="r2") for i in (0, 1)]).run == "r2"
    with pytest.raises(ConfigError, match="top_k of m0: 3 there, 9 now"):
        plan_record(tmp_path, [replace_header(each, top_k=9) for each in headers])
    with pytest.raises(ConfigError, match="weights of m0"):
        plan_record(tmp_path, [replace_header(each, weights="x") for each in headers])
    with pytest.raises(ConfigError, match="models: "):
        plan_record(tmp_path, [header(0, models=1)])


def later_version() -> bytes:
    return replace_header(header(0), version=2).encode()


BAD_HEADERS = {
    "no magic": (b"x" * HEADER_BYTES, "header of a recording"),
    "no JSON": (header(0).encode().replace(b"{", b"["), "cannot be read"),
    "later version": (later_version(), "format version 2"),
}


@pytest.mark.parametrize(("content", "message"), BAD_HEADERS.values(), ids=list(BAD_HEADERS))
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.0.rows").write_bytes(content)
    for refuse in (lambda: Recording(tmp_path), lambda: plan_record(tmp_path, [header(0)])):
        with pytest.raises(ConfigError, match=message):
            refuse()


@pytest.mark.parametrize("length", [0, 100])
def test_a_file_without_a_whole_header_has_no_rows(tmp_path: Path, length: int) -> None:
    torn = rows_path(tmp_path, header(0))
    torn.write_bytes(header(0).encode()[:length])
    with pytest.raises(ConfigError, match="no records"):
        Recording(tmp_path)
    plan_record(tmp_path, [header(0), header(1)])
    with recorded(tmp_path) as w:  # a successor in the same run makes it whole
        slot = w.submit(PROMPT, limit=8)
        w.run(slot)
    assert len(only(tmp_path).token_ids) == 3


def test_an_empty_directory_has_no_records_and_a_file_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no records"):
        Recording(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--record .*file: "):
        plan_record(tmp_path / "file", [header(0)])


def test_a_request_that_was_only_begun_is_not_there(tmp_path: Path) -> None:
    with recorded(tmp_path) as w:
        slot = w.submit([1] * 30, limit=40)
        w.slots.cancel(slot)
        w.run(slot)
    assert list(Recording(tmp_path)) == []
