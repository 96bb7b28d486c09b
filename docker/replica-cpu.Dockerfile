# vLLM's own CPU image with this project's wheel in it, whose `gloo` backend lets weights travel
# without GPUs. GPU replicas need no image of ours: vLLM brings its own backends.
#
#     docker build --file docker/replica-cpu.Dockerfile --tag REGISTRY/vllm-fleet-replica-cpu:0.32.0-0.1.0 .
#
# The wheel is pure Python and needs only what vLLM has, so it is unpacked into vLLM's environment:
# that works whether the image has pip, uv or neither.
ARG PYTHON=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
ARG VLLM=docker.io/vllm/vllm-openai-cpu:v0.32.0

FROM ${PYTHON} AS build
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY docker/build-constraints.txt docker/
COPY fleet fleet
COPY gateway gateway
RUN PIP_CONSTRAINT=docker/build-constraints.txt python -m pip wheel --no-deps --wheel-dir /wheels .

FROM ${VLLM}
COPY --from=build /wheels /wheels
RUN python3 -m zipfile -e /wheels/*.whl "$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    && python3 -c 'from importlib.metadata import entry_points as e; assert "fleet_gloo" in e(group="vllm.general_plugins").names'
