"""Agents that talk to the policy as to OpenAI's or Anthropic's server, with the tokens of their rollouts exact."""

from oppo.agents.rollouts import AgentFunction, AgentPrompts, Agents

__all__ = ["AgentFunction", "AgentPrompts", "Agents"]
