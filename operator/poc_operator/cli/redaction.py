# SPDX-License-Identifier: Apache-2.0
"""Takes secrets out of objects and texts, so that they may leave the cluster.

What may stay is listed; everything else goes. Of environment variables, flags and annotations only the values of known
names stay. Other texts lose what is known to be secret, and what looks like it.
"""

import base64
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from poc_operator.fleets.history import RECORD

REDACTED = "REDACTED"

#: Flags whose values are no secrets: of vLLM, of the operator and of programs in general.
# fmt: off
_FLAGS = frozenset((
    "attention-backend", "block-size", "data-parallel-size", "disable-log-requests",
    "distributed-executor-backend", "dtype", "enable-poc", "enforce-eager", "gpu-memory-utilization",
    "gateway-url", "health-port", "host", "identity", "kv-cache-dtype", "lease-namespace", "load-format",
    "log-format", "max-cudagraph-capture-size", "max-model-len", "max-nonces-per-second",
    "max-num-batched-tokens", "max-num-seqs", "metrics-port", "middleware", "model", "moe-backend", "namespace",
    "pipeline-parallel-size", "pod-lease-seconds", "pod-token-secret", "port", "quantization", "reasoning-parser",
    "revision", "scheduling-policy", "served-model-name", "shutdown-timeout", "tensor-parallel-size", "tokenizer",
    "tool-call-parser", "trust-remote-code", "worker-extension-cls", "worker-image",
))
# fmt: on
#: Words of a command line that are no flags and no secrets.
_PROGRAMS = frozenset({"vllm", "serve", "python", "python3", "-m", "poc_operator", "poc_gateway"})
#: Variables of ours whose values are settings, and what those have in their names that are none.
_SETTINGS = re.compile(r"(?:POC_GATEWAY|VLLM_POC)_[A-Z_]+")
_SECRET_NAME = re.compile(r"token|secret|password|passwd|credential|key|auth|database|dsn", re.IGNORECASE)
_ANNOTATIONS = ("poc.gonka.ai/", "deployment.kubernetes.io/", "meta.helm.sh/", "helm.sh/")
_DROPPED = frozenset({"managedFields"})
#: Fields of our kinds that everybody may know, though they look like secrets.
_PUBLIC = frozenset({"blockHash", "publicKey", "uid", "digest", "image", "imageID", "containerID", "resourceVersion"})

_PATTERNS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),
    re.compile(r"(?i)(?<=bearer )\S+|(?<=basic )[A-Za-z0-9+/=]{6,}"),
    re.compile(
        r"(?i)(?<![A-Za-z])[A-Z_-]*(?:token|secret|password|passwd|credential|api[-_]?key|access[-_]?key|authorization)"
        r"[A-Z_-]*[\"']?\s*[:=]\s*[\"']?(?P<value>[^\s\"',;&}]+)"
    ),
    re.compile(r"\b(?:hf|ghp|gho|ghs|glpat|xox[bap]|sk|pk|rk)[-_][A-Za-z0-9_-]{8,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"),
    re.compile(r"\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"),
)
_WORD = re.compile(r"(?<![A-Za-z0-9:])[A-Za-z0-9+/_=-]{16,}")
_HEX = re.compile(r"[0-9A-Fa-f]{24,}")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LONGEST_PART, _LEAST_KNOWN = 14, 5


