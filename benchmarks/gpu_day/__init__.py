"""What a borrowed GPU is for, in twelve minutes (``make gpu-day``): results, each beside what was predicted.

::

    __main__    the command: parts in order, each with its limit     parts   what a pass, a product, an update takes
    steps       whole steps: schedules, memory, a peer               plan    what each is predicted to take, and goals
"""
