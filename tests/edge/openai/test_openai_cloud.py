"""The cloud over HTTP: against a server that does as it is told, and against trserve itself."""

import ssl
import threading
import time

import msgspec
import numpy as np
import pytest

from tests.edge.openai.stub import LIMIT_S, answer_of, answers_of, wait, wrote
from tests.edge.openai.visits import END, visit
from trserve.config import config_from_flags
from trserve.edge.cloud import STAYS
from trserve.edge.openai_cloud import OpenAiCloud
from trserve.edge.openai_facts import ask_openai
from trserve.edge.openai_setup import check_router, read_key
from trserve.edge.openai_wire import Dialect
from trserve.errors import ConfigError, ModelUnavailableError
from trserve.ipc.baton import Finish
from trserve.plan import make_plan
from trserve.waiting import wait_readable


def test_a_visit_is_one_call_and_its_tokens_come_home(stub, cloud):
    stub.script = [wrote(5)]
    cloud.visit(visit([1, 2, 3]))
    answer = answer_of(cloud)
    assert (answer.session, answer.hop, answer.start) == (1, 1, 3)
    assert (answer.ids.tolist(), answer.sources.tolist()) == ([5], [1])
    assert (answer.destination, answer.finish, answer.empty) == (0, Finish.NONE, False)
    assert answer.left == (3, 4)
    ((path, body),) = stub.asked
    assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", [1, 2, 3], 1)
    assert stub.headers[0]["Authorization"] == "Bearer secret"
    assert cloud.facts().max_model_len == 128
    assert cloud.counts.handoffs == cloud.counts.answers == 1


def test_visits_take_as_many_tokens_as_the_router_or_the_request_says(stub, cloud):
    stub.script = [wrote(5, 6), wrote(5, 6, 8, 9)]
    cloud.configure({"visit_tokens": 2.0})
    cloud.visit(visit([1]))
    assert answer_of(cloud).ids.tolist() == [5, 6]
    cloud.visit(visit([1, 5, 6], hop=3, router={"visit_tokens": 4.0}))
    assert answer_of(cloud).ids.tolist() == [5, 6, 8, 9]
    assert [body["max_tokens"] for _, body in stub.asked] == [2, 4]
    assert len(stub.connections) == 1, "a connection is kept from call to call"


def test_an_end_and_the_row_s_limit_finish_the_request(stub, cloud):
    stub.script = [wrote(5, END, 6), wrote(5)]
    cloud.visit(visit([1], router={"visit_tokens": 4.0}))
    answer = answer_of(cloud)
    assert (answer.ids.tolist(), answer.finish) == ([5, END], Finish.STOP)
    cloud.visit(visit([1, 2], hop=3, limit=3, router={"visit_tokens": 4.0}))
    answer = answer_of(cloud)
    assert (answer.ids.tolist(), answer.finish) == ([5], Finish.LENGTH)
    assert stub.asked[-1][1]["max_tokens"] == 1


def test_a_request_of_this_model_alone_stays_there_to_its_end(stub, cloud):
    stub.script = [wrote(*[5] * 16), wrote(6, END)]
    cloud.visit(visit([1, 2], pinned=True))
    first, second = answers_of(cloud, 2)
    assert (first.destination, first.finish, len(first.ids)) == (STAYS, Finish.NONE, 16)
    assert (second.start, second.ids.tolist(), second.finish) == (18, [6, END], Finish.STOP)
    assert stub.asked[1][1]["prompt"] == [1, 2, *[5] * 16]


def test_many_at_once_and_one_that_is_ended(stub, cloud):
    gate = threading.Event()

    def later(handler):
        assert gate.wait(LIMIT_S)
        return wrote(5)

    stub.script = [later] * 4
    for session in range(1, 5):
        cloud.visit(visit([session], session=session))
    cloud.visit(visit([1], session=1))  # again, and nothing more is asked
    cloud.end(2)
    gate.set()
    assert {answer.session for answer in answers_of(cloud, 3)} == {1, 3, 4}


