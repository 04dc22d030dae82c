# docker build -t diptych:0.1.0 .   or   buildah bud -t diptych:0.1.0 .
# Any base with Python 3.11 and its venv module works. The container runs as user 1000 and may have a read-only root: it
# writes to /tmp, /cache and /dev/shm only.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# Package indexes other than pip's default. Used in this stage only; the image does not contain them.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH=torch==2.13.0
ARG EXTRAS=http
# nixl or nixl-cu13. Empty: the one built for the CUDA of the torch installed below.
ARG NIXL_EXTRA=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# torch first, so that packages that depend on it keep the chosen build.
RUN python3 -m venv /opt/diptych && /opt/diptych/bin/pip install -c constraints.txt "${TORCH}"
# Dependencies before the source: a change of the source then rebuilds in seconds.
COPY pyproject.toml README.md LICENSE ./
COPY kvtransfer/backends/nixl_build.py /tmp/
RUN nixl="${NIXL_EXTRA:-$(/opt/diptych/bin/python -P /tmp/nixl_build.py)}" \
    && /opt/diptych/bin/pip install -c constraints.txt ".[${EXTRAS},${nixl}]"
COPY proto proto
COPY kvtransfer kvtransfer
COPY workers workers
COPY cluster cluster
RUN /opt/diptych/bin/pip install --no-deps --force-reinstall .

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="Diptych" \
      org.opencontainers.image.description="Disaggregated prefill and decode serving of large language models on Ray" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# g++ compiles the kernels for the host's CPU, and Triton's launchers, at the first start. The distribution picks its version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --user-group --no-create-home --home-dir /tmp diptych \
    && install -d -o diptych -g diptych /cache /models
COPY --from=build /opt/diptych /opt/diptych
ENV PATH=/opt/diptych/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=diptych \
    DIPTYCH_CACHE=/cache \
    HF_HOME=/cache/huggingface \
    RAY_USAGE_STATS_ENABLED=0
USER 1000
WORKDIR /tmp
EXPOSE 50051 8000
ENTRYPOINT ["diptych"]
CMD ["--help"]
