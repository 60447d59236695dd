"""Places on the machines of a Ray cluster. Ray starts processes and finds room for them; nothing else is asked of it.

::

    RayPlace    one actor               scorers, whose models are given by recipes; replaced if it dies, also by one on
                                        another machine; or the policy, with restarts=0, as rollouts are lost with it
    RayRanks    an actor for each rank  a trainer, given by a recipe; each rank in a bundle of one placement group

An order, what it asks of its caller, its answer and the weights that a model is given cross by Ray; what ranks
exchange crosses by ``torch.distributed``. No code does: oppo, and what calls name, must be installed on each machine,
in one version.
"""

# ruff: noqa: E402 - what is imported below needs Ray

from oppo.libraries import require

require("ray", "a place on other machines")

from oppo.placement.ray.cluster import Cluster, Room
from oppo.placement.ray.places import RayPlace, RayRanks

__all__ = ["Cluster", "RayPlace", "RayRanks", "Room"]
