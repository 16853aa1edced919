"""kvvault under vLLM's multi-tier KV offloading.

`plugin` announces the tier and the spec to vLLM, `spec` and `worker` make the path run on CPU
devices, `namespace` names what the KV bytes depend on, and `shims` is the one place that knows how
vLLM's interfaces differ between versions. Importing this package imports nothing of vLLM.
"""
