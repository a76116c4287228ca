"""The first two files of a router of one's own: the class, and its test.

The text is R-Stitch's rule in as few lines as it takes. Knows files and names; runs nothing.
"""

from __future__ import annotations

import keyword
from pathlib import Path
from typing import Final

from trserve.errors import ConfigError

_ROUTER: Final = '''"""{name}: a router for trserve. Try it with

    trserve router check {module}:{name}
    trserve launch --router {module}:{name} --router-config tau=0.06
"""

from trserve import BaseRouter, Parameter
from trserve.router_lib.signals import normalized_entropy


class {name}(BaseRouter):
    # What --router-config takes, and a request in "trserve": {{"router": {{"tau": 0.1}}}}.
    # The first one is also what the model name trserve:threshold=0.1 sets.
    parameters = (
        Parameter("tau", "entropy above which the large model writes", default=0.06, minimum=0.0),
    )

    # Asked after every step of this worker's model, about the B requests that were in it. result:
    # logits [B, V] (raw), hidden [B, H], token_ids [B] (just sampled), params[name] [B], requests.
    # Returns one number a request: 0 stays here, k goes to the k-th peer (self.peer(model)).
    # Keep nothing in self about a request: workers are restarted, and requests move.
    def route(self, result):
        entropy = normalized_entropy(result.logits, self.context.tokenizer_size)
        tau = result.params["tau"]  # [B]: each request's own value, or the server's
        if self.model == 0:  # the first of --models: the small one
            return (entropy > tau).long()
        return (entropy <= tau).long()

    # Asked when a request leaves: does the token just sampled count? By default the first model's
    # does not (it is what routing replaces) and the others' do. If no model keeps its token, a
    # request only goes to and fro.
    def send(self, req, token):
        peer_req = super().send(req, token)
        peer_req.keep_token = self.model != 0
        # peer_req.extras = b"..."  # up to 64 bytes, which req.extras says at the receiver
        return peer_req

    # Further methods, all with a sensible default: receive(peer_req) is shown what arrives,
    # admit(req) says which model writes first, score(result) gives what a trace shows, [B].
'''

_TEST: Final = '''"""Tests of {name}: what all routers keep to, and its rule. Run with pytest."""

import torch

from trserve.router_check.testing import answer, check_router, plain_loop, prompts

ROUTER = "{module}:{name}"
TAU = 0.06


def test_it_keeps_the_contract():
    failed = [check for check in check_router(ROUTER) if not check.passed]
    assert not failed, failed


def rule(model, logits, token):
    """The rule once more, in plain words: who writes next, and whether ``token`` counts.

    ``logits`` float64 [V] of one request after one step of ``model``.
    """
    p = torch.softmax(logits, -1)
    entropy = float(torch.special.entr(p).sum()) / float(torch.log(torch.tensor(len(p) * 1.0)))
    if model == 0:
        return (1, False) if entropy > TAU else (0, True)
    return (0, True) if entropy <= TAU else (1, True)


def test_it_writes_what_a_plain_loop_writes():
    sources = set()
    for prompt in prompts(4):
        expected = plain_loop(rule, prompt, max_tokens=48)
        found = answer(ROUTER, prompt, max_tokens=48, config={{"tau": TAU}})
        assert found == expected
        sources |= set(found.sources)
    assert sources == {{0, 1}}, "both models should write in this test"
'''


def write_router(name: str, folder: Path) -> list[Path]:
    """Write ``name.py`` and ``test_name.py`` to ``folder``, which is made if it is missing.

    Raises:
        ConfigError: ``name`` is no module's name, a file is there already, or cannot be written.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"router new {name}: not a name for a Python module; try my_router")
    class_name = "".join(part[:1].upper() + part[1:] for part in name.split("_")) or name
    texts = {f"{name}.py": _ROUTER, f"test_{name}.py": _TEST}
    files = {folder / file: text for file, text in texts.items()}
    if found := [file for file in files if file.exists()]:
        raise ConfigError(f"router new: {found[0]} is there already; nothing was written")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            # Not over what another process has just written.
            with file.open("x", encoding="utf-8") as opened:
                opened.write(text.format(module=name, name=class_name))
    except OSError as error:
        raise ConfigError(f"router new: cannot write to {folder}: {error}") from None
    return list(files)
