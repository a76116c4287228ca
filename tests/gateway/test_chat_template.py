"""Rendering against transformers' apply_chat_template, message checks, and the sandbox."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway import small_tokenizers as small
from trserve.errors import ConfigError, RequestError
from trserve.gateway.chat_template import ChatTemplate, normalize_messages

# In the manner of Qwen 3: tools as JSON lines, reasoning dropped before the last question, tool
# results grouped, a namespace that a loop writes, a switch from chat_template_kwargs.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{ call.arguments }}
            {%- else %}{{ call.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# In the manner of Llama 3: a BOS variable, today's date, trimmed contents, indented JSON.
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday Date: " + date_string + "\\n\\n" + system + "<|eot|>" }}
{%- for t in tools or [] %}
    {{- t | tojson(indent=4) }}
    {{- "\\n" }}
{%- endfor %}
{%- for d in documents or [] %}{{- d['title'] ~ ': ' ~ d['text'] ~ '\\n' }}{%- endfor %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("only single tool-calls at once!") }}
        {%- endif %}
        {{- message.tool_calls[0].function.arguments | tojson(sort_keys=true) }}
    {%- else %}
        {{- message.content | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
"""

# In the manner of Mistral: strict alternation, refusals; and breaks out of loops.
MISTRAL = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {% if message['role'] == 'user' %}
        [INST] {{ message['content'] }} [/INST]
    {% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {%- if message.content == 'skip' %}{% continue %}{% endif %}
    , {% endfor %}
{%- set seen = dict(a=1) %}{{ seen.a }}
{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{% endfor %}
"""

GENERATION = """{% for m in messages %}
{% if m.role == 'assistant' %}
{% generation %}{% set x = m.content %}{{ x }}{{ eos_token }}{% endgeneration %}
{% else %}
    {{ m.role }}: {{ m.content }}
{% endif %}
{{ x }}|
{% endfor %}
{{ name | default('nobody') }}
"""

TEMPLATES = {
    "chatml": small.CHATML,
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "generation": GENERATION,
}
VARIABLES = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": "é<"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "Größe & <b>", "x": [1, None]}}

CHATS = {
    "user": [{"role": "user", "content": "Hello <b>wörld</b> & 'you'\n "}],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
        {"role": "user", "content": "skip"},
    ],
    "tool": [
        {"role": "user", "content": "call it"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "tool", "content": "43 ü", "tool_call_id": "2"},
    ],
    "reasoning": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning": "because", "name": None},
    ],
    "two calls": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    ],
}
KWARGS = {
    "none": {},
    "no thinking": {"enable_thinking": False},
    "tools": {"tools": [TOOL, TOOL]},
    "documents": {"documents": [{"title": "T", "text": "x"}], "name": "n", "bos_token": "B"},
}


@pytest.fixture(scope="module")
def reference():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=small.byte_level(), **VARIABLES)


@pytest.mark.parametrize("kwargs", KWARGS)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_equals_transformers(reference, template, chat, kwargs):
    messages, extra = CHATS[chat], KWARGS[kwargs]
    ours = ChatTemplate(TEMPLATES[template], VARIABLES)
    before = copy.deepcopy(messages)
    for add in (True, False):
        try:
            expected = reference.apply_chat_template(
                messages,
                chat_template=TEMPLATES[template],
                tokenize=False,
                add_generation_prompt=add,
                **extra,
            )
        except Exception as error:
            with pytest.raises(RequestError) as refused:
                ours.render(messages, add_generation_prompt=add, kwargs=extra)
            assert str(error) in refused.value.message
        else:
            assert ours.render(messages, add_generation_prompt=add, kwargs=extra) == expected
    assert messages == before


CONTINUED = ["Well, ", "Well", "  x\n", "x"]


@pytest.mark.parametrize("content", CONTINUED)
@pytest.mark.parametrize("template", ["qwen", "trimming"])
def test_a_last_message_goes_on_as_transformers_has_it(reference, template, content):
    text = (
        QWEN if template == "qwen" else "{% for m in messages %}<{{ m.content|trim }}>{% endfor %}"
    )
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    expected = reference.apply_chat_template(
        messages, chat_template=text, tokenize=False, continue_final_message=True
    )
    ours = ChatTemplate(text, VARIABLES)
    found = ours.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert found == expected


@pytest.mark.parametrize("content", ["", " ", "shown nowhere"])
def test_a_last_message_that_is_not_shown_cannot_go_on(content):
    template = ChatTemplate("{{ messages|length }}")
    with pytest.raises(RequestError) as refused:
        template.render([{"role": "user", "content": content}], continue_final_message=True)
    assert refused.value.param == "continue_final_message"


def test_the_comparison_covers_both_outcomes(reference):
    """Guards the test above: most templates render, and the refusing ones do refuse."""
    template = ChatTemplate(MISTRAL, VARIABLES)
    with pytest.raises(RequestError, match="roles must alternate") as refused:
        template.render(CHATS["system"])
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert "<|im_start|>assistant\n<think>" in ChatTemplate(QWEN).render(
        CHATS["user"], kwargs={"enable_thinking": False}
    )


def test_text_parts_are_joined_and_none_is_lost():
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": content}]
    assert normalize_messages(messages)[0]["content"] == "one\ntwo"
    single = [{"role": "user", "content": content[:1]}]
    assert ChatTemplate("{{ messages[0].content }}").render(single) == "one"


def test_tool_arguments_come_as_json_text_and_go_as_an_object():
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}")

    def render(arguments):
        call = {"function": {"name": "f", "arguments": arguments}}
        return template.render([{"role": "assistant", "tool_calls": [call]}])

    assert render('{"a": 1}') == render({"a": 1}) == '{"a": 1}'
    assert render("{broken") == '"{broken"'
    assert render("[1]") == '"[1]"'
    assert render("[" * 100_000).startswith('"[')


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "USER", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
            "messages[0].content[1]",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls"),
    ],
)
def test_malformed_messages_are_named(messages, param):
    with pytest.raises(RequestError) as refused:
        ChatTemplate(small.CHATML).render(messages)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "chat_template"])
def test_reserved_kwargs_are_refused(name):
    with pytest.raises(RequestError) as refused:
        ChatTemplate("x").render(CHATS["user"], kwargs={name: 1})
    assert refused.value.param == f"chat_template_kwargs.{name}"


def test_named_templates_without_a_default():
    template = ChatTemplate({"tool_use": "T", "rag": "R"})
    assert template.render(CHATS["user"], kwargs={"tools": [TOOL]}) == "T"
    with pytest.raises(RequestError, match="rag, tool_use"):
        template.render(CHATS["user"])


def test_broken_template_names_its_line():
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("ok\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ missing.attribute.of.nothing }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content | tojson(indent=messages) }}{{ messages | nothing }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_a_template_does_is_a_refused_request(source):
    with pytest.raises((RequestError, ConfigError)):
        ChatTemplate(source).render(CHATS["user"])


def test_a_namespace_still_works():
    template = ChatTemplate("{% set n = namespace(self=1) %}{% set n.b = 2 %}{{ n.self + n.b }}")
    assert template.render(CHATS["user"]) == "3"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x), max_leaves=4
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "x"]) | PLAIN},
    optional={"content": PLAIN, "tool_calls": PLAIN, "name": PLAIN, "reasoning": PLAIN},
)


@given(st.lists(MESSAGE, max_size=4), st.sampled_from(sorted(TEMPLATES)))
def test_random_messages_render_or_are_refused(messages, name):
    template = ChatTemplate(TEMPLATES[name], VARIABLES)
    try:
        normal = normalize_messages(messages)
        text = template.render(messages)
    except RequestError as refused:
        assert refused.status == 400
    else:
        assert template.render(normal) == text
        assert normalize_messages(normal) == normal
