"""Does overlap change what is learned? Studies of the demo's task with paired seeds, an arm for each schedule.

::

    studies     what is compared, in words and pictures: schedules, and lookahead
    runs        makes the runs that a study lacks, each in a process, as ``oppo train`` does
    results     the file of a study
    comparison  paired differences and curves
"""
