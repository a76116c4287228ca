"""litellm against an endpoint: whole, streamed, async, extra members, errors. Run in its own venv.

Usage: litellm_client.py BASE_URL
"""

import asyncio
import sys

import litellm

BASE = sys.argv[1]
ASKED = {
    "model": "openai/trserve",
    "api_base": BASE,
    "api_key": "any",
    "messages": [{"role": "user", "content": "What is 125 - 54 + 25?"}],
    "max_tokens": 40,
    "temperature": 0,
    "num_retries": 0,
}

whole = litellm.completion(**ASKED)
text = whole.choices[0].message.content
assert text
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

chunks = list(litellm.completion(**ASKED, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
usages = [c.usage for c in chunks if getattr(c, "usage", None)]
assert usages[-1].completion_tokens == whole.usage.completion_tokens

own = litellm.completion(**ASKED, extra_body={"trserve": {"only": "small"}})
assert own.usage.trserve["tokens"]["tiny"] == 0, own.usage


async def streamed() -> str:
    stream = await litellm.acompletion(**ASKED, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def several() -> list[str]:
    return await asyncio.gather(*(streamed() for _ in range(4)))


assert set(asyncio.run(several())) == {text}

try:
    litellm.completion(**ASKED | {"temperature": -1})
except litellm.BadRequestError as error:
    assert "temperature" in str(error)
else:
    raise AssertionError("a wrong temperature was taken")

done = litellm.text_completion(
    model="text-completion-openai/trserve",
    api_base=BASE,
    api_key="any",
    prompt="Two and two",
    max_tokens=8,
    temperature=0,
)
assert done.choices[0].text
print(f"{len(chunks)} chunks, {whole.usage.completion_tokens} tokens")
