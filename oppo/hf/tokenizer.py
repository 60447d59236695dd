"""Text to tokens and back: a transformers tokenizer behind typed methods."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

from huggingface_hub import HfApi, constants, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, though not marked as exported
from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from oppo.errors import ConfigError, did_you_mean_path, one_line
from oppo.log import logger

TOKENIZER: Final = "tokenizer.json"

Span: TypeAlias = tuple[int, int]  # the first character of a part of a text, and the one behind its last

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Mark special tokens that data spells, while a template renders it: noncharacters, which text never contains."""

_MARKED: Final = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}|[{_OPEN}{_CLOSE}]")


_GENERATION: Final = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")  # tags of transformers, without output


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text to be tokenized; of the ``data`` spans of ``text``, and of ``pair``, special tokens are ordinary text."""

    # special: whether the tokenizer adds its special tokens; a chat template has them already

    text: str
    pair: str | None = None
    special: bool = True
    data: Sequence[Span] = ()

    def after(self, start: int) -> Rendered:
        data = [(max(0, first - start), end - start) for first, end in self.data if end > start]
        return replace(self, text=self.text[start:], data=data)


def _parsed(template: str) -> nodes.Template:
    parser = Environment(autoescape=True, extensions=["jinja2.ext.loopcontrols"])
    return parser.parse(_GENERATION.sub("", template))


_PROBE: Final = {"key": "value"}


def _with_arguments(message: Any, written: Callable[[Mapping[str, object]], object]) -> Any:
    # The arguments of a message's calls as ``written`` makes them of an object.
    if isinstance(message, list | tuple):
        return [_with_arguments(each, written) for each in message]
    if not isinstance(message, Mapping):
        return message
    inner = {key: _with_arguments(message[key], written) for key in ("tool_calls", "function") if key in message}
    found: object = message.get("arguments")
    if isinstance(found, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(found or "{}")
    return {**message, **inner, **({"arguments": written(found)} if isinstance(found, Mapping) else {})}


class HfTokenizer:
    """A transformers tokenizer with types; also an :class:`oppo.data.Tokenizer`.

    Attributes:
        inner: the transformers tokenizer.
        beside: bytes of files that belong to it, such as an image processor's, by name.
        tools: the schemas of tools that the chat template shows.
        variables: of the chat template, such as ``enable_thinking``.
    """

    def __init__(
        self,
        inner: PreTrainedTokenizerBase,
        beside: Mapping[str, bytes] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.inner = inner
        self.beside = beside or {}
        self.tools = tools
        self.variables = variables or {}

    def save(self, directory: Path) -> None:
        self.inner.save_pretrained(directory)
        for name, content in self.beside.items():
            (directory / name).write_bytes(content)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.inner.chat_template)

    @property
    def chat_template(self) -> str:
        """The chat template, of several the one for these tools."""
        return str(self.inner.get_chat_template(tools=self._shown_tools))

    def template_variables(self) -> set[str]:
        """Return the names that the chat template reads."""
        try:
            return meta.find_undeclared_variables(_parsed(self.chat_template))
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template cannot be read: {error.message} (line {error.lineno})") from error

    @cached_property
    def _shown_tools(self) -> Any:
        return self._marked(self.tools) or None  # templates ask whether there are tools: an empty list is some to many

    def encode(self, text: str, *, last: int | None = None) -> list[int]:
        """Return the token ids of a prompt, behind what the tokenizer begins texts with.

        A rendered prompt, which spells that beginning, gets no second one, and a prompt never ends with what the
        tokenizer ends texts with. Special tokens that the text spells are special tokens.

        Args:
            last: read only this many characters, from the end; ``None``: all.
        """
        before, _ = self.around
        ids = self.encode_whole(text if last is None else text[-last:])
        return ids if ids[: len(before)] == before else [*before, *ids]

    def encode_whole(self, text: str) -> list[int]:
        """Return the token ids of a text; special tokens that it spells, and no others, are special tokens."""
        return list(self.inner.encode(text, add_special_tokens=False, verbose=False))

    def encode_exactly(self, text: str) -> list[int]:
        """Return the token ids of data, such as a tool's answer: whatever it spells, none is a special token."""
        if not self._rewrites and not self._control_tokens.search(text):
            return self.encode_whole(text)
        return list(self._splitting.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False))

    @cached_property
    def _splitting(self) -> PreTrainedTokenizerBase:
        return copy.deepcopy(self.inner)  # that it splits is a state, and other threads encode with the first

    @cached_property
    def _rewrites(self) -> bool:
        # Whether some special token is found in a text that spells it otherwise.
        return any(token.special and token.normalized for token in self.inner.added_tokens_decoder.values())

    def encode_chat(self, messages: Sequence[Mapping[str, object]], *, last: int | None = None) -> list[int]:
        """Return the token ids of a conversation, up to the start of the assistant's turn.

        A last message of the assistant is left open: the response continues it. Only the template writes
        special tokens; one that a message spells is ordinary text.

        Args:
            messages: with all of their fields.
            last: tokenize only this many characters, from the end; ``None``: all.
        """
        rendered = self.rendered(messages, answered=False)
        start = 0 if last is None else max(0, len(rendered.text) - last)
        return self.encode_rendered(rendered.after(start))

    def rendered(self, messages: Sequence[Mapping[str, object]], *, answered: bool) -> Rendered:
        """Return a conversation as the chat template renders it.

        Args:
            messages: with all of their fields. Arguments of calls may be JSON text, or an object.
            answered: the last message is the response, and complete; otherwise the text ends where the response begins.
        """
        text = self._rendered([_with_arguments(message, self._writes) for message in messages], answered=answered)
        parts, data, length, end = [], [], 0, 0
        for found in _MARKED.finditer(text):
            spelt = found[1] or ""
            parts += [text[end : found.start()], spelt]
            start = length + found.start() - end
            length, end = start + len(spelt), found.end()
            data.append((start, length))
        return Rendered("".join([*parts, text[end:]]), special=False, data=data)

    def _writes(self, arguments: Mapping[str, object]) -> object:
        return json.dumps(arguments, ensure_ascii=False) if self._takes_text else arguments

    @cached_property
    def _takes_text(self) -> bool:
        # Whether the chat template writes arguments that are JSON text, and cannot write an object.
        def written(content: object, arguments: object) -> str:
            call = {"id": "call00000", "type": "function", "function": {"name": "act", "arguments": arguments}}
            said = {"role": "assistant", "content": content, "tool_calls": [call]}
            with suppress(Exception):  # any kind: a template is a program
                text = self._rendered([{"role": "user", "content": "hello"}, said], answered=True)
                return "" if str(_PROBE) in text else text
            return ""

        styles = [(content, each) for content in ("", None) for each in (_PROBE, json.dumps(_PROBE))]
        return next((isinstance(each, str) for content, each in styles if written(content, each)), False)

    def _rendered(self, messages: Sequence[Mapping[str, object]], *, answered: bool) -> str:
        marked = [self._marked(message) for message in messages]
        continued = not answered and bool(messages) and messages[-1].get("role") == "assistant"
        text: Any = self.inner.apply_chat_template(
            marked,
            tools=self._shown_tools,
            add_generation_prompt=not answered and not continued,
            continue_final_message=continued,
            tokenize=False,
            **self.variables,
        )
        return str(text)

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """Return the token ids of a text, without those that the tokenizer adds; special tokens in data are text."""
        parts = self.segments(rendered)
        return [token for text, data in parts for token in (self.encode_exactly if data else self.encode_whole)(text)]

    def segments(self, rendered: Rendered) -> list[tuple[str, bool]]:
        """Return the parts of a text that are tokenized apart, and whether each is data that spells a special token."""
        text, data = rendered.text, rendered.data
        if any(start <= 0 and stop >= len(text) for start, stop in data):
            return [(text, True)]
        parts, end = [], 0
        for found in self._control_tokens.finditer(text) if data else ():
            if any(start < found.end() and found.start() < stop for start, stop in data):
                parts += [(text[end : found.start()], False), (found[0], True)]
                end = found.end()
        return [part for part in (*parts, (text[end:], False)) if part[0] or not text]

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        bare, whole = self.encode_whole("a"), list(self.inner.encode("a"))
        starts = range(len(whole) - len(bare) + 1)
        at = next((start for start in starts if whole[start : start + len(bare)] == bare), 0)
        return whole[:at], whole[at + len(bare) :]

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids of tokens that no ordinary text spells."""
        return frozenset({*self.inner.added_tokens_decoder, *self.inner.all_special_ids})

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        longest_first = sorted(self._special_tokens(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _special_tokens(self) -> set[str]:
        added = self.inner.added_tokens_decoder.values()
        return {*self.inner.all_special_tokens, *(token.content for token in added if token.special)} - {""}

    def _marked(self, value: Any) -> Any:
        # Marks enclose data that spells a special token, in a copy.
        if isinstance(value, str):
            return self._control_tokens.sub(lambda found: f"{_OPEN}{found[0]}{_CLOSE}", value)
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(each) for key, each in value.items()}
        return [self._marked(each) for each in value] if isinstance(value, list | tuple) else value

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=True))

    def decode_whole(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included: what a model reads."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=False))

    def name_of(self, token: int) -> str:
        """Return a token as the vocabulary spells it; empty for an id outside of it."""
        return str(self.inner.convert_ids_to_tokens(token) or "")

    @cached_property
    def size(self) -> int:
        return max(self.inner.get_vocab().values(), default=-1) + 1

    def stop(self, wanted: Sequence[int | str], generation_stop: Sequence[int], *, eos: bool = True) -> tuple[int, ...]:
        """Return the ids that end a response: the end-of-sequence ids, and those that are wanted besides.

        Args:
            wanted: ids, and texts of one token each.
            generation_stop: the end-of-sequence ids of the model's generation config.
            eos: whether the end-of-sequence ids are among them.

        Raises:
            ConfigError: a text is not one token, an id is not in the vocabulary, or ``eos`` finds no id.
        """
        own = self.inner.eos_token_id
        ends = dict.fromkeys([*([own] if isinstance(own, int) else []), *generation_stop]) if eos else {}
        if beyond := [each for each in ends if not 0 <= each < self.size]:
            logger.warning(
                f"the policy's generation config has the end-of-sequence ids {', '.join(map(str, beyond))}, which no "
                f"token has: its tokenizer's ids go up to {self.size - 1}"
            )
        known = [each for each in ends if each not in beyond]
        if eos and not known and not wanted:
            raise ConfigError("the policy's tokenizer has no end-of-sequence token: set sampling.stop")
        ids = [self._id(each) for each in wanted]
        if unknown := [each for each in ids if not 0 <= each < self.size]:
            raise ConfigError(f"sampling.stop: {unknown[0]} is no token id; they go up to {self.size - 1}")
        return tuple(dict.fromkeys([*known, *ids]))

    def ending_with(self, endings: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of all tokens whose text ends with one of ``endings``: at least one, or it is refused."""
        texts = self.inner.batch_decode([[number] for number in range(len(self.inner))])
        found = tuple(number for number, text in enumerate(texts) if text.endswith(tuple(endings)))
        if not found:
            raise ConfigError(f"no token of the policy's tokenizer ends with any of {list(endings)}")
        return found

    def stop_strings(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Return the texts that end a response; one with a special token, which is not decoded, is refused."""
        for stop in wanted:
            if hidden := sorted(token for token in self._special_tokens() if token in stop):
                number = self.inner.convert_tokens_to_ids(hidden[0])
                raise ConfigError(
                    f"sampling.stop_strings: {stop!r} contains the special token {hidden[0]!r}, which is left out of "
                    f"decoded text, so no response would end there: put the token, id {number}, into sampling.stop"
                )
        return tuple(wanted)

    def _id(self, stop: int | str) -> int:
        if isinstance(stop, int):
            return stop
        ids = self.inner.encode(stop, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(f"sampling.stop: {stop!r} is {len(ids)} tokens of the policy's tokenizer, expected one")
        return int(ids[0])

    def differs(self, other: HfTokenizer) -> str | None:
        # in words; None without a difference of the vocabularies
        ours, theirs = self.inner.get_vocab(), other.inner.get_vocab()
        if ours == theirs:
            return None
        for token, number in sorted(ours.items(), key=lambda item: item[1]):
            if theirs.get(token) != number:
                return f"token {token!r} is {number} here and {theirs.get(token, 'absent')} there"
        return f"it has {len(theirs)} tokens instead of {len(ours)}"


def quick_tokenizer(name: str) -> HfTokenizer | None:
    """Return the tokenizer of a directory, or of the hub's cache, made without torch; ``None`` if there is none.

    It renders chats as the one of :func:`oppo.hf.load_tokenizer` does, but a model may have another class for its
    tokens, so that these are for a first look only.
    """
    with suppress(Exception):  # whatever is wrong, loading the tokenizer says it better
        found = Path(name, TOKENIZER) if Path(name).is_dir() else try_to_load_from_cache(name, TOKENIZER)
        if isinstance(found, str | Path) and Path(found).is_file():
            return HfTokenizer(PreTrainedTokenizerFast.from_pretrained(Path(found).parent))
    return None


def copy_without_hub(name: str) -> Path | None:
    """Return this machine's copy of a model that no hub has now, ``None`` if one has it; raise ``ConfigError`` without.

    The answer holds for the life of the process, so that a run waits for it once per name.
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        guess = did_you_mean_path(Path(name).expanduser().absolute())
        raise ConfigError(
            f"{name!r} is no directory here{guess}, nor could it be the name of a model at a hub"
        ) from None
    online = not is_offline_mode()
    if online:
        logger.once(f"{name} is no directory here: asking {constants.ENDPOINT} for it")
    copy, why = _copy_and_why(name)
    if copy is not None and online:
        logger.once(f"taking {name} as this machine's copy {copy} has it ({why})")
    return copy


@cache
def _copy_and_why(name: str) -> tuple[Path | None, str]:
    files = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")
    cached = [found for file in files if isinstance(found := try_to_load_from_cache(name, file), str)]
    copy = Path(cached[0]).parent if cached else None
    try:
        HfApi().model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # any kind: proxies, certificates, servers and their answers
        if copy is None:
            guess = did_you_mean_path(Path(name).absolute())
            raise ConfigError(
                f"{name!r} is no directory here{guess}, and as a hub name it could not be had ({one_line(error)})"
            ) from error
        return copy, one_line(error)
    return None, ""
