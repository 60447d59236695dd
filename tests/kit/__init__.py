"""What many tests share, by what it stands for.

- :mod:`tests.kit.pairs`: covering arrays of pairs.
- :mod:`tests.kit.assets`: tiny models with a tokenizer, prompts and user code, as files for whole runs.
"""
