"""``oppo bench``: how fast a PPO step is, beside the same step with nothing overlapped and beside a peer.

::

    workloads  what is measured, one table        countdown, teach, directory  the models and prompts of a workload
    modes      the ladder, one table              layout, machine  which cores and threads each side has, of what
    pipeline   directory + mode + layout -> graph      hold        the stage that makes a step serial
    worker     a contestant: one process, one mode     contestant  the ruler's end of its pipes; record: what it says
    ladder     rounds, interleaved -> records          measures    records -> figures, and whether they are valid
    peer       the contestant of another program       show, plot  figures for people
    command    ``oppo bench`` as ``request`` asks for it

    engine (with loads, free)  what a chunk costs the engine       decoding, decoders  our decoder beside ``generate``
"""
