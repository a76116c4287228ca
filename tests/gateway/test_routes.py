"""Routes beside generation: requests ended and looked up, caches flushed, models probed, ids."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from tests.gateway.stack import completion, new_plan
from tests.gateway.test_http import Gateway, play
from trserve.endpoint_plan import EndpointPlan
from trserve.errors import RequestError
from trserve.gateway import app, cache_flush, probe, sglang_routes, tokenize_routes
from trserve.gateway.app import Phase
from trserve.gateway.cache_flush import CacheFlush
from trserve.gateway.main import Gateway as Process
from trserve.gateway.model_links import links_of
from trserve.gateway.model_states import ModelStates
from trserve.gateway.placement import Placements
from trserve.gateway.request_log import MAX_KEPT, RequestLog
from trserve.ipc.control import Message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


async def ask(g: Gateway, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON (or text) of one request on a connection of its own."""
    reader, writer = await g.connect()
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    head_bytes, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status = int(head_bytes.split()[1])
    return status, json.loads(answer) if answer[:1] in (b"{", b"[") else answer.decode()


async def while_working(g: Gateway, task: asyncio.Task[Any]) -> Any:
    """The result of ``task``, the workers taking turns meanwhile."""
    while not task.done():
        g.work()
        await asyncio.sleep(0)
    return task.result()


def post(g: Gateway, path: str, **fields: Any) -> asyncio.Task[tuple[int, Any]]:
    greedy = {} if "input_ids" in fields else {"temperature": 0}
    return asyncio.create_task(ask(g, "POST", path, {**greedy, **fields}))


# ---- requests that are open, and what became of them ----


