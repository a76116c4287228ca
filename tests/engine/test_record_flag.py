"""``trserve launch --record``: the same records over HTTP, and a refusal before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serverproc import Server, StartFailedError
from trserve import Recording


def test_a_server_records_and_refuses_the_records_of_others(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with Server(["--record", str(kept), "--threads", "1,1"]) as server:
        body = {"prompt": [5, 6], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        own = {"return_token_ids": True, "trserve": {"trace": True}}
        (choice,) = server.post("/v1/completions", body | own)["choices"]
    (record,) = Recording(kept)
    assert record.prompt_ids.tolist() == [5, 6]
    assert record.token_ids.tolist() == choice["token_ids"]
    assert record.sources.tolist() == choice["trserve"]["source"]
    assert record.complete and record.finish_reason is None
    with pytest.raises(StartFailedError) as refused:
        Server(["--record", str(kept), "--models", "tiny"]).__enter__()
    assert refused.value.code == 2
    assert "--record" in refused.value.stderr and "['tiny', 'small'] there" in refused.value.stderr
