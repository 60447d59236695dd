"""Keys and values: many sequences of different length in memory, read a few tokens at a time, bit for bit as one pass.

::

    IncrementalPrefill, ChunkedPrefill   which tokens are read next
    Incremental                          one forward pass over rows at different positions
    Slab, SlabCache, Masks               where keys and values lie, and who may attend to whom
    segmented_attention                  rows of similar length attend together
"""
