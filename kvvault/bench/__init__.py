"""The measurements that kvvault publishes, runnable by anybody. Needs vLLM for the comparison."""
