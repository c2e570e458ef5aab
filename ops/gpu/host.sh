#!/usr/bin/env bash
# Prepare an offline GPU host, then run a command there: bash ops/gpu/host.sh COMMAND [ARGUMENT ...]
# Unpacks the payload, compiles our kernels for this GPU, installs the plugin as a distribution beside
# its sources. Compile caches come from build/gpu-payload/cache.tar.xz and go to $OUT/cache.tar.xz.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export LONGLEAF_GPU_HOME=${LONGLEAF_GPU_HOME:-/tmp/longleaf-gpu}
payload=$repository/build/gpu-payload home=$LONGLEAF_GPU_HOME begin=$SECONDS
mkdir -p "$home"/{site,cache,plugin,logs}

export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} LONGLEAF_CUDA_ARCHS=${LONGLEAF_CUDA_ARCHS:-90a}
export LONGLEAF_KERNELS_LIBRARY=$home/liblongleaf_kernels.so
export PYTHONPATH=$home/site:$home/plugin:$repository/service:$repository/kernels:$repository${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 SGLANG_DISABLE_TORCHVISION_WARN=1
export TRITON_CACHE_DIR=$home/cache/triton TVM_FFI_CACHE_DIR=$home/cache/tvm FLASHINFER_WORKSPACE_BASE=$home/cache/flashinfer

if [ ! -e "$home/ready" ]; then
  tar xJf "$payload/site.tar.xz" -C "$home/site" &
  unpack=$!
  (cd "$repository/kernels" && python3 cuda_build.py --output "$LONGLEAF_KERNELS_LIBRARY" \
    --build-dir "$home/kernels" >"$home/logs/kernels.log" 2>&1) &
  kernels=$!
  [ -f "$payload/cache.tar.xz" ] && tar xJf "$payload/cache.tar.xz" -C "$home/cache"
  python3 -m ops.gpu.plugin_distribution "$home/plugin"
  wait $unpack
  python3 -m compileall -q -j 0 "$home/site/sglang" "$home/site/flashinfer" >/dev/null 2>&1 || true
  wait $kernels || { echo "our kernels do not compile; stock servers still run"; tail -5 "$home/logs/kernels.log"; }
  touch "$home/ready"
fi
echo "host ready after $((SECONDS - begin)) s"

status=0
"$@" || status=$?
if [ -n "${OUT:-}" ]; then
  tar cf - -C "$home/cache" . | xz -T0 -3 >"$OUT/cache.tar.xz"
  tar czf "$OUT/logs.tar.gz" -C "$home" logs
fi
echo "host done after $((SECONDS - begin)) s, status $status"
exit $status
