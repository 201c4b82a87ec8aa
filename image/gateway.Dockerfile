# SPDX-License-Identifier: Apache-2.0
# The gateway: any base image with Python 3.11 and glibc, plus this project and what it needs, from the lock file.
#   docker build -f image/gateway.Dockerfile --build-arg BASE_IMAGE=<Python 3.11 image> "$(python3 -m hack.images site gateway)"
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
COPY . /opt/vllm-poc-gateway
ENV PYTHONPATH=/opt/vllm-poc-gateway PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["python3", "-m", "poc_gateway"]
