"""Real tokenizers of every common make, trained on the spot on a few hundred characters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from oppo.hf.tokenizer import HfTokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on",
    "hello, world! don't stop; naïve café, 12345 + 3.14 = 12348.14",
    "def f(x):\n\treturn x ** 2\n\n\nprint(f(3))   # nine",
    "日本語のテキストです。これは長い文です。",
    "e\N{COMBINING ACUTE ACCENT}te\N{COMBINING ACUTE ACCENT} ﬁne Å",
    "emoji 😀😃 👩‍👩‍👧‍👦 🇫🇷!",
] * 8

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, the most common form."""

TRIMMING = (
    "<s>{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""One that changes what a message says, as many do."""


def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3 and Qwen: BPE over bytes, words cut by a pattern, the space before a word belongs to it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def word_piece() -> Tokenizer:
    """Like BERT: lower case, no accents, pieces of words, [CLS] and [SEP]."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def unigram() -> Tokenizer:
    """Like T5 and XLM-R: a unigram model over normalised text, with an end of sequence."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=220, unk_token="<unk>", special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 2)])
    return made


def sentence_piece() -> Tokenizer:
    """Like Llama 2 and Mistral: BPE over the whole text with its spaces, unknown characters as bytes, a beginning."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw = [f"<0x{number:02X}>" for number in range(256)]
    special = ["<pad>", "<s>", "</s>", "<unk>", *raw]
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        CORPUS[:3], trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    trained.pre_tokenizer = None
    trained.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trained.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return trained


MAKES: Mapping[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "word-piece": word_piece,
    "unigram": unigram,
    "sentence-piece": sentence_piece,
}


@cache
def spot(make: str, template: str = "") -> HfTokenizer:
    bert = make == "word-piece"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=MAKES[make](),
        pad_token="[PAD]" if bert else "<pad>",
        eos_token="[SEP]" if bert else "</s>",
        unk_token="[UNK]" if bert else "<unk>",
        clean_up_tokenization_spaces=False,
    )
    if template:
        tokenizer.chat_template = template
    return HfTokenizer(tokenizer)


def byte_tokenizer(template: str | None = None, *, ends: bool = False, special: tuple[str, ...] = ()) -> HfTokenizer:
    """Return a tokenizer of single bytes that begins texts with ``<s>``.

    Args:
        template: for chats.
        ends: it ends texts with ``</s>``.
        special: special tokens besides ``<pad>``, ``<s>``, ``</s>`` and ``<|end|>``, which are 0 to 3.
    """
    names = ["<pad>", "<s>", "</s>", "<|end|>", *special]
    vocabulary = {name: at for at, name in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken(name, special=True) for name in names])
    made.post_processor = processors.TemplateProcessing(
        "<s> $A </s>" if ends else "<s> $A", None, [("<s>", 1), ("</s>", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = template
    return HfTokenizer(tokenizer)
