# The node and the command `holdfast`. Build: docker build -t holdfast .
FROM python:3.12-slim AS build
WORKDIR /src
# Exactly the packages of the lock files, checked by hash (`make lock`). First, so that a change of our code builds fast.
COPY requirements requirements
RUN python -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt \
    && /opt/build/bin/pip wheel --no-cache-dir --require-hashes --no-build-isolation -r requirements/image.txt --wheel-dir /wheels
COPY . .
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m venv /opt/holdfast && /opt/holdfast/bin/pip install --no-cache-dir --no-index --no-deps /wheels/*.whl

FROM python:3.12-slim
COPY --from=build /opt/holdfast /opt/holdfast
ENV PATH=/opt/holdfast/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOLDFAST_DATA=/data \
    HOLDFAST_INGRESS=0.0.0.0:8080 \
    HOLDFAST_ADMIN=0.0.0.0:9070 \
    HOLDFAST_PEER=0.0.0.0:5122 \
    HOLDFAST_AUTH=tokens
# A fixed id, so that volumes and pod security contexts can name it.
RUN groupadd --gid 10001 holdfast && useradd --uid 10001 --gid holdfast --no-create-home holdfast \
    && mkdir /data /run/holdfast /run/prometheus && chown holdfast:holdfast /data /run/holdfast /run/prometheus \
    && chmod 700 /data /run/holdfast
USER 10001:10001
VOLUME /data
# ingress, admin, peers
EXPOSE 8080 9070 5122
# SIGTERM hands leaderships over, then ends; give it time before SIGKILL.
STOPSIGNAL SIGTERM
# To itself, whose certificate need not name 127.0.0.1.
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import os, ssl, urllib.request as web; tls = 'HOLDFAST_INGRESS_TLS_CERT' in os.environ; web.urlopen(('https' if tls else 'http') + '://127.0.0.1:8080/holdfast/health', timeout=2, context=ssl._create_unverified_context() if tls else None)"]
ENTRYPOINT ["holdfast"]
CMD ["serve"]
