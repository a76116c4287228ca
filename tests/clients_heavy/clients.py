"""The clients, one function each: installs it, drives it against a server, checks what it says.

A function returns one line about what it saw; it raises AssertionError where the endpoint or the
client did wrong, and Unavailable where the client cannot be had. Versions are pinned: newer ones
are to be looked at before they are taken.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.clients_heavy import harness_tasks
from tests.clients_heavy.places import NodePlace, PythonPlace
from trserve.demo import PAIR_DIR

HERE = Path(__file__).parent
TOKENIZER = PAIR_DIR / "small"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
REQUESTS = 6
TOKENS = 8


class Endpoint(NamedTuple):
    """A server: ``url`` without a path."""

    url: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


def openai_node(endpoint: Endpoint) -> str:
    place = NodePlace("node")
    version = place.install("openai@6.49.0", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92")
    return f"{_node(place, 'openai_node.mjs', endpoint)}, Node {version}"


def ai_sdk(endpoint: Endpoint) -> str:
    place = NodePlace("node")
    version = place.install("openai@6.49.0", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92")
    return f"{_node(place, 'ai_sdk.mjs', endpoint)}, Node {version}"


def _node(place: NodePlace, script: str, endpoint: Endpoint) -> str:
    place.clear()
    # Where Node looks for packages depends on where a script lies.
    shutil.copy(HERE / script, place.work / script)
    return place.run(["node", script, endpoint.v1]).strip().splitlines()[-1]


def litellm(endpoint: Endpoint) -> str:
    place = PythonPlace("litellm")
    place.install("litellm==1.110.2")
    place.clear()
    command = [place.program("python"), HERE / "litellm_client.py", endpoint.v1]
    return place.run(command, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}).strip().splitlines()[-1]


def lm_eval_chat(endpoint: Endpoint) -> str:
    place = _lm_eval()
    score = harness_tasks.run(
        place,
        "mini_gsm",
        "local-chat-completions",
        ["--apply_chat_template"],
        model="trserve",
        base_url=f"{endpoint.v1}/chat/completions",
        num_concurrent=2,
        max_retries=1,
        tokenized_requests=False,
    )
    assert score["exact_match,last"] == 1.0, score
    return f"exact match {score['exact_match,last']:g} on {harness_tasks.NUM_SUMS} sums"


def lm_eval_completions(endpoint: Endpoint) -> str:
    place = _lm_eval()
    farthest = 0.0
    for model in ("tiny", "small"):
        for batch in (1, 8):
            harness_tasks.run(
                place,
                "mini_mc",
                "local-completions",
                ["--batch_size", str(batch), "--log_samples"],
                model=model,
                base_url=f"{endpoint.v1}/completions",
                num_concurrent=2,
                tokenized_requests=True,
                tokenizer_backend="huggingface",
                tokenizer=PAIR_DIR / model,
            )
            farthest = max(farthest, harness_tasks.compare(place, PAIR_DIR / model))
    assert farthest < harness_tasks.TOLERANCE, f"farthest from transformers: {farthest}"
    return f"log likelihoods at most {farthest:.1e} from transformers', same greedy flags"


def _lm_eval() -> PythonPlace:
    place = PythonPlace("lm-eval")
    place.install("lm-eval[api]==0.4.13", "transformers==5.24.0")
    place.clear()
    return place


def aiperf(endpoint: Endpoint) -> str:
    place = PythonPlace("aiperf")
    place.install("aiperf==0.13.0")
    place.clear()
    # Its offline mode refuses a local directory; a path needs no network all the same.
    place.run(
        [
            *(place.program("aiperf"), "profile", "--model", "trserve", "--url", endpoint.url),
            *("--endpoint-type", "chat", "--streaming", "--tokenizer", TOKENIZER),
            *("--use-server-token-count", "--concurrency", "2", "--request-count", str(REQUESTS)),
            *("--isl", "16", "--osl", str(TOKENS), "--artifact-dir", "out", "--ui", "none"),
            *("--extra-inputs", "ignore_eos:true"),
        ]
    )
    told = _json(place.work / "out" / "profile_export_aiperf.json")
    assert told["request_count"]["avg"] == REQUESTS, told["request_count"]
    assert not told["error_summary"], told["error_summary"]
    assert told["output_sequence_length"]["min"] == TOKENS
    scraped = _json(place.work / "out" / "server_metrics_export.json")
    assert scraped["summary"]["endpoints_successful"], "it could not read /metrics"
    assert any(name.startswith("trserve_") for name in scraped["metrics"])
    return f"{REQUESTS} requests, {TOKENS} tokens each, {len(scraped['metrics'])} metrics read"


def guidellm(endpoint: Endpoint) -> str:
    place = PythonPlace("guidellm")
    place.install("torch==2.13.0", "guidellm==0.8.1")
    place.clear()
    backend = f"kind=openai_http,target={endpoint.url},model=trserve"
    place.run(
        [
            *(place.program("guidellm"), "run", "--backend", backend),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={TOKENS}"),
            *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
            *("--output", "kind=json,path=g.json", "--disable-console-interactive"),
        ],
        OFFLINE,
    )
    (benchmark,) = _json(place.work / "g.json")["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == totals["total"] == REQUESTS, totals
    written = [each["output_tokens"] for each in benchmark["requests"]["successful"]]
    assert written == [TOKENS] * REQUESTS, written
    return f"{REQUESTS} requests, {TOKENS} tokens each"


SGLANG_PARTS = ("sglang/benchmark/", "sglang/srt/utils/network.py")
SGLANG_CONSTANT = 'FAKE_BOOTSTRAP_HOST = "2.2.2.2"\n'


def sglang_bench(endpoint: Endpoint) -> str:
    """Its wheel needs a GPU stack; the benchmark in it needs two small modules of the rest."""
    place = PythonPlace("sglang")
    place.install(
        *("transformers==5.24.0", "aiohttp", "datasets", "msgspec", "numpy", "orjson", "pillow"),
        *("psutil", "pybase64", "pydantic", "pyzmq", "requests", "tqdm"),
    )
    wheel = place.download("sglang==0.5.23")
    place.clear()
    with zipfile.ZipFile(wheel) as archive:
        parts = [name for name in archive.namelist() if name.startswith(SGLANG_PARTS)]
        archive.extractall(place.work, parts)
    for package in ("", "srt", "srt/utils", "srt/disaggregation"):
        (place.work / "sglang" / package).mkdir(exist_ok=True)
        (place.work / "sglang" / package / "__init__.py").touch()
    (place.work / "sglang/srt/disaggregation/utils.py").write_text(SGLANG_CONSTANT)
    backends = ("sglang-oai-chat", "sglang-oai", "sglang")
    for backend in backends:
        place.run(
            [
                *(place.program("python"), "-m", "sglang.benchmark.serving", "--backend", backend),
                *("--base-url", endpoint.url, "--model", "trserve", "--tokenizer", TOKENIZER),
                *("--served-model-name", "trserve", "--dataset-name", "random-ids"),
                *("--num-prompts", str(REQUESTS), "--random-input-len", "16"),
                *("--random-output-len", str(TOKENS), "--max-concurrency", "2"),
                *("--goodput", "ttft:1000", "tpot:200", "--warmup-requests", "1"),
                *("--output-file", f"{backend}.jsonl"),
            ],
            OFFLINE,
        )
        told = _json(place.work / f"{backend}.jsonl")
        assert told["completed"] == REQUESTS, (backend, told["completed"])
        assert told["total_output_tokens"] == told["total_output_tokens_retokenized"] > 0, backend
    return f"{REQUESTS} requests each by {', '.join(backends)}; its count of tokens is ours"


def locust(endpoint: Endpoint) -> str:
    place = PythonPlace("locust")
    place.install("locust==2.47.0")
    place.clear()
    place.run(
        [
            *(place.program("locust"), "-f", HERE / "locustfile.py", "--headless", "-u", "2"),
            *("-r", "2", "-t", "5s", "-H", endpoint.url, "--csv", "out", "--only-summary"),
        ]
    )
    rows = (place.work / "out_stats.csv").read_text().splitlines()
    names = rows[0].split(",")
    total = dict(zip(names, rows[-1].split(","), strict=True))
    assert total["Name"] == "Aggregated" and int(total["Failure Count"]) == 0, total
    assert int(total["Request Count"]) > 10, total
    first = next(row for row in rows if row.startswith("TTFT,"))
    return f"{total['Request Count']} events in 5 s, {first.split(',')[2]} first tokens, no failure"


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


CLIENTS: dict[str, tuple[str, Callable[[Endpoint], str]]] = {
    "openai-node": ("6.49.0", openai_node),
    "ai-sdk": ("6.0.326", ai_sdk),
    "litellm": ("1.110.2", litellm),
    "lm-eval-chat": ("0.4.13", lm_eval_chat),
    "lm-eval-completions": ("0.4.13", lm_eval_completions),
    "aiperf": ("0.13.0", aiperf),
    "guidellm": ("0.8.1", guidellm),
    "sglang-bench": ("0.5.23", sglang_bench),
    "locust": ("2.47.0", locust),
}
"""By name: the version, and what drives it."""
