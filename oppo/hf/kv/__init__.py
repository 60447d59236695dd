"""The KV cache: sequences of different length in memory, read a few tokens at a time, as one pass would read them.

::

    reader      which tokens of a growing rollout are read next; one forward pass over rows at different positions
    cache       which slab holds each row, and where each layer's KV cache lies in it
    states      recurrent and convolution states of hybrid models, in slots beside it
    attention   which keys each query attends to; rows of similar length attend together
"""
