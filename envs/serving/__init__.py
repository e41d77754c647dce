"""Our environments behind AgentRL's controller protocol: `controller` (sessions and workers), `app` (HTTP)."""
