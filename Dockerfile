# The gateway, and nothing else: no torch, no vLLM, no compiler, no pip.
#
#     docker build --tag REGISTRY/vllm-fleet-gateway:0.1.0 .
#
# It runs as user 10001 and writes nothing outside /tmp, so the root filesystem may be read-only.
# Packages come from PyPI, or from an index of your own: --build-arg PIP_INDEX_URL=URL.
# tests/chart/test_dockerfile.py carries out these instructions, step by step, without Docker.
ARG PYTHON=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${PYTHON} AS build
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY docker/build-constraints.txt docker/
COPY fleet fleet
COPY gateway gateway
# Pins hold for what builds the wheel (first) and for what it needs to run (second).
RUN PIP_CONSTRAINT=docker/build-constraints.txt python -m pip wheel --no-deps --wheel-dir /wheels .
RUN python -m venv --without-pip /opt/fleet \
    && python -m pip --python /opt/fleet/bin/python install \
        --only-binary=:all: --constraint constraints.txt /wheels/*.whl

FROM ${PYTHON}
LABEL org.opencontainers.image.title="vllm-fleet-gateway" \
      org.opencontainers.image.description="One URL for a fleet of vLLM servers in RL training" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN python -m pip uninstall --yes --quiet setuptools wheel pip
COPY --from=build /opt/fleet /opt/fleet
ENV PATH=/opt/fleet/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=6 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('FLEET_PORT', '8000') + '/livez', timeout=4)"]
ENTRYPOINT ["fleet"]
CMD ["serve"]
