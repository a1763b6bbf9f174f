"""A program with llama-server's command line around the server inside the package xllamacpp, which has no program.

python llama_server.py -m MODEL --port N ...      runs until it is killed
"""

import os
import signal
import sys
import threading

import xllamacpp

FLASH = {
    "on": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "auto": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_AUTO,
}
NUMBERS = {
    "--port": "port",
    "-c": "n_ctx",
    "-np": "n_parallel",
    "--cache-ram": "cache_ram_mib",
    "-b": "n_batch",
    "-ub": "n_ubatch",
    "--ctx-checkpoints": "n_ctx_checkpoints",
}
FLAGS = {
    "--swa-full": "swa_full",
    "--context-shift": "ctx_shift",
    "-kvu": "kv_unified",
    "--jinja": "use_jinja",
}


def main(arguments: list[str]) -> None:
    """Run a server."""
    params = xllamacpp.CommonParams()
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 4096, 1, 0
    params.warmup, params.endpoint_slots = False, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    left = iter(arguments)
    for name in left:
        if name in FLAGS:
            setattr(params, FLAGS[name], True)
        elif name in NUMBERS:
            setattr(params, NUMBERS[name], int(next(left)))
        elif name in ("-m", "--model"):
            params.model.path = next(left)
        elif name == "--slot-save-path":
            params.slot_save_path = next(left)
        elif name == "-fa":
            params.flash_attn_type = FLASH[next(left)]
        elif name in ("-ctk", "-ctv"):
            kind = getattr(xllamacpp.ggml_type, "GGML_TYPE_" + next(left).upper())
            setattr(params, "cache_type_" + name[-1], kind)
        elif name == "--lora":
            params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(next(left), 1.0)]
        elif name == "--host":
            next(left)  # it listens on loopback
        else:
            sys.exit(f"unknown argument {name}")
    server = xllamacpp.Server(params)
    print("listening", server.listening_address, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
