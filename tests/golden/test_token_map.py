"""A pair whose LLM numbers its special tokens in another way writes what the same pair writes.

The LLM is rewritten under other ids, weights and tokenizer and ends, with a token more that the SLM
does not have and that its head would draw at every position. The reference knows the pair as it was
before; prompts hold special tokens, biases make them likely, and both models' texts end with them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from tests.golden.compare import Answer, assert_golden
from tests.golden.completions import PATH, body_of
from tests.golden.pairs import Pair, settings_of
from tests.golden.random_pair import (
    OUTPUT,
    SPECIALS,
    TOKENIZER_SIZE,
    build_random_pair,
    byte_tokenizer,
    random_prompts,
)
from tests.golden.reference import LLM, Reference
from tests.serverproc import Server, concurrently

BYTES = 256
ORDER = (SPECIALS[2], "<|theirs|>", SPECIALS[0], SPECIALS[1])
NEW_ID = {BYTES + SPECIALS.index(token): BYTES + at for at, token in enumerate(ORDER) if at != 1}
ROWS = ("model.embed_tokens.weight", "lm_head.weight")
NAMES = ("llm-only", "middle", "sampled", "shaped", "penalised")


def renumbered(llm: Path, folder: Path) -> Path:
    """``llm`` under the ids of NEW_ID."""
    shutil.copytree(llm, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ROWS:
        old, new = tensors[name], tensors[name].clone()
        for was, becomes in NEW_ID.items():
            new[becomes] = old[was]
        new[BYTES + 1] = 20.0 * old[:BYTES].mean(0) if name == ROWS[0] else 20.0 * old[0]
        tensors[name] = new
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer.from_str(_without_specials())
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ORDER])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("config.json", "generation_config.json"):
        stated = json.loads((folder / name).read_text())
        ids = stated["eos_token_id"]
        ids = ids if isinstance(ids, list) else [ids]
        stated["eos_token_id"] = [NEW_ID.get(token, token) for token in ids]
        (folder / name).write_text(json.dumps(stated))
    return folder


def _without_specials() -> str:
    stated = json.loads(byte_tokenizer().to_str())
    stated["added_tokens"] = []
    return json.dumps(stated)


def prompts_with_specials(count: int) -> list[list[int]]:
    rng = Random("specials")
    prompts = random_prompts(count, rng)
    return [[BYTES + 1, *prompt, BYTES + rng.randrange(2)] for prompt in prompts]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, full: bool) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("renumbered")
    built = build_random_pair(folder, seed=5)
    llm = renumbered(built.llm, folder / "other")
    settings = {
        name: dataclasses.replace(
            setting, logit_bias=(*setting.logit_bias, *((BYTES + i, 3.0) for i in range(3)))
        )
        for name, setting in settings_of(built.taus, OUTPUT).items()
        if name in NAMES
    }
    args = ["--models", f"{built.slm},{llm}", "--dtype", "float32", "--device", "cpu"]
    with Server([*args, "--router", "r-stitch"]) as server:
        reference = Reference(built.slm, built.llm)
        prompts = prompts_with_specials(60 if full else 8)
        yield Pair("renumbered", server, reference, prompts, settings)


def test_all_settings_mixed(pair: Pair) -> None:
    cases = [(index, name) for index in range(len(pair.prompts)) for name in NAMES]
    pair.check(cases, 16, streamed=[True, False])
    traces = [pair.expected(case) for case in cases]
    written = {
        (source, token)
        for trace in traces
        for source, token in zip(trace.sources, trace.tokens, strict=True)
        if token >= BYTES
    }
    assert {(LLM, BYTES), (LLM, BYTES + 2)} <= written, "the LLM draws special tokens, the end too"
    assert max(token for trace in traces for token in trace.tokens) < TOKENIZER_SIZE


def test_log_probabilities_are_under_the_servers_ids(pair: Pair) -> None:
    """What the other model alone has is in none of them, and takes nothing from their sum."""

    def one(index: int) -> Answer:
        setting = dataclasses.replace(pair.setting((index, "llm-only")), logit_bias=())
        prompt = list(pair.prompts[index])
        body = body_of(prompt, setting, pair.server.models) | {"logprobs": 3}
        (choice,) = pair.server.post(PATH, body, timeout_s=120.0)["choices"]
        trace = pair.reference.run(prompt, setting)
        found = Answer(choice["token_ids"], choice["trserve"]["source"], choice["finish_reason"])
        assert_golden([(f"prompt {index}", trace, found)])
        for at, value in enumerate(choice["logprobs"]["token_logprobs"]):
            session = pair.reference.models[LLM].session()
            logits = session.logits(prompt + found.tokens[:at])
            expected = torch.log_softmax(logits, dim=-1)[found.tokens[at]]
            assert value == pytest.approx(float(expected), abs=1e-3)
        return found

    concurrently(one, range(3), 3)
