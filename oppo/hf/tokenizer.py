"""Text to tokens and back: a transformers tokenizer behind typed methods."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from oppo.errors import ConfigError


class HfTokenizer:
    """A transformers tokenizer with types; also an :class:`oppo.data.Tokenizer`.

    Attributes:
        inner: the transformers tokenizer.
    """

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        self.inner = inner

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`encode_chat` can be used."""
        return bool(self.inner.chat_template)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, special tokens included as the tokenizer adds them."""
        return list(self.inner.encode(text))

    def encode_exactly(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens only where the text has them: an answer within a response."""
        return list(self.inner.encode(text, add_special_tokens=False))

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation up to the start of the assistant's turn."""
        text = self.inner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return list(self.inner.encode(str(text), add_special_tokens=False))  # the template contains them

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=True))

    def decode_whole(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included: what a model reads."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=False))

    def name_of(self, token: int) -> str:
        """Return a token as the vocabulary spells it; empty for an id outside of it."""
        return str(self.inner.convert_ids_to_tokens(token) or "")

    def stop(self, wanted: Sequence[int | str], generation_stop: Sequence[int]) -> tuple[int, ...]:
        """Return the ids that end a response.

        Args:
            wanted: ids, and texts of one token each; when empty, the end-of-sequence ids.
            generation_stop: the end-of-sequence ids of the model's generation config.

        Raises:
            ConfigError: a text is not one token, an id is not in the vocabulary, or no id is left.
        """
        if not wanted:
            eos = self.inner.eos_token_id
            ends = dict.fromkeys([*([eos] if isinstance(eos, int) else []), *generation_stop])
            if not ends:
                raise ConfigError("the policy's tokenizer has no end-of-sequence token: set sampling.stop")
            return tuple(ends)
        ids = [self._id(each) for each in wanted]
        if unknown := [each for each in ids if not 0 <= each < len(self.inner)]:
            raise ConfigError(f"sampling.stop: {unknown[0]} is no token id; there are {len(self.inner)} tokens")
        return tuple(ids)

    def ending_with(self, endings: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of all tokens whose text ends with one of ``endings``, a line break for example.

        Raises:
            ConfigError: no token's does.
        """
        texts = self.inner.batch_decode([[number] for number in range(len(self.inner))])
        found = tuple(number for number, text in enumerate(texts) if text.endswith(tuple(endings)))
        if not found:
            raise ConfigError(f"no token of the policy's tokenizer ends with any of {list(endings)}")
        return found

    def stop_strings(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Return the texts that end a response, after checking that :meth:`decode` can produce them.

        Raises:
            ConfigError: a text contains a special token, which decoded text never does.
        """
        added = self.inner.added_tokens_decoder.values()
        special = {*self.inner.all_special_tokens, *(token.content for token in added if token.special)}
        for stop in wanted:
            if hidden := sorted(token for token in special if token and token in stop):
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
        """Return the first difference to another tokenizer's vocabulary, in words; ``None`` without one."""
        ours, theirs = self.inner.get_vocab(), other.inner.get_vocab()
        if ours == theirs:
            return None
        for token, number in sorted(ours.items(), key=lambda item: item[1]):
            if theirs.get(token) != number:
                return f"token {token!r} is {number} here and {theirs.get(token, 'absent')} there"
        return f"it has {len(theirs)} tokens instead of {len(ours)}"
