# SPDX-License-Identifier: Apache-2.0
# The operator: any base image with Python 3.11 and glibc, plus this project and what it needs, from the lock file.
#   docker build -f image/operator.Dockerfile --build-arg BASE_IMAGE=<Python 3.11 image> "$(python3 -m hack.images site operator)"
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
COPY . /opt/vllm-poc-operator
ENV PYTHONPATH=/opt/vllm-poc-operator PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# The operator's identity in logs; this user has no entry in the base's /etc/passwd.
ENV USER=vllm-poc-operator
USER 65532:65532
ENTRYPOINT ["python3", "-m", "poc_operator"]
