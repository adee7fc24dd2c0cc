"""Chat messages to prompt text, by the model's own jinja template.

Owns the template and its sandbox. Must not know sampling or the HTTP dialects. The
environment is the one that transformers gives to chat templates, so that templates
written for it render the same here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dovetail.errors import ConfigError, RequestError
from dovetail.text.tokenizer import CONFIG_FILE, Tokenizer, read_json

TEMPLATE_FILE = "chat_template.jinja"
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"


class ChatTemplate:
    """A model's chat template. Immutable, so any thread may use it."""

    def __init__(self, templates: Mapping[str, str], tokenizer: Tokenizer) -> None:
        """Compile the templates.

        Args:
            templates: jinja sources by name; ``default`` renders every chat, but
                ``tool_use``, if there is one, those with tools.
            tokenizer: gives the special tokens to the templates and encodes prompts.

        Raises:
            ConfigError: no template is called ``default``, or one has a syntax error.
        """
        if DEFAULT_TEMPLATE not in templates:
            raise ConfigError(
                "chat_template",
                f"has {sorted(templates)} and no {DEFAULT_TEMPLATE!r}; add one of that name",
            )
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in templates.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    "chat_template", f"{name!r} has a syntax error in line {error.lineno}: {error}"
                ) from None
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """Load the template of a Hugging Face model folder; None if it has none.

        Args:
            folder: may hold ``chat_template.jinja``; if not, ``chat_template`` in
                ``tokenizer_config.json`` is taken.
            tokenizer: the same folder's tokenizer.

        Raises:
            ConfigError: the template cannot be read or compiled.
        """
        folder = Path(folder)
        try:
            source: Any = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            source = read_json(folder / CONFIG_FILE).get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(TEMPLATE_FILE, f"cannot be read ({error})") from None
        match source:
            case None:
                return None
            case str():
                return cls({DEFAULT_TEMPLATE: source}, tokenizer)
            case list() if all(_is_named_template(item) for item in source):
                return cls({item["name"]: item["template"] for item in source}, tokenizer)
            case _:
                raise ConfigError(
                    CONFIG_FILE, "chat_template must be a string or a list of {name, template}"
                )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt text of a chat.

        The text has all special tokens that the model wants: encode it with
        ``add_special_tokens=False``, or BOS doubles. ``render_ids`` does.

        Args:
            messages: at least one; each with a ``role`` and, unless it calls tools,
                a ``content``. Keys whose value is None count as absent.
            add_generation_prompt: end with the beginning of an assistant's message.
            tools: JSON schemas of the tools the model may call.
            template_kwargs: further variables that the template knows, such as
                ``enable_thinking``. They win over special tokens of the same name.

        Raises:
            RequestError: a message lacks something, or the template refuses the chat.
        """
        if "messages" in template_kwargs:
            raise RequestError("chat_template_kwargs", "may not hold 'messages'")
        variables = {
            **self._tokenizer.special_tokens,
            "documents": None,  # transformers defines it always, and templates rely on that
            **_plain("chat_template_kwargs", template_kwargs),
            "messages": _checked_messages(messages),
            "tools": _plain("tools", tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template_for(tools).render(variables)
        except jinja2.TemplateError as error:
            raise RequestError("messages", f"refused by the chat template: {error}") from None
        except Exception as error:  # a template's expressions can raise anything
            raise RequestError(
                "messages", f"the chat template failed: {type(error).__name__}: {error}"
            ) from error

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the prompt of a chat as token ids; arguments and errors as for ``render``."""
        text = self.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **template_kwargs
        )
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _template_for(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        name = TOOL_TEMPLATE if tools is not None and TOOL_TEMPLATE in self._templates else None
        return self._templates[name or DEFAULT_TEMPLATE]


def _is_named_template(item: object) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("template"), str)
    )


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    plain = _plain("messages", messages)
    if not isinstance(plain, list) or not plain:
        raise RequestError("messages", "must be a list of at least one message")
    return [_checked_message(index, message) for index, message in enumerate(plain)]


def _checked_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError("messages", f"item {index} must be an object")
    # Clients send null for what they leave out; templates would print "None".
    present = {key: value for key, value in message.items() if value is not None}
    if not isinstance(present.get("role"), str):
        raise RequestError("messages", f"item {index} has no role")
    if "content" not in present and "tool_calls" not in present:
        raise RequestError("messages", f"item {index} has no content")
    if not isinstance(present.get("content", ""), str | list):
        raise RequestError(
            "messages", f"item {index} has a content that is neither a string nor a list of parts"
        )
    return present


def _plain(field: str, value: object) -> Any:
    """Return a copy made of plain JSON types: a template must not get at live objects."""
    try:
        return msgspec.to_builtins(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(field, f"is not plain JSON data: {error}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump as transformers does: jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
