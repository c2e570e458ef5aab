# syntax=docker/dockerfile:1
# Two images: --target gateway (any CPU, small; also the embedded engine) and --target engine (SGLang with DDTREE).
#
#   docker build --target gateway -t longleaf/gateway:0.1.0 .
#   docker build --target engine --build-arg ENGINE_BASE=… -t longleaf/engine:0.1.0 .

# Python 3.11 with venv, as python3.
ARG GATEWAY_BASE=python:3.11-slim-bookworm
# CUDA 13.0's development image, for nvcc.
ARG CUDA_DEVEL=nvidia/cuda:13.0.2-devel-ubuntu24.04
# Python 3.12 with torch 2.11 for CUDA 13.0 and triton 3.6, which SGLang 0.5.17 is built for.
ARG ENGINE_BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel

# --- the service's packages, into a folder of their own -------------------------------------------------------------
FROM ${GATEWAY_BASE} AS packages
WORKDIR /src
COPY requirements.lock ./
# Hashes pin every wheel; the lock is the whole list, so nothing is resolved here.
RUN python3 -m venv /opt/longleaf \
 && /opt/longleaf/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
COPY service ./service
RUN /opt/longleaf/bin/pip wheel --no-cache-dir --disable-pip-version-check --no-build-isolation --no-deps -w /dist ./service \
 && /opt/longleaf/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps /dist/*.whl \
 && /opt/longleaf/bin/pip uninstall --yes --quiet hatchling pip setuptools \
 && find /opt/longleaf -name '*.pyc' -delete

# --- gateway --------------------------------------------------------------------------------------------------------
FROM ${GATEWAY_BASE} AS gateway
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="longleaf gateway" \
      org.opencontainers.image.description="OpenAI chat completions in front of long-context engines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=packages /opt/longleaf /opt/longleaf
ENV PATH=/opt/longleaf/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8080 9080
# SIGTERM drains: new work is refused, running answers end.
STOPSIGNAL SIGTERM
ENTRYPOINT ["longleaf"]
CMD ["gateway", "--host=0.0.0.0", "--metrics-host=0.0.0.0"]

# --- the kernels' library, for both generations of GPUs --------------------------------------------------------------
FROM ${CUDA_DEVEL} AS kernels
WORKDIR /src/kernels
COPY kernels ./
RUN LONGLEAF_CUDA_ARCHS="90a;120a" python3 cuda_build.py

# --- engine ---------------------------------------------------------------------------------------------------------
FROM ${ENGINE_BASE} AS engine
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="longleaf engine" \
      org.opencontainers.image.description="SGLang 0.5.17 with DDTREE and split-KV verify attention" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
WORKDIR /src
# SGLang and all that it, the plugin and the command need beside torch: exact wheels by hash, nothing resolved.
COPY ops/gpu/payload.txt requirements-image.txt ./
RUN python3 -m pip install --no-cache-dir --disable-pip-version-check --break-system-packages --require-hashes --no-deps \
      -r payload.txt -r requirements-image.txt
COPY --from=packages /dist /dist
# Another base's torch, or a package that SGLang imports and nobody named, would fail at the first start, on a GPU node.
RUN python3 -m pip install --no-cache-dir --disable-pip-version-check --break-system-packages --no-deps /dist/*.whl \
 && python3 -c 'import torch; from longleaf.engine import guard; guard.check_platform(torch.__version__, torch.version.cuda)' \
 && python3 -c 'import sglang.srt.entrypoints.http_server'
COPY kernels/longleaf_kernels /opt/longleaf/longleaf_kernels
COPY --from=kernels /src/kernels/longleaf_kernels/lib /opt/longleaf/longleaf_kernels/lib
# The user has no entry in /etc/passwd: SGLang names a cache after it, and makes one in its home (the chart's: /cache).
ENV PYTHONPATH=/opt/longleaf \
    PYTHONUNBUFFERED=1 \
    USER=longleaf \
    HOME=/tmp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# The build fails where the plugin's patches would not fit: another SGLang, or a file of it that differs.
RUN python3 -c 'from longleaf.engine import guard; guard.check_versions(); guard.check_sources(); guard.check_plugin_installed(); guard.check_kernels()'
USER 10001:10001
WORKDIR /tmp
EXPOSE 30000
# The launcher passes it on: running streams end, then the ranks.
STOPSIGNAL SIGTERM
ENTRYPOINT ["longleaf"]
CMD ["engine", "--help"]