def test_a_closed_connection_is_no_loss(stub, cloud):
    stub.script = [wrote(5), lambda handler: None, wrote(6)]
    cloud.visit(visit([1]))
    answer_of(cloud)
    cloud.visit(visit([1, 5], hop=3))
    assert answer_of(cloud).ids.tolist() == [6]
    assert cloud.connected and cloud.connections == 1


def test_a_kept_connection_of_tls_that_was_closed_is_no_loss_either(stub, cloud, monkeypatch):
    stub.script = [wrote(5), wrote(6)]
    cloud.visit(visit([1]))
    answer_of(cloud)
    (kept,) = cloud._calls._idle

    def closed(*args):
        raise ssl.SSLEOFError(8, "EOF occurred in violation of protocol")

    monkeypatch.setattr(kept, "request", closed)
    cloud.visit(visit([1, 5], hop=3))
    assert answer_of(cloud).ids.tolist() == [6]
    assert cloud.connections == 1


def test_a_server_that_fails_is_unreachable_until_it_answers_again(stub, cloud):
    stub.script = [(500, {"error": {"message": "boom"}}), wrote(6)]
    cloud.visit(visit([1]))
    wait(cloud, lambda _: not cloud.connected)
    assert "answers 500: boom" in cloud.reason and stub.url in cloud.reason
    assert not cloud.refused
    wait(cloud, lambda _: cloud.connected)
    assert cloud.connections == 2
    cloud.visit(visit([1]))  # the visit that was under way, given again
    assert answer_of(cloud).ids.tolist() == [6]


def test_ids_that_the_tokenizer_has_not_are_written_at_home(stub):
    """A model may have more rows than its tokenizer ids: nobody must wait for such an answer."""
    cloud = OpenAiCloud(stub.url, vocabulary=100)
    cloud.start(time.monotonic())
    wait(cloud, lambda _: cloud.connected)
    stub.script = [wrote(5, 100, 6), wrote(2**31 - 1), wrote(8, 100), wrote(100)]
    cloud.visit(visit([1], router={"visit_tokens": 3.0}))
    assert answer_of(cloud).ids.tolist() == [5]
    cloud.visit(visit([1, 5], hop=3))
    answer = answer_of(cloud)
    assert (len(answer.ids), answer.destination, answer.empty) == (0, 0, True)
    cloud.visit(visit([1], session=2, pinned=True))
    first, second = answers_of(cloud, 2)
    assert (first.ids.tolist(), first.destination) == ([8], STAYS)
    assert (second.start, second.finish) == (2, Finish.WORKER_LOST)
    assert stub.asked[-1][1]["prompt"] == [1, 8]
    cloud.close()


def test_what_one_request_is_refused_for_is_written_at_home(stub, cloud):
    stub.script = [wrote(5), (400, {"message": "no such bias"}), wrote(6)]
    cloud.visit(visit([1]))
    answer_of(cloud)
    cloud.visit(visit([1, 5], hop=3))
    answer = answer_of(cloud)
    assert (len(answer.ids), answer.destination, answer.empty) == (0, 0, True)
    assert cloud.connected
    cloud.visit(visit([1, 5, 2], hop=5))
    assert answer_of(cloud).ids.tolist() == [6]


