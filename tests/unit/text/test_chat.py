"""Chat templates against transformers' ``apply_chat_template``."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

import dovetail
from dovetail.errors import ConfigError, RequestError
from dovetail.text.chat import ChatTemplate
from dovetail.text.tokenizer import Tokenizer

TINY_MOE = Path(dovetail.__file__).parent / "assets" / "tiny-moe"

LLAMA_LIKE = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = '26 Jul 2024' %}
{%- endif %}
{{- '<|im_start|>system\\n' + system + ' ' + date_string + '<|im_end|>' }}
{%- if tools is not none %}
    {{- 'Tools:\\n' }}
    {%- for tool in tools %}
        {%- if loop.index > 8 %}{% break %}{% endif %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one tool call at a time') }}
        {%- endif %}
        {{- message.tool_calls[0].function | tojson }}
    {%- elif message.role in ('user', 'assistant', 'tool') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

ALTERNATING = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}
{% generation %}
{% set content = message['content'].strip() %}
{{ content + eos_token }}
{% endgeneration %}
{{ content }}
{% endif %}
{% endfor %}
"""

THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}
{%- if m.content is string %}{% set text = m.content %}{% else %}{% set text = m.content[0].text %}
{%- endif %}
<|im_start|>{{ m.role }}
    {% if loop.index0 > ns.last and '</think>' in text %}
{{ text.split('</think>')[-1].lstrip('\\n') }}
    {% else %}
{{ text }}{{ unknown_token }}
    {% endif %}
<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>{% endif %}{% endif %}{{ documents is none }}
"""

SYSTEM = {"role": "system", "content": " Be <kind> & 'brief'. "}
USER = {"role": "user", "content": "Grüße, 日本! <|im_end|>"}
ASSISTANT = {"role": "assistant", "content": " <think>x</think>\n\nHi.\n"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"ö": "<a&b>"}}}],
}
RESULT = {"role": "tool", "content": "42", "tool_call_id": None}
PARTS = {"role": "user", "content": [{"type": "text", "text": "in parts"}]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "does <ö> & 'ü'", "parameters": {"b": 1, "a": 2}},
    }
] * 10


def make_folder(folder: Path, *, jinja: str | None = None, **config: Any) -> Path:
    """tiny-moe's tokenizer, but one that adds a BOS of its own to plain text."""
    backend = Backend.from_file(str(TINY_MOE / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    (folder / "tokenizer.json").write_text(backend.to_str())
    names = {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder


def load(folder: Path) -> ChatTemplate:
    chat = ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))
    assert chat is not None
    return chat


def check(folder: Path, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """Text and ids are transformers'; returns the text."""
    chat = load(folder)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    text = chat.render(messages, **kwargs)
    assert text == reference.apply_chat_template(messages, tokenize=False, **kwargs)
    expected = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)
    assert chat.render_ids(messages, **kwargs) == expected
    return text


CHATS = [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [USER, ASSISTANT]]


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("template", [LLAMA_LIKE, THINKING, None])
def test_renders_as_transformers(
    tmp_path: Path, template: str | None, messages: list[dict[str, Any]], prompt: bool
) -> None:
    folder = TINY_MOE if template is None else make_folder(tmp_path, jinja=template)
    check(folder, messages, add_generation_prompt=prompt)


def test_bos_comes_once(tmp_path: Path) -> None:
    """B127: the template has it, and the tokenizer would add it."""
    folder = make_folder(tmp_path, jinja=LLAMA_LIKE)
    check(folder, [USER], add_generation_prompt=True)
    assert Tokenizer.from_folder(folder).encode("x")[0] == 0
    assert load(folder).render_ids([USER]).count(0) == 1


def test_tools_and_tool_calls(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, jinja=LLAMA_LIKE)
    text = check(
        folder,
        [SYSTEM, USER, CALL, RESULT],
        tools=TOOLS,
        date_string="1",
        add_generation_prompt=True,
    )
    assert text.count("does <ö> & 'ü'") == 8
    assert '{"name": "f", "arguments": {"ö": "<a&b>"}}' in text


def test_alternating_roles_and_generation_tag(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, jinja=ALTERNATING)
    check(folder, [USER, ASSISTANT, USER], add_generation_prompt=True)
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        load(folder).render([USER, USER])
    assert caught.value.field == "messages"


def test_parts_and_template_kwargs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, jinja=THINKING)
    check(folder, [PARTS, ASSISTANT], add_generation_prompt=True, enable_thinking=False)
    assert "unknown" in check(
        folder, [USER], add_generation_prompt=True, unknown_token="unknown", bos_token="mine"
    )


def test_template_list_in_the_config(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T{{ tools | length }}"},
    ]
    folder = make_folder(tmp_path, chat_template=named)
    assert check(folder, [USER], add_generation_prompt=True)[0] == "D"
    assert check(folder, [USER], tools=TOOLS, add_generation_prompt=True) == "T10"


def test_the_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template="config")
    assert load(folder).render([USER]) == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert load(folder).render([USER]) == "file"


def test_no_template(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder)) is None
    (folder / "tokenizer_config.json").unlink()
    assert ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder)) is None


def test_the_clock(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, jinja="{{ strftime_now('%Y') }}")
    assert load(folder).render([USER]) in {str(datetime.now().year + step) for step in (-1, 0)}


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": 5},
        {"chat_template": ["x"]},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": [{"name": "other", "template": "x"}]},
        {"chat_template": "{% if %}"},
        {"chat_template": "{% for x in y %}"},
    ],
)
def test_broken_templates_are_refused_at_start(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        load(make_folder(tmp_path, **config))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        None,
        [5],
        ["user"],
        [[]],
        [{}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": None, "content": "x"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": object()}],
        [USER, {"role": "assistant"}],
    ],
)
def test_wrong_messages(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        load(TINY_MOE).render(messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 5 }}",
        "{{ messages[7].content }}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10 ** 9) | length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_failing_template_is_the_requests_fault(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError) as caught:
        load(make_folder(tmp_path, jinja=template)).render([USER])
    assert caught.value.field == "messages"


def test_lone_surrogates_and_reserved_variables() -> None:
    chat = load(TINY_MOE)
    with pytest.raises(RequestError):
        chat.render_ids([{"role": "user", "content": "\ud800"}])
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        chat.render([USER], messages=[])
    with pytest.raises(RequestError, match="tools"):
        chat.render([USER], tools=[object()])  # type: ignore[list-item]
