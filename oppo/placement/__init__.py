"""Where a model works: on the caller, in a thread of its own, or in a child process.

::

    Inline    on the caller             for virtual time and short work
    Thread    in one thread for life    shares this process's interpreter lock
    Process   in a child process        has its own interpreter; arguments and results cross a socket
    Ranks     in several of them        each has a copy, and they make every call together

An *instance* is a synchronous object that lives in one place for good. :meth:`Hosting.host` takes its factory, calls it
there, and returns the asynchronous handle to its methods. A place makes its calls one at a time, in the order of
their priorities (:mod:`oppo.scheduling`, :meth:`Hosted.at`). A :class:`Callback` among the arguments of a call stays
with the caller. Weights do not cross to another process of this machine: they lie in memory that both see
(:mod:`oppo.placement.shared_memory`). Several engines of the same model are a policy together: a :class:`PolicyPool`.
"""

from oppo.placement.child import Callback
from oppo.placement.place import Hosted, Hosting, Inline, Make, Place, Thread
from oppo.placement.pool import PolicyPool
from oppo.placement.process import Process
from oppo.placement.ranks import Member, Ranks

__all__ = [
    "Callback",
    "Hosted",
    "Hosting",
    "Inline",
    "Make",
    "Member",
    "Place",
    "PolicyPool",
    "Process",
    "Ranks",
    "Thread",
]
