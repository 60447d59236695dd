"""Algorithms: one file each, with settings, recipe and loss; :mod:`oppo.algorithms.registry` names them."""
