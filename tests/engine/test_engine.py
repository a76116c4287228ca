"""The Python API: the same tokens as a plain loop, and an end that leaves nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from tests.golden.compare import Answer, assert_golden
from tests.golden.random_pair import RandomPair, build_random_pair, random_prompts
from tests.golden.reference import Reference, Setting
from tests.procfs import descendants
from tests.serverproc import wait_until
from trserve import Completion, Engine, EngineError, SamplingParams
from trserve.edge.keys_command import make_files
from trserve.errors import RequestError, StartupError
from trserve.gateway.dispatcher import Job
from trserve.gateway.generation import Generation

OUTPUT = 24
GONE_S = 10.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> RandomPair:
    return build_random_pair(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def engine(pair: RandomPair) -> Iterator[Engine]:
    settings = {"models": (str(pair.slm), str(pair.llm)), "dtype": "float32"}
    with Engine(**settings, router="r-stitch", router_config={"tau": pair.taus[1]}) as running:
        yield running


def test_tokens_and_sources_are_those_of_a_plain_loop(engine: Engine, pair: RandomPair) -> None:
    prompts = random_prompts(12, Random("engine"))
    reference = Reference(pair.slm, pair.llm)
    setting = Setting(tau=pair.taus[1], max_tokens=OUTPUT)
    answers = engine.generate(prompts, max_tokens=OUTPUT, temperature=0)
    assert isinstance(answers, list)
    cases = [
        (f"prompt {index}", reference.run(prompt, setting), answer_of(answer))
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    assert_golden(cases)


def answer_of(completion: Completion) -> Answer:
    return Answer(completion.token_ids, completion.sources, completion.finish_reason)


def test_a_stream_is_the_whole_in_parts(engine: Engine) -> None:
    whole = engine.generate([7, 8, 9], max_tokens=OUTPUT, temperature=0)
    parts = list(engine.stream([7, 8, 9], max_tokens=OUTPUT, temperature=0))
    assert isinstance(whole, Completion)
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert parts[-1].finish_reason == whole.finish_reason
    assert sum(whole.usage["trserve"]["tokens"].values()) == len(whole.token_ids)


def test_a_stream_that_is_left_ends_its_request(engine: Engine) -> None:
    stream = engine.stream([5] * 8, max_tokens=400, temperature=0, ignore_eos=True)
    next(stream)
    stream.close()
    # Every slot is free again: as many requests as there are slots get through at once.
    answers = engine.generate([[5, 6]] * 256, max_tokens=1)
    assert isinstance(answers, list)
    assert len(answers) == 256


def test_an_answer_has_the_form_that_is_asked_for(embedded: Engine) -> None:
    params = SamplingParams(guided_regex="[0-9]{2}(, [0-9]{2}){3}", temperature=1.0, seed=4)
    whole = embedded.generate("x", params, max_tokens=OUTPUT)
    assert isinstance(whole, Completion)
    assert re.fullmatch("[0-9]{2}(, [0-9]{2}){3}", whole.text)
    assert "".join(p.text for p in embedded.stream("x", params, max_tokens=OUTPUT)) == whole.text
    with pytest.raises(RequestError, match="unclosed"):
        embedded.generate("x", guided_regex="[")


@pytest.mark.parametrize(
    ("options", "param"),
    [({"top_p": 0}, "top_p"), ({"nonsense": 1}, "nonsense"), ({"trserve": {"only": "x"}}, "only")],
)
def test_bad_requests_name_the_parameter(
    engine: Engine, options: dict[str, object], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        engine.generate("hi", **options)
    assert param in str(refused.value.param)


def test_a_bad_prompt_behind_more_than_there_are_slots_is_refused_first(
    pair: RandomPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"models": (str(pair.slm), str(pair.llm)), "dtype": "float32"}
    with Engine(**settings, router="none", max_requests=1) as narrow:
        submit, sent = narrow._session.submit, []

        def noted(jobs: Sequence[Job]) -> list[Generation]:
            sent.extend(jobs)
            return submit(jobs)

        monkeypatch.setattr(narrow._session, "submit", noted)
        good = [[1], [2]]
        with pytest.raises(RequestError, match="token"):
            narrow.generate([*good, [10**6]], max_tokens=3)
        assert not sent
        answers = narrow.generate(good, max_tokens=3, ignore_eos=True)
        assert isinstance(answers, list) and len(sent) == 2
        assert [len(answer.token_ids) for answer in answers] == [3, 3]


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="nowhere"):
        Engine(models=str(tmp_path / "nowhere"))


def test_a_closed_engine_says_so(pair: RandomPair) -> None:
    engine = Engine(models=str(pair.slm))
    assert isinstance(engine.generate([1], max_tokens=1), Completion)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([1], max_tokens=1)


PROGRAM = """
import sys, time, trserve
engine = trserve.Engine(models=sys.argv[1])
assert "torch" not in sys.modules
print("up", flush=True)
time.sleep(60)
"""


def test_a_program_that_is_killed_takes_its_workers_with_it(
    pair: RandomPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(pair.slm)], stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"up\n"
        family = descendants(program.pid)
        assert len(family) == 2, "a supervisor and a worker"
        program.send_signal(signal.SIGKILL)
    alive = wait_until(
        lambda: [pid for pid in family if Path(f"/proc/{pid}/exe").exists()],
        lambda left: not left,
        GONE_S,
    )
    assert not alive
    assert not list(tmp_path.iterdir())


def test_an_engine_places_nothing_on_a_cluster() -> None:
    with pytest.raises(StartupError, match="--executor ray: is for `trserve launch`"):
        Engine(executor="ray")


@pytest.mark.slow
def test_an_engine_that_others_may_dial_keeps_to_its_own_slots(tmp_path: Path) -> None:
    """The others are the edge port's; one slot that two allocate would be two requests."""
    make_files(tmp_path / "listens", tmp_path / "dials", "home")
    settings = {"models": ("tiny", "small"), "max_requests": 3, "edge_sessions": 2}
    own = {"edge_listen": "127.0.0.1:0", "edge_keys": str(tmp_path / "listens"), "router": "none"}
    with Engine(**settings, **own) as engine:
        slots = engine._session._dispatcher._slots  # type: ignore[attr-defined]
        assert slots.num_free == 3
        answers = engine.generate(["One"] * 8, max_tokens=3, trserve={"only": "tiny"})
        assert isinstance(answers, list) and len(answers) == 8
