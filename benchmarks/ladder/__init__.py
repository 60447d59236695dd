"""How fast a PPO step is in each schedule, beside the same step with nothing overlapped and beside a peer.

::

    workloads   tables of workloads and modes, the options that choose among them
    directory   a workload as files: its prompts, its models, the language that its actor counts in
    pipeline    directory + mode + layout -> graph
    worker      a contestant: one process, one mode     contestant  the ladder's end of its pipes
    rounds      a request -> rounds, interleaved        measures    records -> figures, and whether they are valid
    show        figures for people; the table of record from ``benchmarks/results``
"""
