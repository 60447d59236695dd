"""Controllers of overcommit, compared in eight regimes: the real graph of stages, models of cost, virtual time."""
