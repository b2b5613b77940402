"""Code that looks at a model's files, or changes them, before the model is loaded."""

from neso.server.repository_agents.agent import RepositoryAgent, run_agents

__all__ = ["RepositoryAgent", "run_agents"]
