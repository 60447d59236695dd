"""What many tests share. Look here before writing a helper; add one here once a second file needs it.

- :mod:`tests.kit.assets`: a folder of whole runs: tiny models of several kinds with one tokenizer of bytes, prompts,
  rewards, tools, agents. ``furnish(folder)`` takes a second; a module's fixture shares it.
- :mod:`tests.kit.pairs`: covering arrays: few rows in which any two values of different axes meet.
- :mod:`tests.kit.imported`: what whole runs import late, for processes that are forked when it is there.
- :mod:`tests.kit.workplace`: such a folder with words for tokens, and ``oppo train`` in this process or another.
- :mod:`tests.kit.forked`: programs and children forked from a warm server, in place of new interpreters.
- :mod:`tests.kit.pipelines`, :mod:`tests.kit.pools`, :mod:`tests.kit.faulty`: graphs of fakes in virtual time, with
  faults.
- :mod:`tests.kit.responses`, :mod:`tests.kit.dialogues`: responses for scorers, scripted turns.
- :mod:`tests.hf.tiny`, :mod:`tests.hf.spot_tokenizers`: tiny models and tokenizers, made on the spot.

A new setting of runs is a value of an axis in :mod:`tests.run.matrix`, which then tries it with all others.
"""
