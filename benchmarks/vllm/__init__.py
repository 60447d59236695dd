"""oppo's policy on vLLM beside vLLM alone: ``compare`` measures, ``cases`` has the sizes and shows them.

``learning`` is what the demo's models learn on vLLM.
"""
