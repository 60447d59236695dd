"""Environments, which answer a turn: functions, tools that the policy calls, environment classes, and tasksets."""

from oppo.environments.classes import EnvironmentClass, Environments, tools_of
from oppo.environments.functions import (
    LONGEST,
    Compaction,
    EnvironmentFailure,
    EnvironmentFunction,
    FunctionEnvironment,
    TextAnswer,
    TextTurn,
    Tools,
    first_answer,
)
from oppo.environments.openenv import openenv
from oppo.environments.verifiers import TaskAgent, verifiers

__all__ = [
    "LONGEST",
    "Compaction",
    "EnvironmentClass",
    "EnvironmentFailure",
    "EnvironmentFunction",
    "Environments",
    "FunctionEnvironment",
    "TaskAgent",
    "TextAnswer",
    "TextTurn",
    "Tools",
    "first_answer",
    "openenv",
    "tools_of",
    "verifiers",
]