def test_an_open_request_ends_where_it_stands(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        one = post(g, "/v1/completions", prompt=[1, 2], max_tokens=40, rid="mine")
        params = {"max_new_tokens": 9, "temperature": 0}
        other = post(g, "/generate", input_ids=[3], sampling_params=params)
        await g.until(lambda: g.dispatcher.num_live == 2)
        g.work(5)
        assert await ask(g, "POST", "/abort_request", {"rid": "nobody's"}) == (200, {"aborted": 0})
        assert await ask(g, "POST", "/abort_request", {"rid": "mine"}) == (200, {"aborted": 1})
        status, body = await while_working(g, one)
        assert status == 200
        choice = body["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "abort_request")
        assert 0 < len(choice["text"]) < 40
        status, body = await while_working(g, other)
        assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 9}
        await g.check_nothing_left()

    play(story, folder)


def test_all_are_ended_and_those_that_wait_are_refused(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        fields = {"prompt": [1, 2], "max_tokens": 40}
        held = post(g, "/v1/completions", **fields, n=4)
        await g.until(lambda: g.dispatcher.num_live == 4)
        waits = post(g, "/v1/completions", **fields)
        await g.until(lambda: g.dispatcher.num_waiting == 1)
        g.work(3)
        assert (await ask(g, "POST", "/abort_request", {"abort_all": True}))[1] == {"aborted": 2}
        status, body = await while_working(g, waits)
        assert (status, body["error"]["code"]) == (400, "aborted")
        status, body = await while_working(g, held)
        assert [choice["finish_reason"] for choice in body["choices"]] == ["abort"] * 4
        await g.check_nothing_left()

    play(story, folder)


def test_one_that_waits_in_an_open_stream_is_told_there(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        held = post(g, "/v1/completions", prompt=[1], max_tokens=40, n=4)
        await g.until(lambda: g.dispatcher.num_live == 4)
        waits = post(g, "/v1/completions", prompt=[1], max_tokens=4, stream=True, rid="w")
        await g.until(lambda: g.dispatcher.num_waiting == 1)
        await asyncio.sleep(0.1)  # comments keep the stream alive, which has begun
        assert (await ask(g, "POST", "/abort_request", {"rid": "w"}))[1] == {"aborted": 1}
        status, text = await waits
        assert status == 200
        assert ": keep-alive" in text and '"code":"aborted"' in text and "[DONE]" in text
        await while_working(g, held)
        await g.check_nothing_left()

    play(story, folder, endpoint=EndpointPlan(log_requests=False, sse_keep_alive_s=0.02))


def test_what_became_of_a_request(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        body = json.dumps(
            {"prompt": [1], "max_tokens": 60, "temperature": 0, "stream": True}
        ).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work(4)
        await reader.readuntil(b"\r\n\r\n")
        event = (await reader.readuntil(b"\n\n")).partition(b"data: ")[2]
        own = json.loads(event)["id"]
        path = f"/v1/trserve/requests/{own}"
        status, said = await ask(g, "GET", path)
        assert (status, said["status"], said["finish_reasons"]) == (200, "running", [None])
        assert said["usage"]["completion_tokens"] >= 1
        writer.close()
        while g.dispatcher.num_live:  # a stream finds out when it writes
            g.work()
            await asyncio.sleep(0.01)
        g.work(2)
        await g.until(lambda: not g.state.tasks)
        status, said = await ask(g, "GET", path)
        assert (said["status"], said["id"]) == ("cancelled", own)
        task = post(g, "/v1/completions", prompt=[1], max_tokens=3)
        _, body = await while_working(g, task)
        status, said = await ask(g, "GET", f"/v1/trserve/requests/{body['id']}")
        assert said["status"] == "finished"
        assert said["finish_reasons"] == ["length"]
        assert said["usage"] == body["usage"]
        status, body = await ask(g, "GET", "/v1/trserve/requests/nobody's")
        assert (status, body["error"]["code"]) == (404, "not_found")

    play(story, folder)


def test_the_log_is_bounded() -> None:
    class Named:
        def __init__(self, response_id: str) -> None:
            self.response_id = response_id
            self.generations = ()
            self.account = None

    log = RequestLog()
    for number in range(MAX_KEPT + 5):
        with log.entry(Named(f"{number}"), Named(""), [completion()]):  # type: ignore[arg-type]
            assert log.describe(f"{number}")["status"] == "running"
    assert log.describe("5")["usage"] is None
    with pytest.raises(RequestError):
        log.describe("4")


# ---- caches ----


class Launcher:
    """Hands messages to workers that answer when a test says so."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def answer(self, flush: CacheFlush, *models: int) -> None:
        for model in models:
            message = {"type": "cache_flushed", "number": self.sent[-1]["number"], "model": model}
            assert flush.on_message(message)


def test_a_flush_waits_for_every_model(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        launcher = Launcher()
        flush = CacheFlush(2, g.dispatcher, g.service.states, launcher.sent.append)
        task = asyncio.create_task(flush.flush())
        await g.until(lambda: bool(launcher.sent))
        launcher.answer(flush, 1, 1)
        await asyncio.sleep(0)
        assert not task.done()
        launcher.answer(flush, 0)
        await task
        launcher.answer(flush, 0)  # one that comes late means nothing
        assert not flush.on_message({"type": "drain"})

    play(story, folder)


def test_no_flush_while_requests_run(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        task = post(g, "/v1/completions", prompt=[1], max_tokens=5)
        await g.until(lambda: g.dispatcher.num_live == 1)
        flush = CacheFlush(2, g.dispatcher, g.service.states, lambda message: None)
        with pytest.raises(RequestError, match="1 requests are running") as refused:
            await flush.flush()
        assert refused.value.status == 400
        await while_working(g, task)

    play(story, folder)


def test_a_flush_that_a_worker_does_not_answer_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_flush, "ANSWER_S", 0.05)

    async def story(g: Gateway) -> None:
        flush = CacheFlush(2, g.dispatcher, g.service.states, lambda message: None)
        with pytest.raises(RequestError) as refused:
            await flush.flush()
        assert refused.value.status == 503

    play(story, folder)


def test_whatever_the_launcher_is_asked_its_socket_is_read_afterwards() -> None:
    class Control:
        """Notes what happens to the socket, whose descriptor tells of a message once."""

        def __init__(self) -> None:
            self.events: list[str] = []

        def send(self, message: Message) -> None:
            self.events.append(message["type"])

        def receive_all(self) -> list[Message]:
            self.events.append("read")
            return []

    async def story() -> None:
        control: Any = Control()
        flush = CacheFlush(0, *[SimpleNamespace()] * 2)  # type: ignore[arg-type]
        admin = SimpleNamespace()
        Process(SimpleNamespace(), control, *[SimpleNamespace()] * 6, flush, admin)  # type: ignore[arg-type]
        for ask in (flush.ask, admin.ask):
            ask({"type": "asked"})
            await asyncio.sleep(0)
        assert control.events == ["asked", "read"] * 2

    asyncio.run(story())


def test_only_models_that_are_up_are_asked(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        states = g.service.states
        states.on_message({"type": "worker_down", "model": 0, "message": "x"})
        launcher = Launcher()
        flush = CacheFlush(2, g.dispatcher, states, launcher.sent.append)
        task = asyncio.create_task(flush.flush())
        await g.until(lambda: bool(launcher.sent))
        launcher.answer(flush, 1)
        await task
        states.on_message({"type": "worker_down", "model": 1, "message": "x"})
        await flush.flush()  # nobody has a cache
        assert len(launcher.sent) == 1

    play(story, folder)


# ---- a token from every model ----


@pytest.mark.parametrize("path", ["/health_generate", "/health?deep=1", "/readyz?deep=1"])
def test_every_model_writes_a_token(folder: Path, path: str) -> None:
    async def story(g: Gateway) -> None:
        task = asyncio.create_task(ask(g, "GET", path))
        await g.until(lambda: g.dispatcher.num_live == 2)
        status, body = await while_working(g, task)
        assert (status, body["status"]) == (200, "ok")
        assert g.service.metrics.generation_tokens == [1, 1]
        await g.check_nothing_left()

    play(story, folder)


def test_a_model_that_writes_nothing_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "ANSWER_S", 0.05)

    async def story(g: Gateway) -> None:
        status, body = await ask(g, "GET", "/health_generate")
        assert status == 503
        assert "m0 wrote no token" in body["error"]["message"]
        assert (await ask(g, "GET", "/health"))[0] == 200  # the shallow look does not see it
        await g.check_nothing_left()
        g.service.states.on_message({"type": "worker_down", "model": 1, "message": "it fell"})
        status, body = await ask(g, "GET", "/health_generate")
        assert (status, body["error"]["message"]) == (503, "it fell")

    play(story, folder)


def test_a_model_that_is_at_home_elsewhere_is_asked_for_no_token(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        first, second = g.service.plan.models
        plan = structs.replace(
            g.service.plan, models=[structs.replace(first, remote="edge"), second]
        )
        g.service.plan = plan
        g.service.states.links = links_of(plan, g.w.slab)
        g.service.placements = Placements(plan, g.service.states)
        task = asyncio.create_task(ask(g, "GET", "/health_generate"))
        await g.until(lambda: g.dispatcher.num_live == 1)
        assert await while_working(g, task) == (200, {"status": "ok"})
        assert g.service.metrics.generation_tokens == [0, 1]
        _, info = await ask(g, "GET", "/get_model_info")
        assert info["model_path"] == second.path

    play(story, folder)


@pytest.mark.parametrize("most_waiting", [8, 0])
def test_slots_that_others_work_in_are_no_sign_of_death(folder: Path, most_waiting: int) -> None:
    async def story(g: Gateway) -> None:
        held = post(g, "/v1/completions", prompt=[1], max_tokens=60, n=4)
        await g.until(lambda: g.dispatcher.num_live == 4)
        checked = asyncio.create_task(ask(g, "GET", "/health_generate"))
        await g.until(lambda: g.dispatcher.num_waiting == 2 or not most_waiting)
        for _ in range(20):  # fewer than would end the answers
            g.work()
            await asyncio.sleep(0.01)
        assert g.dispatcher.num_live == 4
        assert await checked == (200, {"status": "ok"})
        await g.until(lambda: not g.dispatcher.num_waiting)
        await while_working(g, held)
        await g.check_nothing_left()

    play(story, folder, endpoint=EndpointPlan(log_requests=False, max_queue=most_waiting))


@pytest.mark.parametrize("most_waiting", [8, 0])
def test_slots_that_nobody_works_in_are_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, most_waiting: int
) -> None:
    monkeypatch.setattr(probe, "ANSWER_S", 0.05)

    async def story(g: Gateway) -> None:
        held = post(g, "/v1/completions", prompt=[1], max_tokens=6, n=4)
        await g.until(lambda: g.dispatcher.num_live == 4)
        status, body = await ask(g, "GET", "/health_generate")
        assert status == 503 and "m0 wrote no token" in body["error"]["message"]
        await while_working(g, held)
        await g.check_nothing_left()

    play(story, folder, endpoint=EndpointPlan(log_requests=False, max_queue=most_waiting))


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.DRAINING, Phase.LOST])
def test_no_deep_check_when_not_serving(folder: Path, phase: Phase) -> None:
    async def story(g: Gateway) -> None:
        g.app.phase = phase
        for path in ("/health_generate", "/health?deep=1"):
            status, body = await ask(g, "GET", path)
            assert status == 503 and phase.value in json.dumps(body)
        assert g.dispatcher.num_live == 0

    play(story, folder)


# ---- names, ids, the rest ----


@pytest.mark.parametrize(
    ("fields", "entry", "pinned"),
    [
        ({"model": "trserve"}, 0, False),
        ({"model": "m1"}, 1, True),
        ({"model": "m0", "only": "m0"}, 0, True),
        ({"model": "m1", "entry_model": "m1"}, 1, True),
    ],
)
def test_member_models_are_names(
    tmp_path: Path, fields: dict[str, Any], entry: int, pinned: bool
) -> None:
    plan = new_plan(tmp_path, lengths=(64, 32))
    placements = Placements(plan, ModelStates(["m0", "m1"]))
    found = placements.of(completion(**fields))
    assert (found.entry, found.pinned) == (entry, pinned)
    assert placements.aliases == ["m0", "m1"]
    assert [placements.max_model_len(name) for name in ("trserve", "m0", "m1")] == [32, 64, 32]
    for wrong in ({"model": "m0", "only": "m1"}, {"model": "m0", "entry_model": "m1"}):
        with pytest.raises(RequestError):
            placements.of(completion(**wrong))
    with pytest.raises(RequestError) as refused:
        placements.of(completion(model="m2"))
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert Placements(new_plan(tmp_path, served_names=["m0"]), ModelStates(["m0"])).aliases == [
        "m1"
    ]


def test_text_to_ids_and_back(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        text = "Hello, 세계 😀"
        status, found = await ask(
            g, "POST", "/tokenize", {"prompt": text, "return_token_strs": True}
        )
        assert status == 200
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] == 64
        _, back = await ask(g, "POST", "/detokenize", {"tokens": found["tokens"]})
        assert back == {"prompt": text, "text": text}
        _, found = await ask(g, "POST", "/v1/tokenize", {"prompt": ["a", "bc"]})
        assert [len(row) for row in found["tokens"]] == found["count"]
        _, back = await ask(g, "POST", "/detokenize", {"tokens": found["tokens"]})
        assert back["prompt"] == ["a", "bc"]
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        _, found = await ask(g, "POST", "/tokenize", chat)
        _, back = await ask(g, "POST", "/detokenize", {"tokens": found["tokens"]})
        assert back["text"].endswith("<|im_start|>assistant\n")
        _, back = await ask(
            g, "POST", "/detokenize", {"tokens": found["tokens"], "skip_special_tokens": True}
        )
        assert "<|im_start|>" not in back["text"]
        _, found = await ask(g, "POST", "/tokenize", {"prompt": "x " * 20_000})
        assert found["count"] >= 20_000

    play(story, folder)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": []}, 400),
        ("/tokenize", {"prompt": []}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"prompt": "x", "model": "y"}, 404),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [10**6]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [1, [2]]}, 400),
        ("/abort_request", {}, 400),
        ("/abort_request", {"rid": 5}, 400),
        ("/generate", {}, 400),
        ("/generate", {"text": "x", "model": "y"}, 404),
        ("/v1/completions", {"prompt": [1], "n": 5, "stream": True}, 400),
        ("/tokenize", {"prompt": "x", "model": "m" * 1025}, 400),
        ("/tokenize", {"prompt": "x", "model": "m" * 1024}, 404),
        ("/detokenize", {"tokens": [1], "model": "m" * 1025}, 400),
        ("/v1/completions", {"prompt": [1], "model": "m" * 1025}, 400),
    ],
)
def test_wrong_bodies(folder: Path, path: str, body: Any, status: int) -> None:
    async def story(g: Gateway) -> None:
        found, said = await ask(g, "POST", path, body)
        assert found == status
        assert said["error"]["message"]

    play(story, folder)


CHAT = [{"role": "user", "content": "hi"}]
PADDING = {"chat_template_kwargs": {"x": "y" * 12_000}}


@pytest.mark.parametrize(
    ("path", "body", "part", "beside"),
    [
        ("/v1/chat/completions", {"messages": CHAT}, "render_chat", False),
        ("/v1/chat/completions", {"messages": CHAT, **PADDING}, "render_chat", True),
        ("/tokenize", {"messages": CHAT, **PADDING}, "render_chat", True),
        ("/tokenize", {"prompt": "x" * 12_000}, "encode", True),
        ("/detokenize", {"tokens": [1] * 12_000}, "decode", True),
        ("/detokenize", {"tokens": [1]}, "decode", False),
    ],
)
def test_long_work_is_done_beside_the_loop(
    folder: Path, path: str, body: Any, part: str, beside: bool
) -> None:
    async def story(g: Gateway) -> None:
        tokenizer, threads = g.service.tokenizer, []
        real = getattr(tokenizer, part)

        def watched(*given: Any, **options: Any) -> Any:
            threads.append(threading.current_thread())
            return real(*given, **options)

        setattr(tokenizer, part, watched)
        status, _ = await while_working(g, post(g, path, **{"max_tokens": 2, **body}))
        assert status == 200
        assert [thread is not threading.current_thread() for thread in threads] == [beside]

    play(story, folder)


@pytest.mark.parametrize(
    ("path", "fields", "module", "parser"),
    [
        ("/v1/chat/completions", {"messages": CHAT}, app, "parse_chat"),
        ("/v1/completions", {"prompt": [1]}, app, "parse_completion"),
        ("/generate", {"input_ids": [1]}, sglang_routes, "parse_generate"),
    ],
)
@pytest.mark.parametrize("long", [False, True])
def test_a_long_body_is_read_beside_the_loop(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    module: Any,
    parser: str,
    long: bool,
) -> None:
    threads, real = [], getattr(module, parser)

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return real(*given)

    monkeypatch.setattr(module, parser, watched)

    async def story(g: Gateway) -> None:
        padding = {"user": "y" * 12_000} if long else {}
        status, _ = await while_working(g, post(g, path, max_tokens=2, **fields, **padding))
        assert status == 200
        assert [thread is not threading.current_thread() for thread in threads] == [long]

    play(story, folder)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": ["xxx", "yyy"]}),
        ("/tokenize", {"messages": CHAT}),
        ("/detokenize", {"tokens": [[1, 2, 3], [4, 5, 6]]}),
        ("/detokenize", {"tokens": [1] * 6}),
        ("/detokenize", {"tokens": [[1], [1], [1]]}),
    ],
)
def test_texts_and_ids_are_bounded_in_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    for name, most in (("MAX_CHARS", 5), ("MAX_IDS", 5), ("MAX_TEXTS", 2)):
        monkeypatch.setattr(tokenize_routes, name, most)

    async def story(g: Gateway) -> None:
        assert (await ask(g, "POST", path, body))[0] == 400

    play(story, folder)


@pytest.mark.parametrize("stream", [False, True])
def test_no_sink_is_made_for_more_answers_than_there_are_slots(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    made: list[Any] = []
    for name in ("GenerateWhole", "GenerateStream"):
        monkeypatch.setattr(sglang_routes, name, lambda *given: made.append(given))

    async def story(g: Gateway) -> None:
        body = {"text": "a", "stream": stream, "sampling_params": {"n": 5}}
        status, said = await ask(g, "POST", "/generate", body)
        assert (status, said["error"]["param"], made) == (400, "n", [])

    play(story, folder)


def test_what_the_server_is(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        _, info = await ask(g, "GET", "/get_model_info")
        assert info["is_generation"] is True
        assert info == (await ask(g, "GET", "/model_info"))[1]
        _, info = await ask(g, "GET", "/get_server_info")
        assert info["internal_states"][0]["models"][0]["name"] == "m0"
        assert info["version"] == (await ask(g, "GET", "/version"))[1]["version"]
        assert (await ask(g, "GET", "/tokenizer_info"))[0] == 404
        assert (await ask(g, "GET", "/openapi.json"))[1]["info"]["version"] == info["version"]

    play(story, folder)
