# SPDX-License-Identifier: Apache-2.0
"""Settings of the gateway, read from environment variables ``POC_GATEWAY_<NAME>``."""

import json
import re
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from poc_operator.credentials import secrets_of
from vllm_poc.logs import LogFormat

Probability = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


#: Which requests have a line in the log: none, those answered with a status from 400 on, or all. Not "off": YAML takes
#: that for false.
AccessLogMode = Literal["none", "errors", "all"]


def _variable(field: str) -> str:
    return f"POC_GATEWAY_{field.upper()}"


def _split_commas(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _split_secrets(value: object) -> object:
    return secrets_of(value) if isinstance(value, str) else value


#: Secrets that are good at the same time, so that each can be changed without a break.
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_split_secrets)]
_GUARDS = ("token", "operator_token", "callback_key", "network_token")


#: Set to nothing is not set: templates cannot leave a variable out as easily.
_OPTIONAL = BeforeValidator(lambda value: None if value == "" else value)


def _written(pattern: str, what: str) -> AfterValidator:
    """Return the check that a text, if there is one, is written like ``pattern``."""

    def check(value: str | None) -> str | None:
        if value is not None and not re.fullmatch(pattern, value):
            raise ValueError(f"must be {what}")
        return value

    return AfterValidator(check)


_BucketName = Annotated[
    str | None, _written(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "the name of a bucket alone, without s3://"), _OPTIONAL
]
_KeyPrefix = Annotated[
    str, _written(r"[A-Za-z0-9!_.*'()/-]{0,500}", "folders of letters, digits and !_.*'()-, such as poc/results")
]
_Endpoint = Annotated[str | None, _written(r"https?://[^/?#@\s]+/?", "http://HOST:PORT or https://HOST"), _OPTIONAL]
_Region = Annotated[str, _written(r"[A-Za-z0-9-]+", "a region such as eu-central-1")]


def _parse_json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f'must be JSON, such as {{"*": {{"dist_threshold": 0.4}}}}: {error}') from None


