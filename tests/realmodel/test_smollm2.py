"""SmolLM2-135M-Instruct from a quantized GGUF file, against transformers on the same file.

The usual run compares with stored results of transformers (``make_reference``), as loading the
file there takes longer than all of this; full runs compare with transformers itself as well.
"""

import numpy as np
import pytest
import torch

from tests.models.reference import Harness
from tests.realmodel.make_reference import REFERENCE, prompts, reference_model, reference_tokenizer
from tests.realmodel.smollm2 import MESSAGES, NEW_TOKENS, TEXTS
from trserve.gateway.chat_template import ChatTemplate
from trserve.gateway.tokenizer import Tokenizer
from trserve.models.aliases import resolve_model
from trserve.models.gguf_tokenizer import read_gguf_tokenizer

pytestmark = pytest.mark.realmodel

TOLERANCE = 1e-3

VARIED = (
    *TEXTS,
    "Hello, world!  It's 24\u00b0C;\tthey'll say \u201cna\u00efve caf\u00e9\u201d.",
    "1234567890 and 3.14159, or 1,000,000 -- x2 2x",
    "\u4f60\u597d\uff0c\u4e16\u754c \u041f\u0440\u0438\u0432\u0435\u0442",
    "\u0645\u0631\u062d\u0628\u0627",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "if x:\n\n\n        return {'a': [1, 2], \"b\": None}  # done\r\n",
    "<|im_start|>system\nBe brief.<|im_end|>\n<repo_name>a/b<file_sep>",
    "   leading, trailing   \n\n ",
    "cafe\u0301 \u00a0\u2003 \ufeff\u200b zero-width \x00\x07 control",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ================= !!!!!?????",
)


class Reference:
    """What transformers computed: prompts, their logits in some columns, and greedy tokens."""

    def __init__(self) -> None:
        stored = np.load(REFERENCE)
        self.columns = torch.from_numpy(stored["columns"])
        numbers = range(len(TEXTS) + 1)
        self.tokens = [stored[f"tokens{number}"].tolist() for number in numbers]
        self.lengths = [int(stored[f"length{number}"]) for number in numbers]
        self.logits = [torch.from_numpy(stored[f"logits{number}"]) for number in numbers]
        self.prompts = [t[:n] for t, n in zip(self.tokens, self.lengths, strict=True)]


@pytest.fixture(scope="module")
def reference():
    return Reference()


@pytest.fixture(scope="module")
def tokenizer(gguf):
    found = read_gguf_tokenizer(gguf)
    return Tokenizer(
        found.backend,
        named=found.named,
        eos_token_ids=found.eos_token_ids,
        chat_template=ChatTemplate(found.chat_template, found.named),
    )


@pytest.fixture(scope="module")
def harness(gguf):
    return Harness(gguf, num_blocks=128, block_size=16)


def tables(harness, reference):
    return [harness.table(len(tokens)) for tokens in reference.tokens]


def test_the_file_resolves_as_a_model(gguf):
    model = resolve_model(str(gguf))
    assert model.name == "SmolLM2-135M-Instruct.Q4_1"
    assert model.spec.num_parameters == 134_515_008
    assert (model.spec.num_heads, model.spec.num_kv_heads, model.spec.eos_token_ids) == (9, 3, (2,))
    assert model.own_tokenizer


def test_logits_after_every_token_of_the_prompts(harness, reference):
    """All prompts grow side by side, token by token: ragged steps of decodes."""
    rows = tables(harness, reference)
    worst = 0.0
    for position in range(max(reference.lengths)):
        active = [i for i, length in enumerate(reference.lengths) if position < length]
        out = harness.forward(
            [([reference.tokens[i][position]], position, rows[i]) for i in active]
        )
        for logits, i in zip(out.logits, active, strict=True):
            expected = reference.logits[i][position]
            worst = max(worst, (logits[reference.columns] - expected).abs().max().item())
    assert worst < TOLERANCE


def test_greedy_tokens_are_the_same(harness, reference):
    """Prompts of all texts in one step, then decodes."""
    rows = tables(harness, reference)
    texts = [list(prompt) for prompt in reference.prompts]
    done = [0] * len(texts)
    for _ in range(NEW_TOKENS):
        out = harness.forward(
            [(t[n:], n, row) for t, n, row in zip(texts, done, rows, strict=True)]
        )
        done = [len(text) for text in texts]
        for text, logits in zip(texts, out.logits, strict=True):
            text.append(int(logits.argmax()))
    assert texts == reference.tokens


def test_bfloat16_stays_near(gguf, reference):
    harness = Harness(gguf, num_blocks=128, block_size=16, dtype=torch.bfloat16)
    rows = [(prompt, 0, harness.table(len(prompt))) for prompt in reference.prompts]
    out = harness.forward(rows).logits[:, reference.columns]
    expected = torch.stack([logits[-1] for logits in reference.logits])
    errors = (out - expected).abs()
    # transformers in bfloat16 is 0.07 to 0.16 away on the average, and 0.41 at most.
    assert errors.mean() < 0.3
    assert errors.max() < 0.8


def test_prompts_are_encoded_as_the_reference_was(tokenizer, reference):
    chat = tokenizer.render_chat(MESSAGES, add_generation_prompt=True)
    encoded = [tokenizer.encode(text, add_special_tokens=True) for text in (chat, *TEXTS)]
    assert encoded == reference.prompts


def test_tokens_are_those_of_transformers(gguf, tokenizer):
    other = reference_tokenizer(gguf)
    for text in VARIED:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == other.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == other.decode(
            ids, clean_up_tokenization_spaces=False
        )
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.bos_token_id == other.bos_token_id
    assert tokenizer.eos_token_ids == (other.eos_token_id,)
    for prompt in (True, False):
        rendered = tokenizer.render_chat(MESSAGES, add_generation_prompt=prompt)
        assert rendered == other.apply_chat_template(
            MESSAGES, add_generation_prompt=prompt, tokenize=False
        )


def test_spaces_before_a_digit_stay_together(tokenizer):
    """Digits are split off first, as the file says; transformers reads it with GPT-2's rule."""
    spaces = tokenizer.encode("    ", add_special_tokens=False)
    four = tokenizer.encode("4", add_special_tokens=False)
    assert (len(spaces), len(four)) == (1, 1)
    assert tokenizer.encode("    4", add_special_tokens=False) == spaces + four


@pytest.mark.slow
def test_against_transformers_itself(gguf, harness, reference):
    model = reference_model(gguf)
    rows = tables(harness, reference)
    assert prompts(reference_tokenizer(gguf)) == reference.prompts
    out = harness.forward([(t, 0, row) for t, row in zip(reference.tokens, rows, strict=True)])
    for tokens, length, logits in zip(reference.tokens, reference.lengths, out.logits, strict=True):
        with torch.no_grad():
            live = model(torch.tensor([tokens])).logits[0]
        assert (logits - live[-1]).abs().max() < TOLERANCE
        assert live[length - 1 : -1].argmax(-1).tolist() == tokens[length:]
