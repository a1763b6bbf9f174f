"""Whether vLLM, as it is set up, can compute a request while kvtier loads it layer by layer.

It loads nothing. vLLM calls ``wait_for_layer_load`` in front of each attention layer, and computes anew what a failed
load has spoiled, but not in every setting. Where it does not, loads run beside the steps as they do by default. What
cannot be read from the configuration, such as a layer whose kernel has no such hook, shows in the first step: a load
whose layers were not all waited for counts as failed.
"""

from vllm.config import VllmConfig

from kvtier.engines.vllm import compat


def find_obstacle(vllm_config: VllmConfig) -> str | None:
    """Return why no request may compute while it is loaded, and the remedy; None when it may. Pure."""
    if not compat.HAS_BLOCK_POOL_HOOK:
        return f"vLLM {compat.release()} does not let a connector forget blocks: use a later one"
    if vllm_config.scheduler_config.async_scheduling:
        # The next step is planned, and computed, before this one's failed load is known.
        return "with asynchronous scheduling a failed load is known too late: start vLLM with --no-async-scheduling"
    if getattr(vllm_config, "use_v2_model_runner", False):
        # It keeps tokens that the scheduler has taken back after a failed load.
        return "the second model runner cannot take tokens back: start vLLM with VLLM_USE_V2_MODEL_RUNNER=0"
    if vllm_config.speculative_config is not None:
        return (
            "a drafting model reads the cache when the step's loads have been reported: leave speculation out"
        )
    if vllm_config.parallel_config.use_ubatching:
        return "two halves of a batch wait for layers at the same time: leave --enable-dbo out"
    if vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return "a graph of the whole model holds no hook: set cudagraph_mode to PIECEWISE"
    return None