class StatTestDefaults(BaseModel):
    """Thresholds of the fraud test; what is left out is the network's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dist_threshold: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    p_mismatch: Probability = 0.0
    fraud_threshold: Probability = 0.0


class Settings(BaseModel):
    """Addresses, limits and times; the defaults suit one gateway beside one operator."""

    model_config = ConfigDict(frozen=True, alias_generator=_variable, extra="ignore")

    #: SQLAlchemy URL: sqlite:////PATH, or postgresql://USER:PASSWORD@HOST/NAME.
    database: SecretStr = SecretStr("sqlite:////var/lib/poc-gateway/gateway.db")
    #: Where pods, the operator and people talk to the gateway.
    port: int = Field(default=8080, ge=1, le=65535)
    metrics_port: int = Field(default=8081, ge=1, le=65535)
    #: Where the network's node talks to it: another port, so that it alone can be exposed.
    network_port: int = Field(default=8082, ge=1, le=65535)
    #: Guards what people read and replay. This one and the next two are set together: without them all is open.
    token: Secrets = ()
    #: Guards what the operator asks.
    operator_token: Secrets = ()
    #: What the operator signs the credentials of pods with, which guard what they deliver.
    callback_key: Secrets = ()
    #: Sent to the pods, for those that ask for a token.
    pod_token: SecretStr | None = Field(default=None, min_length=1)
    #: Guards the routes of those ML nodes that have no token of their own.
    network_token: Secrets = ()
    #: YAML or JSON file that lists the ML nodes; without one the network's routes answer 503.
    ml_nodes: Path | None = None
    #: Pages that may be watched at the same time.
    viewers: int = Field(default=32, ge=1)
    #: Namespaces whose fleets and rounds the page shows; without any, those of all.
    watch_namespaces: Annotated[tuple[str, ...], BeforeValidator(_split_commas)] = ()
    #: Certificate chain and key of the network's port, as PEM files that are read anew when they change; else no TLS.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    #: JSON, by model or a pattern with ``*``: thresholds of the fraud test for requests that do not have them.
    stat_tests: Annotated[Mapping[str, StatTestDefaults], BeforeValidator(_parse_json)] = {}
    #: Whether the chain's ``p_value_threshold`` counts. The reference ignores it, and judges by 0.01.
    p_value_threshold: Literal["ignore", "apply"] = "ignore"
    log_format: LogFormat = "json"
    access_log: AccessLogMode = "errors"
    #: Hosts that results may be forwarded to, as patterns with ``*``.
    receiver_allow: Annotated[tuple[str, ...], BeforeValidator(_split_commas)] = Field(default=("*",), min_length=1)
    #: Ranges of addresses that are not public, and that results may be forwarded to nevertheless.
    receiver_private: Annotated[tuple[IPv4Network | IPv6Network, ...], BeforeValidator(_split_commas)] = ()
    #: Artifacts of one forwarded payload.
    payload_artifacts: int = Field(default=1_000, ge=1)
    #: One forwarded payload may take this long.
    forward_seconds: Seconds = 30.0
    #: Pause after a receiver failed; doubles up to the limit below, and varies by half. No receiver gets a longer one,
    #: whatever its Retry-After asks for.
    retry_first_seconds: Seconds = 1.0
    retry_limit_seconds: Seconds = 60.0
    #: A result that its receiver has not accepted so long after the last delivery of its round expires, and is sent no
    #: more: the default is an epoch of the network. 0 to try for ever.
    delivery_seconds: int = Field(default=86_400, ge=0)
    #: Largest request body of the inside's port: pods choose how much they deliver at once.
    body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    #: And of the network's: its largest is a validation, of which an artifact takes about 80 bytes.
    network_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    #: A connection is closed that has not sent a request's header so long after it was made, or had begun to.
    header_seconds: Seconds = 10.0
    #: A request whose body takes longer to arrive is refused.
    body_seconds: Seconds = 60.0
    #: Connections of one peer; others are closed.
    peer_connections: int = Field(default=1_000, ge=1)
    #: Requests of one peer in a second, on average; four seconds' worth may come at once.
    peer_requests: float = Field(default=1_000.0, gt=0, allow_inf_nan=False)
    #: So much of a SQLite database's disk is kept for forwarding and deleting when the rest is full; 0 for none.
    reserve_bytes: int = Field(default=64 * 1024 * 1024, ge=0)
    #: No round may have more results; 0 for no limit. The largest rounds of a day have 20 million.
    round_results: int = Field(default=50_000_000, ge=0)
    #: Nor may it take more of the volume of a SQLite database, in percent; 0 for no limit.
    round_volume_percent: int = Field(default=50, ge=0, le=100)
    #: Rounds that are older and wholly forwarded are deleted; 0 to keep them.
    retention_seconds: int = Field(default=30 * 86_400, ge=0)
    #: The oldest wholly forwarded rounds are deleted while the database is larger; 0 for no limit.
    retention_bytes: int = Field(default=0, ge=0)
    #: The S3 bucket that rounds which have ended are written to; without one there is no archive.
    archive_bucket: _BucketName = None
    #: The keys in the bucket begin with it.
    archive_prefix: _KeyPrefix = ""
    #: Of a server that is not AWS.
    archive_endpoint: _Endpoint = None
    archive_region: _Region = "us-east-1"
    #: Both, or neither: then the AWS SDK looks for credentials by itself.
    archive_access_key: Annotated[SecretStr | None, _OPTIONAL] = None
    archive_secret_key: Annotated[SecretStr | None, _OPTIONAL] = None
    #: A round is archived when everything of it has ended, and nothing has arrived for so long.
    archive_after_seconds: int = Field(default=3_600, ge=1)

    @model_validator(mode="after")
    def _secrets_fit_together(self) -> Self:
        inside = [name for name in _GUARDS[:3] if getattr(self, name)]
        if inside and len(inside) < len(_GUARDS[:3]):
            missing = ", ".join(_variable(name) for name in _GUARDS[:3] if name not in inside)
            raise ValueError(f"{_variable(inside[0])} is set without {missing}: set all of them, or none")
        used = dict[str, str]()
        for name in _GUARDS:
            for secret in getattr(self, name):
                other = used.setdefault(secret.get_secret_value(), name)
                if other != name:
                    raise ValueError(f"{_variable(other)} and {_variable(name)} share a secret: give each its own")
        return self

    @model_validator(mode="after")
    def _both_of_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("set POC_GATEWAY_TLS_CERT and POC_GATEWAY_TLS_KEY, or neither")
        return self

    @model_validator(mode="after")
    def _archive_is_whole(self) -> Self:
        if (self.archive_access_key is None) != (self.archive_secret_key is None):
            raise ValueError("set POC_GATEWAY_ARCHIVE_ACCESS_KEY and POC_GATEWAY_ARCHIVE_SECRET_KEY, or neither")
        return self

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the variables that are set; pydantic.ValidationError names the variable that is wrong."""
        return cls.model_validate(dict(environment))
