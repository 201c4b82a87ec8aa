# SPDX-License-Identifier: Apache-2.0
"""Certificates for servers of tests."""

import subprocess
from pathlib import Path


def issue(folder: Path, name: str) -> None:
    """Write a certificate of this name, and its key, as a mounted Secret has them."""
    subject = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", folder / "tls.key", "-out", folder / "tls.crt")
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    subprocess.run(["openssl", "req", *kind, *subject, *files], check=True, capture_output=True)


def settings_of(folder: Path) -> dict[str, str]:
    """Return the gateway's settings for the certificate in this folder."""
    return {"POC_GATEWAY_TLS_CERT": str(folder / "tls.crt"), "POC_GATEWAY_TLS_KEY": str(folder / "tls.key")}
