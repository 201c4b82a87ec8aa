# SPDX-License-Identifier: Apache-2.0
"""Certificates for servers of tests."""

import subprocess
from pathlib import Path


def issue(folder: Path, name: str, *, days: int = 2) -> None:
    """Write a certificate of this name that is valid for so many days, and its key, as a mounted Secret has them."""
    subject = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", folder / "tls.key", "-out", folder / "tls.crt")
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", str(days))
    subprocess.run(["openssl", "req", *kind, *subject, *files], check=True, capture_output=True)


def settings_of(folder: Path) -> dict[str, str]:
    """Return the gateway's settings for the certificate in this folder."""
    return {"POC_GATEWAY_TLS_CERT": str(folder / "tls.crt"), "POC_GATEWAY_TLS_KEY": str(folder / "tls.key")}


#: What ``openssl ca`` needs beside its options: it alone lets a certificate have ended.
_AUTHORITY = """
[ca]
default_ca = own
[own]
database = {folder}/index
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = names
x509_extensions = extensions
[names]
commonName = supplied
[extensions]
subjectAltName = IP:127.0.0.1
"""


def issue_expired(folder: Path, name: str) -> None:
    """Write a certificate of this name that has expired, and its key."""
    (folder / "index").touch()
    (folder / "authority").write_text(_AUTHORITY.format(folder=folder))
    key, request = folder / "tls.key", folder / "request"
    kind = ("-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}")
    ask = ("req", *kind, "-keyout", key, "-out", request)
    files = ("-config", folder / "authority", "-keyfile", key, "-in", request, "-out", folder / "tls.crt", "-notext")
    sign = ("ca", "-batch", "-selfsign", *files, "-startdate", "20200101000000Z", "-enddate", "20200102000000Z")
    for words in (ask, sign):
        subprocess.run(["openssl", *words], check=True, capture_output=True)
