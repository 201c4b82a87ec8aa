#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Resolve all dependencies anew and write the lock files. They name versions and hashes, but no index,
# so that every installer and every mirror can use them.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$(python3 -m hack.uv path)
lock() {
    "$uv" pip compile --quiet --upgrade --generate-hashes --no-emit-index-url --universal --python-version 3.11 \
        --custom-compile-command "make lock" "$@"
}
lock pyproject.toml --extra operator --output-file locks/operator.txt
lock pyproject.toml --extra gateway --output-file locks/gateway.txt
lock pyproject.toml --extra cli --output-file locks/cli.txt
lock pyproject.toml --extra cli --extra operator --extra gateway --extra dev --extra docs --override locks/overrides.txt \
    --output-file locks/dev.txt
python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' |
    lock - --output-file locks/build.txt
lock hack/release/tools.in --output-file locks/release.txt
for version in $(python3 -m hack.vllm versions); do
    python3 -m hack.vllm lock --version "$version"
done
