"""Keys and values: sequences of different length in memory, read a few tokens at a time, as one pass would read them.

::

    IncrementalPrefill     which tokens of a growing rollout are read next
    Incremental            one forward pass over rows at different positions
    Slab, SlabCache, Masks where keys and values lie, and which keys each query attends to
    segmented_attention    rows of similar length attend together
"""
