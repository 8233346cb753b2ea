"""Conversations rendered by a chat template, and the spans of the assistant's turns in the rendered text."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from distill.errors import InputError

Message = dict[str, Any]
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
NON_PROMPTING_ROLES = ("system", "developer", "assistant")  # roles that don't prompt an answer


@dataclass(frozen=True)
class Turns:
    """A conversation: messages with a role and a content."""

    messages: list[Message]


@dataclass(frozen=True)
class RenderedText:
    """A text, and the spans in it that a model is trained to predict.

    Args:
        text: The text.
        spans: First character of each span, and the one after its last.
        plain: Whether the text was not rendered by a template, which would write the first and the last token itself.
    """

    text: str
    spans: list[tuple[int, int]]
    plain: bool = False


def read_template(tokenizer: PreTrainedTokenizerBase, file: str | None = None) -> str:
    """Returns the template in the file, or the tokenizer's own.

    Raises:
        InputError: The file does not exist or is not UTF-8, or the tokenizer has no template.
    """
    if file is not None:
        return read_template_file(file)
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise InputError(
            f"tokenizer {type(tokenizer).__name__}: expected a chat template for conversations, found none: the text "
            "would not show who speaks; name a file with one in chat.template, or use columns prompt and completion"
        ) from None


def read_template_file(file: str) -> str:
    """Returns the template in a file; see `read_template`."""
    try:
        return Path(file).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"chat.template {file!r}: expected a file with a template in UTF-8: {error}") from error


def render_turns(
    tokenizer: PreTrainedTokenizerBase, chat: Turns, template: str, last: bool, where: str
) -> RenderedText:
    """Renders the whole conversation and finds the spans of the assistant's turns, or of the last one.

    A template with generation marks defines the spans itself. With any other template the conversation is rendered up
    to each turn, without and with it: the target is the text that the turn adds, up to its last special token if only
    blanks follow. An assistant turn before any message from another participant is not an answer.

    Raises:
        InputError: The template rejects the conversation, or renders its first messages differently depending on the
            messages that follow.
    """
    messages = chat.messages
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and not is_blank(message)]
    if not turns:
        return RenderedText("", [])
    text, spans = _render(tokenizer, template, messages, where)
    if MARKED.search(template):
        before = _render(tokenizer, template, messages[: turns[-1]], where)[0] if last and turns[-1] else ""
        if not text.startswith(before):
            raise _prefix_error(where, turns[-1])
        return RenderedText(text, [span for span in spans if span[0] >= len(before)])
    answers = [i for i in turns if any(message["role"] not in NON_PROMPTING_ROLES for message in messages[:i])]
    selected = answers[-1:] if last else answers
    return RenderedText(text, [_find_turn(tokenizer, template, messages, i, text, where) for i in selected])


def _prefix_error(where: str, turn: int, remedy: str = "") -> InputError:
    return InputError(
        f"{where}: expected a chat template that renders the first messages alike whatever follows, found one that "
        f"doesn't at message {turn + 1}: the assistant's tokens can't be distinguished from the others{remedy}"
    )


def is_blank(message: Message) -> bool:
    """Returns whether the message has neither content nor a tool call."""
    return not any(str(value).strip() for name, value in message.items() if name != "role")


def _find_turn(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: list[Message], turn: int, text: str, where: str
) -> tuple[int, int]:
    """Returns the span that message number `turn` adds to the rendered text."""
    before, _ = _render(tokenizer, template, messages[:turn], where, prompt=True)
    after, _ = _render(tokenizer, template, messages[: turn + 1], where)
    if not (after.startswith(before) and text.startswith(after)):
        later = any(message["role"] == "assistant" for message in messages[turn + 1 :])
        raise _prefix_error(
            where,
            turn,
            "; mark them in the template with {% generation %}"
            + (", or train on the last turn only (--chat.turns last)" if later else ""),
        )
    added = after[len(before) :]
    content = messages[turn].get("content")
    unprompted = before == _render(tokenizer, template, messages[:turn], where)[0]
    if unprompted and isinstance(content, str) and not added.lstrip().startswith(content.strip()):
        raise InputError(
            f"{where}: expected a chat template that begins the assistant's turn with add_generation_prompt, found one "
            f"that writes {added[: added.find(content.strip())][:40]!r} with the answer only: the model would learn to "
            "write it; mark the answer in the template with {% generation %}"
        )
    stripped = added.rstrip()
    ends = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return len(before), len(before) + len(stripped if stripped.endswith(ends) else added)


def render_prompt(tokenizer: PreTrainedTokenizerBase, chat: Turns, template: str, where: str) -> RenderedText | None:
    """Renders the messages before a final assistant turn (all messages if there is none) and the start of a new turn.

    Returns None if no message prompts the assistant.
    """
    messages = chat.messages[:-1] if chat.messages and chat.messages[-1]["role"] == "assistant" else chat.messages
    if all(message["role"] in NON_PROMPTING_ROLES for message in messages):
        return None
    return RenderedText(_render(tokenizer, template, messages, where, prompt=True)[0], [])


def _render(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: list[Message], where: str, *, prompt: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """Returns the rendered text and the spans that the template marks as generated; no spans without marks."""
    marked = bool(MARKED.search(template))
    try:
        rendered: Any = render_jinja_template(
            [messages],
            chat_template=template,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=prompt,
            **tokenizer.special_tokens_map,  # type: ignore[arg-type]
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise InputError(f"{where}: the chat template can't render the conversation: {error}") from error
    texts, spans = rendered
    return texts[0], spans[0] if marked else []
