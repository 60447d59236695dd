"""How fast a PPO step is in each schedule, beside the same step with nothing overlapped and beside a peer.

::

    workloads  the workloads, one table           countdown, teach, directory  the models and prompts of a workload
    calibration  the depths of a workload's models on this host
    modes      the ladder, one table              layout  which cores and threads each side has
    pipeline   directory + mode + layout -> graph
    worker     a contestant: one process, one mode     contestant  the ruler's end of its pipes     record  its answer
    rounds     rounds, interleaved -> records          measures    records -> figures, and whether they are valid
    show, plot  figures for people                     command     the runs that ``benchmarks.request`` asks for
    of_record  the README's table, from ``benchmarks/results``
"""
