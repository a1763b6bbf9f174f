"""What an operator sees of an engine, and can do to it while it runs.

``metrics`` declares each metric family once. The exporter (``prometheus``), vLLM's metrics page
(``kvtier.engines.vllm.metrics``), the reference page, the dashboard and its tests are made from these declarations.
"""

from kvtier.observe.prometheus import MetricsServer, serve_metrics

__all__ = ["MetricsServer", "serve_metrics"]
