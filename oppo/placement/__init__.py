"""Where a model's work is done: on the caller, in a thread of its own, or in another process.

::

    Inline    on the caller             virtual time, and nothing that takes long
    Thread    in one thread for life    shares the interpreter with everybody else in this process
    Process   in a child process        an interpreter of its own; arguments and results cross a socket

A *resident* is a synchronous object that lives in a place for good; :meth:`Hosting.host` puts it there and returns the
asynchronous handle to its methods. Residents of one place take turns, in the order of the calls; but what is
:func:`ahead` of others comes first, and what is :func:`giving_way` may not come at all. A :class:`Callback` among the
arguments of a call stays with the caller. Weights do not cross: they lie in memory that both processes see
(:class:`~oppo.placement.block.Block`).
"""

from oppo.placement.callback import Callback
from oppo.placement.inline import Inline
from oppo.placement.place import Hosted, Hosting, Journal, Place
from oppo.placement.process import Process
from oppo.placement.thread import Thread
from oppo.placement.turns import GaveWay, ahead, giving_way

__all__ = [
    "Callback",
    "GaveWay",
    "Hosted",
    "Hosting",
    "Inline",
    "Journal",
    "Place",
    "Process",
    "Thread",
    "ahead",
    "giving_way",
]
