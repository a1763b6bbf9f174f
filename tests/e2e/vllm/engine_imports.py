"""What every engine imports, imported once: engines are forked from a process that has only imported this module.

Importing vLLM takes most of an engine's start. No engine, thread or setting is made here: a fork must find none.
"""

import contextlib
import gc
import importlib
import os

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Compiling what little vLLM compiles on the CPU takes most of a start, and touches no KV cache.
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONHASHSEED": "0",
    # The models are so small that a second thread gains nothing, and where another process wants its core, each of a
    # step's hundreds of barriers waits until the scheduler runs it again.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM's n-grams: compiling the search takes five seconds of each engine, and it gives torch a second thread.
    "NUMBA_DISABLE_JIT": "1",
    "NUMBA_NUM_THREADS": "1",
}
"""Variables of every engine's process; some are read while vLLM or torch is imported."""

MODULES = (
    "tests.e2e.vllm.without_tiles",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.qwen3_next",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.v1.attention.backends.cpu_attn",
    "kvtier.engines.vllm",
    "kvtier.engines.vllm.connector",
    "tests.e2e.vllm.engine_host",
    "tests.e2e.vllm.failing_tier",
    "tests.e2e.vllm.state_kernels",
    "tests.e2e.vllm.throttled_tier",
)
"""Modules that pull in nearly all of what an engine imports; one that a release of vLLM lacks costs time only."""

os.environ.update(ENVIRONMENT)
for module in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
# vLLM collects garbage five times while it starts, and each time would look at all that was imported.
gc.freeze()
