#!/usr/bin/env bash
# Serve a model with vLLM and kvtier, ask over HTTP, and show what kvtier did.
#
#   examples/vllm/server.sh                    a small random Llama, made on the spot
#   examples/vllm/server.sh MODEL              any model that vLLM runs, by name or folder
#   examples/vllm/server.sh MODEL FOLDER       keeps the blocks in FOLDER: run it twice
#
# Needs curl, and vLLM's environment active (or PYTHON set to its interpreter). The server listens on 127.0.0.1.
set -euo pipefail

PYTHON=${PYTHON:-python}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=$(mktemp -d)
SERVER=

# The server ends before its files go; 17 s of it are vLLM's own. Without --shutdown-timeout vLLM kills its engine at once,
# and blocks that are not on the disk yet are lost.
finish() {
  if [[ -n $SERVER ]]; then
    kill "$SERVER" 2>/dev/null || true
    wait "$SERVER" 2>/dev/null || true
  fi
  rm -rf "$WORK"
}
trap finish EXIT

MODEL=${1:-$WORK/model}
BLOCKS=$(realpath -m "${2:-$WORK/blocks}")
DTYPE=auto
if [[ $# -eq 0 ]]; then
  "$PYTHON" "$HERE/offline.py" --save-model "$MODEL" 2>"$WORK/model.log"
  DTYPE=float32  # CPUs without instructions for 16 bits take many times as long with them
fi

export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}   # GiB; for CPU hosts
export PYTHONHASHSEED=0                                      # blocks are named the same after a restart
PORT=${PORT:-$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
URL=http://127.0.0.1:$PORT

KVTIER='{
  "kv_connector": "KVTierConnector",
  "kv_connector_module_path": "kvtier.engines.vllm",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {
    "cpu_bytes_to_use": "1GiB",
    "secondary_tiers": [{"type": "fs", "root_dir": "'$BLOCKS'", "capacity_bytes": "4GiB"}]
  }
}'

# "vllm serve MODEL" is this module; the command itself does not start in the CPU package, which is called vllm-cpu.
SERVE=(vllm serve "$MODEL")
"$PYTHON" -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null ||
  SERVE=("$PYTHON" -W ignore -m vllm.entrypoints.openai.api_server --model "$MODEL")

# A device pool that holds one of the prompts below: when the first one comes again, it is loaded from kvtier.
"${SERVE[@]}" --host 127.0.0.1 --port "$PORT" --served-model-name model --dtype "$DTYPE" \
  --skip-tokenizer-init --enforce-eager --max-model-len 4096 --block-size 128 --num-gpu-blocks-override 34 \
  --enable-prompt-tokens-details --shutdown-timeout 30 --kv-transfer-config "$KVTIER" >"$WORK/server.log" 2>&1 &
SERVER=$!
until curl --silent --fail --output /dev/null "$URL/health"; do
  kill -0 "$SERVER" 2>/dev/null || { tail -n 30 "$WORK/server.log" >&2; SERVER=; exit 1; }
  sleep 1
done
grep -oE 'kvtier( [0-9.]+ keeps|:) .*' "$WORK/server.log" || true

# Token ids, because no tokenizer is needed then; a text works the same way.
ask() {
  local prompt
  prompt=$("$PYTHON" -c "import random; r = random.Random($1); print([r.randrange(1, 2000) for _ in range(3000)])")
  echo '{"model": "model", "max_tokens": 8, "temperature": 0, "ignore_eos": true, "prompt": '"$prompt"'}' >"$WORK/body.json"
  curl --silent --show-error --fail --write-out '\n%{time_total} s\n' --header 'Content-Type: application/json' \
    --data "@$WORK/body.json" "$URL/v1/completions" | grep -oE '"cached_tokens":[0-9]+|^[0-9.]+ s$' | paste -sd ' ' |
    sed "s/^/prompt $1: /"
}

ask 1
ask 2
ask 3
ask 1
curl --silent --fail "$URL/metrics" | grep -E '^vllm:(kv_offload_(load|store)_[a-z]*_total|prompt_tokens_[a-z_]*by_source_total)' |
  grep -v ' 0\.0$' | sed -E 's/engine="0",model_name="model",?//; s/,\}/}/'
