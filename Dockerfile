# The service and its jobs, from the two wheels that `make dist` builds. With SQLite, in a volume, and with a token
# (docs/access.md):
#   make dist && docker build -t lastbit .
#   docker run --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
#     --stop-timeout 45 -p 127.0.0.1:8000:8000 -v lastbit:/data -e LASTBIT_TOKENS="me admin sha256:…" lastbit
# With MariaDB: see compose.yaml. With a base that nobody can move, see docs/supply-chain.md.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /build
COPY constraints/server.txt ./
# Wheels alone, of known hashes: no package's own code runs here, and no compiler is needed.
RUN python -m venv --without-pip /venv && \
    pip --python /venv/bin/python install --no-cache-dir --require-hashes --only-binary :all: -r server.txt
COPY dist/*.whl ./
# All that the service needs is installed by now; only the client needs httpx. Nothing can be written there later, so they
# are compiled now; the hash instead of the time makes the same bytes of the same source.
RUN pip --python /venv/bin/python install --no-cache-dir --no-index --no-deps --no-compile *.whl && \
    /venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /venv/lib/python3*/site-packages/lastbit*

FROM ${BASE}
LABEL org.opencontainers.image.title="lastbit" \
    org.opencontainers.image.description="Knows exactly when a fanned-out batch of work is finished" \
    org.opencontainers.image.version="1.0.0" \
    org.opencontainers.image.licenses="Apache-2.0 AND LGPL-3.0-only"
# One user, who owns the data alone; and no pip, nor what could bring it back.
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /data --shell /usr/sbin/nologin lastbit && \
    install -d -o lastbit -g lastbit -m 700 /data && \
    rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/* /usr/local/lib/python3*/ensurepip
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    LASTBIT_HOST=0.0.0.0 LASTBIT_PORT=8000 LASTBIT_DATABASE_URL=sqlite:////data/lastbit.db
USER 10001
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"LASTBIT_PORT\"]}/readyz', timeout=4)"]
CMD ["lastbit-server"]
