# The service and its jobs. With SQLite, in a volume, and with a token (docs/access.md):
#   docker build -t lastbit .
#   docker run -p 127.0.0.1:8000:8000 -v lastbit:/data -e LASTBIT_TOKENS="me admin sha256:…" lastbit
# With MariaDB: see compose.yaml.
FROM python:3.11-slim AS build
WORKDIR /build
COPY constraints.txt ./
COPY requirements/server.txt requirements/
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir -c constraints.txt -r requirements/server.txt

FROM python:3.11-slim
RUN useradd --system --uid 10001 --create-home --home-dir /data lastbit
WORKDIR /app
COPY --from=build /venv /venv
COPY LICENSE ./
COPY lastbit lastbit
COPY core core
COPY senders senders
COPY migrations migrations
COPY jobs jobs
COPY api api
ENV PATH=/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    LASTBIT_HOST=0.0.0.0 LASTBIT_PORT=8000 LASTBIT_DATABASE_URL=sqlite:////data/lastbit.db
USER 10001
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"LASTBIT_PORT\"]}/readyz', timeout=4)"]
CMD ["python", "-m", "api"]
