"""Knowledge-graph question answering with seven tools (AgentBench's KG task in function-call form)."""

from envs.kg_env.env import KGEnv

__all__ = ["KGEnv"]