@pytest.mark.parametrize(
    "busy",
    [
        (429, {"message": "too many"}),
        (503, {"message": "not now"}, {"Retry-After": "0"}),
        (503, {"message": "not now"}, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
    ],
)
def test_a_server_that_is_busy_takes_nothing_from_others_either(stub, cloud, busy):
    gate = threading.Event()
    stub.script = [lambda handler: gate.wait(LIMIT_S) and wrote(5), busy, busy, wrote(6)]
    cloud.visit(visit([1], session=1))
    wait(cloud, lambda _: len(stub.asked) == 1)
    cloud.visit(visit([2], session=2))
    cloud.visit(visit([2], session=2))  # again, and it is not asked for at once
    answer = answer_of(cloud)
    assert (answer.session, answer.ids.tolist(), len(stub.asked)) == (2, [6], 4)
    gate.set()
    assert answer_of(cloud).ids.tolist() == [5]
    assert cloud.connections == 1


def test_a_refusal_takes_nothing_from_others_that_are_under_way(stub, cloud):
    gate = threading.Event()
    stub.script = [
        lambda handler: gate.wait(LIMIT_S) and wrote(5),
        (400, {"message": "this prompt is too long"}),
    ]
    cloud.visit(visit([1], session=1))
    wait(cloud, lambda _: len(stub.asked) == 1)
    cloud.visit(visit([2], session=2))
    refused = answer_of(cloud)
    assert (refused.session, refused.empty, cloud.connected) == (2, True, True)
    gate.set()
    assert answer_of(cloud).ids.tolist() == [5]
    assert cloud.connections == 1


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ((401, {"message": "who?"}), "answers 401: who?"),
        ((400, {"message": "unknown field"}), "answers 400: unknown field"),
        ({"choices": [{"text": "words"}]}, "no token ids"),
    ],
)
def test_what_will_not_change_is_said_as_a_refusal(stub, cloud, told, said):
    stub.script = [told]
    cloud.visit(visit([1]))
    wait(cloud, lambda _: not cloud.connected)
    assert cloud.refused and said in cloud.reason


def test_a_deadline_bounds_the_call(stub, cloud):
    stub.script = [lambda handler: time.sleep(1.0)]
    late = visit([1])._replace(deadline_ns=time.monotonic_ns() + 100_000_000)
    began = time.monotonic()
    cloud.visit(late)
    wait(cloud, lambda _: not cloud.connected)
    assert time.monotonic() - began < 0.9
    assert "in time" in cloud.reason


def test_nobody_there_and_another_model(stub):
    stub.server_close()
    gone = OpenAiCloud(stub.url)
    gone.start(time.monotonic())
    wait(gone, lambda _: "nobody listens" in gone.reason)
    assert not gone.connected and not gone.refused
    gone.close()


def test_a_model_of_the_name_is_taken_else_the_first(stub):
    stub.models["data"].append({"id": "other", "owned_by": "vllm"})
    for name, taken in (("other", "other"), ("32b", "big"), ("", "big")):
        stub.script = [wrote(5)]
        cloud = OpenAiCloud(stub.url, model=name)
        cloud.start(time.monotonic())
        wait(cloud, lambda _: cloud.connected)  # noqa: B023
        cloud.visit(visit([1]))
        answer_of(cloud)
        assert stub.asked[-1][1]["model"] == taken
        cloud.close()


def test_a_server_without_a_model_is_refused(stub):
    stub.models = {"data": []}
    cloud = OpenAiCloud(stub.url)
    cloud.start(time.monotonic())
    wait(cloud, lambda _: "serves no model" in cloud.reason)
    assert cloud.refused
    cloud.close()


def test_a_plan_knows_how_long_the_model_s_rows_may_be(stub):
    assert ask_openai(f"{stub.url}/v1", "big", "").max_model_len == 128
    flags = {"models": ("tiny", f"big@openai:{stub.url}"), "router": "entropy"}
    plan = make_plan(config_from_flags(flags))
    assert [each.max_model_len for each in plan.models] == [1024, 128]
    for said in ({}, {"max_model_len": 0}, {"max_model_len": True}, {"max_model_len": "128"}):
        stub.models = {"data": [{"id": "big", **said}]}
        assert ask_openai(stub.url, "big", "") is None
    stub.models = (500, {"message": "boom"})
    with pytest.raises(ConnectionError, match="answers 500: boom"):
        ask_openai(stub.url, "big", "")
    with pytest.raises(ModelUnavailableError, match="boom"):
        make_plan(config_from_flags(flags))
    stub.models = [1]
    with pytest.raises(ConnectionError, match="does not say what it serves"):
        ask_openai(stub.url, "big", "")
    plan = make_plan(config_from_flags({**flags, "on_peer_loss": "wait"}))
    assert plan.models[1].max_model_len == 1024


