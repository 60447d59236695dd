"""oppo's policy on vLLM beside vLLM alone: ``decoding`` and ``publishing`` measure, ``models`` has the sizes.

``offline`` is the program that measures vLLM's ``LLM`` in a process of its own.
"""
