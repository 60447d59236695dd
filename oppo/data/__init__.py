"""Prompts: read from files, datasets or a program's rows, and served in a seeded order, from one source or several.

A prompt's admission number is its ordinal in its stream, whatever the schedule. It keys the sampling noise, so with the
same seed a prompt meets the same noise at any chunk size, overcommit or resume.
"""

from oppo.data.prompts import OverLongPrompt, PrivilegedPrompt, Tokenizer, read_prompts
from oppo.data.stream import PromptStream, RowStream

__all__ = ["OverLongPrompt", "PrivilegedPrompt", "PromptStream", "RowStream", "Tokenizer", "read_prompts"]