def test_what_follows_a_grammar_is_written_at_home(stub, cloud):
    given = visit([1])
    params = msgspec.structs.replace(given.params, grammar=b"x")
    cloud.visit(given._replace(params=params))
    answer = answer_of(cloud)
    assert (len(answer.ids), answer.destination, answer.empty) == (0, 0, True)
    params = msgspec.structs.replace(params, pinned=True)
    cloud.visit(given._replace(hop=3, params=params))
    assert answer_of(cloud).finish is Finish.WORKER_LOST
    assert not stub.asked


def test_log_probabilities_come_along_where_they_are_wanted(stub, cloud):
    tops = {"token_id:5": -0.5, "token_id:7": -1.5, "token_id:9": -2.5}
    said = {"tokens": ["token_id:5"], "token_logprobs": [-0.5], "top_logprobs": [tops]}
    stub.script = [{"choices": [{"token_ids": [5], "logprobs": said}]}, wrote(5)]
    params = msgspec.structs.replace(visit([1]).params, tops=2)
    cloud.visit(visit([1])._replace(params=params))
    records = answer_of(cloud).records
    words, floats = records.words[0], records.words.view(np.float32)[0]
    assert (records.first, stub.asked[0][1]["logprobs"]) == (1, 2)
    assert floats[0] == -0.5 and np.isnan(floats[1])
    assert words[3:5].tolist() == [5, 7] and floats[5:].tolist() == [-0.5, -1.5]
    cloud.visit(visit([1, 5], hop=3)._replace(params=params))
    floats = answer_of(cloud).records.words.view(np.float32)[0]
    assert floats[0] == -9999.0 and np.isfinite(floats[5:]).all(), "nothing is left undefined"
    said["top_logprobs"] = [{"token_id:99999999999": -0.1, "token_id:-2": -0.2, "token_id:6": -1}]
    stub.script = [{"choices": [{"token_ids": [5], "logprobs": said}]}]
    cloud.visit(visit([1, 5], hop=5)._replace(params=params))
    assert answer_of(cloud).records.words[0, 3] == 6, "what is no id is not named"


def test_routers_that_decide_there_are_refused_and_keys_are_one_line(tmp_path):
    for name in ("confidence", "r2r", "entropy", "none"):
        check_router(name)
    for name in ("r-stitch", "me", "step-leader", "random"):
        with pytest.raises(ConfigError, match=name):
            check_router(name)
    file = tmp_path / "key"
    file.write_text("abc\n")
    assert read_key(str(file)) == "abc"
    file.write_text("two lines\nof keys")
    with pytest.raises(ConfigError, match="one line"):
        read_key(str(file))
    for url in ("ftp://host", "http://", "http://host:port"):
        with pytest.raises(ConfigError, match="openai:"):
            OpenAiCloud(url)


@pytest.mark.parametrize("dialect", Dialect)
def test_trserve_as_the_server_writes_what_it_would_have_written(trserve, dialect):
    """The same greedy tokens, whether it is asked once or token by token."""
    prompt = list(range(20, 60))
    whole = trserve.post(
        "/v1/completions",
        {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True},
    )["choices"][0]["token_ids"]
    cloud = OpenAiCloud(trserve.url)
    try:
        cloud.start(time.monotonic())
        wait(cloud, lambda _: cloud.connected)
        cloud._dialect = dialect
        row = list(prompt)
        for hop, tokens in enumerate((1, 2, 3), 1):
            given = visit(row, hop=hop, prompt_len=40, router={"visit_tokens": float(tokens)})
            cloud.visit(given)
            row += answer_of(cloud).ids.tolist()
        assert row[40:] == whole
    finally:
        cloud.close()


def test_an_agent_waits_on_the_descriptor_alone(stub, cloud):
    stub.script = [wrote(5)]
    assert not wait_readable(cloud.fd, 0)
    cloud.visit(visit([1]))
    assert wait_readable(cloud.fd, LIMIT_S)
    assert np.array_equal(cloud.poll(time.monotonic())[0].ids, [5])
    assert not wait_readable(cloud.fd, 0)
