"""Two users of locust's who chat, each request with an event of its own for the first token."""

import json
import time

from locust import HttpUser, events, task

BODY = {
    "model": "trserve",
    "messages": [{"role": "user", "content": "What is 125 - 54 + 25?"}],
    "max_tokens": 20,
    "stream": True,
}


class Person(HttpUser):
    @task
    def chat(self) -> None:
        began = time.perf_counter()
        first = None
        with self.client.post(
            "/v1/chat/completions", json=BODY, stream=True, catch_response=True
        ) as response:
            last = b""
            for line in response.iter_lines():
                if line.startswith(b"data: "):
                    first = first or time.perf_counter()
                    last = line
            if last != b"data: [DONE]":
                response.failure(f"the stream ended with {last!r}")
        if first is not None:
            events.request.fire(
                request_type="TTFT",
                name="chat",
                response_time=1e3 * (first - began),
                response_length=0,
                exception=None,
            )

    @task
    def whole(self) -> None:
        body = BODY | {"stream": False}
        with self.client.post("/v1/chat/completions", json=body, catch_response=True) as response:
            if not json.loads(response.content)["choices"][0]["message"]["content"]:
                response.failure("no content")
