"""Where a model's work is done: on the caller, in a thread of its own, or in another process.

::

    Inline    on the caller             virtual time, and nothing that takes long
    Thread    in one thread for life    shares the interpreter with everybody else in this process
    Process   in a child process        an interpreter of its own; arguments and results cross a socket

A *instance* is a synchronous object that lives in a place for good; :meth:`Hosting.host` puts it there and returns the
asynchronous handle to its methods. Calls to instances of one place are made one at a time, in the order of their
priorities (:mod:`oppo.scheduling`, :meth:`Hosted.at`). A :class:`Callback` among
the arguments of a call stays with the caller. Weights do not cross: they lie in memory that both processes see
(:class:`~oppo.placement.block.Block`).
"""

from oppo.placement.callback import Callback
from oppo.placement.inline import Inline
from oppo.placement.place import Hosted, Hosting, Journal, Place
from oppo.placement.process import Process
from oppo.placement.thread import Thread

__all__ = ["Callback", "Hosted", "Hosting", "Inline", "Journal", "Place", "Process", "Thread"]