class Redactor:
    """Takes secrets out. ``secrets`` are values known to be secret, ``public`` words that everybody may see."""

    def __init__(self, secrets: Iterable[str] = (), public: Collection[str] = ()) -> None:
        forms = {form for value in secrets for form in _forms(value)}
        self._secrets = sorted((form for form in forms if len(form) >= _LEAST_KNOWN), key=lambda form: -len(form))
        self._public = frozenset(public)

    def text(self, text: str) -> str:
        """Return a text without what is secret, or looks like it."""
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        for pattern in _PATTERNS:
            text = pattern.sub(_without_value, text)
        return _WORD.sub(self._word, text)

    def _word(self, match: re.Match[str]) -> str:
        word = match[0]
        return REDACTED if word not in self._public and looks_secret(word) else word

    def body(self, body: Any, field: str = "") -> Any:  # noqa: ANN401 - JSON
        """Return JSON of the API server without secrets."""
        if isinstance(body, Mapping):
            return {key: self._field(key, value) for key, value in body.items() if key not in _DROPPED}
        if isinstance(body, list):
            return [self.body(value) for value in body]
        if isinstance(body, str):
            return body if field in _PUBLIC else self.text(body)
        return body

    def _field(self, key: str, value: Any) -> Any:  # noqa: ANN401 - JSON
        if key == "annotations" and isinstance(value, Mapping):
            return {name: self._annotation(name, text) for name, text in value.items()}
        if key == "env" and isinstance(value, list):
            return [self._variable(one) for one in value]
        if key in ("args", "command", "engineArgs") and isinstance(value, list):
            return self.arguments([str(one) for one in value])
        if key in ("data", "stringData", "binaryData") and isinstance(value, Mapping):
            return dict.fromkeys(value, REDACTED)
        return self.body(value, key)

    def _annotation(self, name: str, text: str) -> str:
        # A record of a spec has its variables and flags as text, where they are not told apart.
        return self.text(str(text)) if name.startswith(_ANNOTATIONS) and name != RECORD else REDACTED

    def _variable(self, variable: Mapping[str, Any]) -> Mapping[str, Any]:
        name = str(variable.get("name", ""))
        if "value" not in variable:
            return dict(variable)
        setting = _SETTINGS.fullmatch(name) is not None and _SECRET_NAME.search(name) is None
        return {**variable, "value": self.text(str(variable["value"])) if setting else REDACTED}

    def arguments(self, arguments: Sequence[str]) -> list[str]:
        """Return a command line with the values of known flags, and with numbers."""
        kept, flag = list[str](), ""
        for argument in arguments:
            if argument.startswith("--"):
                flag, equals, value = argument.removeprefix("--").partition("=")
                kept.append(f"--{flag}={self._value(flag, value)}" if equals else argument)
                flag = "" if equals else flag
            else:
                kept.append(argument if argument in _PROGRAMS else self._value(flag, argument))
                flag = ""
        return kept

    def _value(self, flag: str, value: str) -> str:
        if flag in _FLAGS:
            return self.text(value)
        number = re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,9})?|true|false", value) is not None
        return value if number and _SECRET_NAME.search(flag) is None and flag else REDACTED


def _without_value(match: re.Match[str]) -> str:
    value = match.groupdict().get("value")
    return match[0].removesuffix(value) + REDACTED if value else REDACTED


def _forms(value: str) -> Iterable[str]:
    """Return a secret as it may stand in texts: as it is, without line breaks around it, and as base64."""
    yield value
    yield value.strip()
    yield base64.b64encode(value.encode()).decode()
    yield base64.b64encode(value.strip().encode()).decode()


def looks_secret(word: str) -> bool:
    """Whether a word looks made at random: long hexadecimal, or long with capitals, small letters and digits.

    Names of models have these too, in short parts.
    """
    if _UUID.fullmatch(word):
        return False
    if _HEX.search(word):
        return True
    longest = max(re.split(r"[-/_=+]", word), key=len)
    mixed = all(re.search(kind, word) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    return mixed and len(longest) > _LONGEST_PART


def variable_values(pod_spec: Mapping[str, Any]) -> list[str]:
    """Return the values of variables that are no settings of ours: they may be secrets, and stand elsewhere too."""
    boxes = [*(pod_spec.get("containers") or []), *(pod_spec.get("initContainers") or [])]
    variables = [one for box in boxes for one in box.get("env") or []]
    return [str(one["value"]) for one in variables if one.get("value") and _SECRET_NAME.search(str(one.get("name")))]
