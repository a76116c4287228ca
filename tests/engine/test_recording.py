"""An engine that records: the rows are what transformers computes, and belong to the answers."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.procfs import descendants
from trserve import Completion, Engine, Recording, demo
from trserve.config import config_from_flags
from trserve.errors import ConfigError
from trserve.plan import make_plan
from trserve.record_format import HEADER_BYTES, rows_path
from trserve.records import RequestRecord

MODELS = ("tiny", "small")
CHATS = [
    [{"role": "user", "content": f"What is {number} - 54 + 25?"}] for number in (125, 307, 88, 460)
]
TOP_K = 5
LONGER = {"ignore_eos": True, "max_tokens": 40, "temperature": 0}


def new_engine(directory: Path, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "models": MODELS,
        "dtype": "float32",
        "threads": (1, 1),
        "router_config": {"tau": 0.02},
        "record": directory,
        "record_top_k": TOP_K,
    }
    return Engine(**defaults | settings)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "new"


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with new_engine(directory) as running:
        yield running


def records(directory: Path) -> dict[str, RequestRecord]:
    recording = Recording(directory)
    assert recording.problems == []
    return {record.request_id: record for record in recording}


def record_of(directory: Path, answer: Completion) -> RequestRecord:
    assert answer.request_id is not None
    return records(directory)[answer.request_id]


def check_record(record: RequestRecord, answer: Completion) -> None:
    assert record.prompt_ids.tolist() == list(answer.prompt_token_ids)
    assert record.token_ids.tolist() == answer.token_ids
    assert record.sources.tolist() == answer.sources
    assert record.finish_reason == answer.finish_reason
    assert record.complete
    written = [record.rows(model).positions.tolist() for model in MODELS]
    assert sorted(written[0] + written[1]) == list(range(len(answer.token_ids)))


def answers_of(found: Completion | list[Completion]) -> list[Completion]:
    return found if isinstance(found, list) else [found]


@pytest.mark.parametrize("model", MODELS)
def test_rows_are_what_transformers_computes(engine: Engine, directory: Path, model: str) -> None:
    """Also of tokens that were thrown away, each after the answer as it was until there."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        demo.model_path(model), dtype=torch.float32
    )
    discarded = 0
    for answer in answers_of(engine.generate(CHATS, temperature=0, max_tokens=60)):
        record = record_of(directory, answer)
        check_record(record, answer)
        rows = record.rows(model, discarded=True)
        discarded += int((~rows.committed).sum())
        ids = np.concatenate((record.prompt_ids, record.token_ids))
        with torch.inference_mode():
            output = reference(torch.tensor(ids)[None].long(), output_hidden_states=True)
        last = torch.from_numpy(rows.positions) + len(record.prompt_ids) - 1
        hidden, logits = output.hidden_states[-1][0, last], output.logits[0, last]
        np.testing.assert_allclose(rows.hidden, hidden, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(rows.logsumexp, logits.logsumexp(-1), rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(rows.top_logits, logits.topk(TOP_K).values, rtol=1e-4, atol=1e-3)
        own = logits.gather(1, torch.from_numpy(rows.top_ids).long())
        np.testing.assert_allclose(rows.top_logits, own, rtol=1e-4, atol=1e-3)
        sampled = logits.gather(1, torch.from_numpy(rows.token_ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(rows.logits, sampled, rtol=1e-4, atol=1e-3)
    assert discarded > 0 or model == "small", "the router threw nothing of the small model away"


def test_what_comes_after_a_stop_string_is_not_in_the_record(
    engine: Engine, directory: Path
) -> None:
    free = answers_of(engine.generate(CHATS[0], **LONGER))[0]
    stop = free.text[12:15]
    answer = answers_of(engine.generate(CHATS[0], stop=stop, **LONGER))[0]
    assert answer.stop_reason == stop and len(answer.token_ids) < len(free.token_ids)
    check_record(record_of(directory, answer), answer)


def test_several_threads_and_choices_have_records_of_their_own(
    engine: Engine, directory: Path
) -> None:
    def run(chat: Any) -> list[Completion]:
        return answers_of(engine.generate(chat, n=3, temperature=1.2, seed=7, max_tokens=20))

    with ThreadPoolExecutor(4) as pool:
        answers = [answer for found in pool.map(run, CHATS, timeout=60) for answer in found]
    found = records(directory)
    assert len({answer.request_id for answer in answers}) == 12
    for answer in answers:
        assert answer.request_id is not None
        check_record(found[answer.request_id], answer)


def test_a_call_can_go_without_a_record(engine: Engine, directory: Path) -> None:
    before = set(records(directory))
    answer = answers_of(engine.generate("Hello", max_tokens=3, record=False))[0]
    assert answer.request_id is None
    assert set(records(directory)) == before


def test_of_a_stream_that_was_left_there_is_what_was_given(engine: Engine, directory: Path) -> None:
    before = set(records(directory))
    stream = engine.stream([5, 6], **LONGER)
    given = next(stream).token_ids + next(stream).token_ids
    stream.close()
    found = records(directory)
    (name,) = set(found) - before
    assert (found[name].finish_reason, found[name].token_ids.tolist()) == ("left", given)


def test_records_survive_retraction_and_a_second_run_adds_to_them(tmp_path: Path) -> None:
    """Eight requests in room for less than two: they take each other's KV all the time."""
    prompts = [[10 + place] * 16 for place in range(8)]
    options = {"max_tokens": 48, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    answers: list[list[Completion]] = []
    for settings in ({}, {"memory": 300_000, "max_model_len": 64, "enable_prefix_caching": False}):
        with new_engine(tmp_path, **settings) as engine:
            answers.append(answers_of(engine.generate(prompts, **options)))
    for free, pressed in zip(*answers, strict=True):
        assert free.token_ids == pressed.token_ids
    found = records(tmp_path)
    assert len(found) == 16
    for answer in answers[0] + answers[1]:
        assert answer.request_id is not None
        check_record(found[answer.request_id], answer)


def test_an_answer_whose_worker_was_killed_is_recorded_whole(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        stream = engine.stream([5, 6], temperature=0, ignore_eos=True, max_tokens=400)
        given = [token for part in islice(stream, 10) for token in part.token_ids]
        os.kill(worker_of(tmp_path, "tiny"), signal.SIGKILL)
        given += [token for part in stream for token in part.token_ids]
    assert len(given) == 400
    (record,) = records(tmp_path).values()
    assert record.token_ids.tolist() == given


def worker_of(directory: Path, model: str) -> int:
    """The process that has the rows of ``model`` open."""
    (rows,) = directory.glob(f"*.{MODELS.index(model)}.rows")
    for pid in descendants(os.getpid()):
        if any(file.resolve() == rows for file in Path(f"/proc/{pid}/fd").iterdir()):
            return pid
    raise AssertionError("nobody writes there")


def test_a_directory_of_other_shapes_is_refused(engine: Engine, directory: Path) -> None:
    with pytest.raises(ConfigError, match="top_k of tiny: 5 there, 6 now"):
        new_engine(directory, record_top_k=6)
    with pytest.raises(ConfigError, match="models"):
        new_engine(directory, models="tiny", threads=(1,), router="none", router_config={})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype of tiny: float32 there, bfloat16 now"),
        ({"quantization": "int8"}, r"dtype of tiny: float32 there, float32\+int8 now"),
        ({"load_format": "dummy"}, "weights of tiny: .* there, dummy now"),
    ],
)
def test_a_directory_of_other_weights_is_refused(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    settings = {"models": ("tiny",), "router": "none", "record": str(tmp_path)}
    plan = make_plan(config_from_flags(settings)).record
    assert plan is not None
    rows_path(tmp_path, plan.headers[0]).write_bytes(plan.headers[0].encode())
    assert make_plan(config_from_flags(settings)).record is not None
    with pytest.raises(ConfigError, match=message):
        make_plan(config_from_flags(settings | change))


def test_a_write_that_fails_stops_recording_and_no_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    others = descendants(os.getpid())
    with new_engine(tmp_path, models="tiny", threads=(1,), router="none", router_config={}) as e:
        kept = answers_of(e.generate([5, 6], **LONGER))[0]
        full = max(HEADER_BYTES, *(path.stat().st_size for path in tmp_path.iterdir()))
        for pid in set(descendants(os.getpid())) - set(others):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (full + 1000, full + 1000))
        answer = answers_of(e.generate([7, 8], **LONGER))[0]
    assert len(answer.token_ids) == 40
    assert "recording stopped" in capfd.readouterr().err
    recording = Recording(tmp_path)
    assert len(recording.problems) == 1
    first, second = recording
    assert (first.token_ids.tolist(), first.complete) == (kept.token_ids, True)
    assert 0 < len(second.token_ids) < 40
    assert second.token_ids.tolist() == answer.token_ids[: len(second.token_ids)]
    assert not second.complete
