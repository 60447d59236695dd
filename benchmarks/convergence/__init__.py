"""Does overlap change what is learned? Studies of the demo's task with paired seeds, an arm for each schedule.

::

    study       what a study is: arms, files, words
    schedules   from serial to more deferral than is good
    lookahead   tokens that are n updates old, with and without importance weights
    missing     makes the runs that a study lacks, each in a process (``one``), as ``oppo train`` does (``training``)
    results     the file of a study
    comparison  paired differences and curves; ``figure`` and ``page`` show them
"""
