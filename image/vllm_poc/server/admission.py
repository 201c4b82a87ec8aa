# SPDX-License-Identifier: Apache-2.0
"""What is refused before work begins: strangers, deployments that PoC cannot run in, and what the model does not allow.

Each check of a request raises a RefusalError.
"""

import hmac
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from fnmatch import fnmatchcase
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from typing import Self
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from vllm_poc.logs import get_logger
from vllm_poc.rpc import ModelFacts, chain_nonces
from vllm_poc.server.clock import Clock
from vllm_poc.server.errors import RefusalError, field_refusal, refusal
from vllm_poc.settings import PREFIX, Settings, SettingsError, read_tokens
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.messages import ArtifactParams, CallbackRequest, Protocol, RoundRequest, Scheme

_log = get_logger(__name__)

#: Beginnings of headers by which proxies on this machine tell that somebody else asks, and browsers that a page does.
_FROM_ELSEWHERE = ("x-forwarded-", "x-real-ip", "forwarded", "via", "x-envoy-", "l5d-", "origin")
#: Seconds between two looks at a file with the token.
LOOK_SECONDS = 1.0
#: How many nonces a message names.
_NAMED = 5
#: And of artifacts without a chain: as many as the reference does.
_CLAIMS_NAMED = 8
#: Why a server that was not told otherwise does not offer the decode scheme.
_NO_DECODE = f"ask one that does, or start this one with {PREFIX}DECODE_CODEBOOK and {PREFIX}DECODE_RESERVE_BYTES"
# Options of vLLM that make several API servers or engines, with the values that do not.
_SEVERAL: Mapping[str, tuple[object, ...]] = {
    "api_server_count": (None, 1),
    "data_parallel_size": (None, 1),
    "data_parallel_size_local": (None, 1),
    "data_parallel_rank": (None,),
    "data_parallel_start_rank": (None,),
    "data_parallel_hybrid_lb": (None, False),
    "data_parallel_external_lb": (None, False),
    "data_parallel_multi_port_external_lb": (None, False),
}


class Answered(Enum):
    """Whom the PoC routes answer."""

    WITH_TOKEN = auto()
    WITH_API_KEY = auto()
    EVERYBODY = auto()
    THIS_MACHINE = auto()


_LOGGED: Mapping[Answered, str] = {
    Answered.WITH_TOKEN: "whoever sends the token of {token}",
    Answered.WITH_API_KEY: "whoever sends a key of vLLM's --api-key: set VLLM_POC_TOKEN to have another one for PoC",
    Answered.EVERYBODY: "everybody who reaches the port, as VLLM_POC_OPEN says: set VLLM_POC_TOKEN to close them",
    Answered.THIS_MACHINE: "this machine alone: set VLLM_POC_TOKEN, or VLLM_POC_OPEN=1, for others",
}
_REFUSED: Mapping[Answered, str] = {
    Answered.WITH_TOKEN: "send the token of {token} as 'Authorization: Bearer <token>'",
    Answered.WITH_API_KEY: "send a key of vLLM's --api-key as 'Authorization: Bearer <key>', or set VLLM_POC_TOKEN",
    Answered.THIS_MACHINE: (
        "this server has no token, and answers PoC requests of its own machine alone: set VLLM_POC_TOKEN_FILE or "
        "VLLM_POC_TOKEN, and send the token as 'Authorization: Bearer <token>', or a key of vLLM's --api-key. "
        "VLLM_POC_OPEN=1 answers everybody"
    ),
}


class TokenFile:
    """The tokens that a file has now. While it has none, the last ones count: a Secret may be away for a moment.

    It is read when somebody asks, and no more often than every `LOOK_SECONDS`. A volume of a Secret is changed by links
    that are swapped, so the path is followed anew each time.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._due = float("-inf")
        self._tokens: tuple[str, ...] = ()
        self._wrong = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens, each of which opens; none if the file never had one, so that nobody has it."""
        if self._clock.now() >= self._due:
            self._due = self._clock.now() + LOOK_SECONDS
            self._look()
        return self._tokens

    def _look(self) -> None:
        try:
            found = read_tokens(self._path)
        except SettingsError as error:
            if str(error) != self._wrong:
                self._wrong = str(error)
                stays = "the token that it had last counts on" if self._tokens else "nobody has one"
                _log.warning("%s Until then %s.", error, stays)
            return
        if self._tokens and found != self._tokens:
            _log.info("the token in %s has changed: requests need the new one from now on", self._path)
        elif self._wrong:
            _log.info("the token in %s can be read again", self._path)
        self._tokens, self._wrong = found, ""


@dataclass(frozen=True)
class Access:
    """Who may call the PoC routes, and where the results may go that he asks for.

    The first of these decides: PoC's own token, vLLM's API keys, whether the server is open, and otherwise the caller's
    address. Where no list of hosts is set, whoever has the token may name any: he runs the server. Callers of this
    machine may name it, for they reach it without the server, too.
    """

    answered: Answered
    keys: tuple[str, ...] = field(default=(), repr=False)
    uds: str | None = None
    callback_allow: tuple[str, ...] | None = None
    #: Those of vLLM's own routes, whoever the PoC routes answer.
    vllm_keys: tuple[str, ...] = field(default=(), repr=False)
    #: The variable by which PoC has its own token.
    token_variable: str = f"{PREFIX}TOKEN"

    @classmethod
    def decide(
        cls,
        settings: Settings,
        arguments: object,
        environment: Mapping[str, str],
        token_file: TokenFile | None = None,
    ) -> Self:
        """Return what the settings, vLLM's parsed ``arguments`` and vLLM's variables say.

        ``token_file`` is the one that the settings name. Before it has a token, nobody has it.
        """
        uds, allow = getattr(arguments, "uds", None), settings.callback_allow
        # As vLLM does for its own routes. The flag wins.
        given = getattr(arguments, "api_key", None) or [environment.get("VLLM_API_KEY", "")]
        keys = tuple(key for key in given if key)
        if settings.token is not None:
            return cls(Answered.WITH_TOKEN, (settings.token.get_secret_value(),), uds, allow, keys)
        if settings.token_file is not None:
            own = token_file.tokens if token_file is not None else ()
            return cls(Answered.WITH_TOKEN, own, uds, allow, keys, f"{PREFIX}TOKEN_FILE")
        if keys:
            return cls(Answered.WITH_API_KEY, keys, uds, allow, keys)
        answered = Answered.EVERYBODY if settings.open else Answered.THIS_MACHINE
        return cls(answered, (), uds, allow)

    def log(self) -> None:
        """Write down who is answered."""
        level = _log.warning if self.answered is Answered.EVERYBODY else _log.info
        level("the PoC routes answer %s", _LOGGED[self.answered].format(token=self.token_variable))

    def check(self, scope: Scope) -> None:
        """Refuse with 401 who may not call."""
        if self.answered is Answered.THIS_MACHINE:
            self._check_machine(scope, Headers(scope=scope))
        elif self.answered is not Answered.EVERYBODY and not self.knows(scope, self.keys):
            raise _unauthorized(_REFUSED[self.answered].format(token=self.token_variable))

    @staticmethod
    def knows(scope: Scope, keys: Iterable[str]) -> bool:
        """Whether a request brings one of the ``keys``."""
        scheme, _, sent = Headers(scope=scope).get("authorization", "").partition(" ")
        # All of them are compared, so that the time tells nothing.
        known = sum(hmac.compare_digest(sent.encode(), key.encode()) for key in keys)
        return scheme.lower() == "bearer" and bool(known)  # vLLM's own routes take the scheme in any case, too

    def allows_callback_to(self, host: str) -> bool:
        """Return whether results may go to ``host``."""
        if self.callback_allow is not None:
            return any(fnmatchcase(host.lower(), pattern.lower()) for pattern in self.callback_allow)
        if self.answered is Answered.THIS_MACHINE:
            return host.lower() == "localhost" or _is_loopback(host)
        return self.answered is Answered.WITH_TOKEN

    def _check_machine(self, scope: Scope, headers: Headers) -> None:
        detail = _REFUSED[self.answered]
        if not self._is_of_this_machine(scope):
            raise _unauthorized(detail)
        foreign = next((name for name in headers if name.lower().startswith(_FROM_ELSEWHERE)), None)
        if foreign is not None:
            raise _unauthorized(f"{detail}; the header {foreign} says that this request comes from elsewhere")

    def _is_of_this_machine(self, scope: Scope) -> bool:
        peer, server = scope.get("client"), scope.get("server")
        if peer:
            return _is_loopback(peer[0])
        # Connections to a Unix socket have no peer; those to a port may have lost theirs. uvicorn tells the socket's
        # path, and earlier releases nothing.
        return self.uds is not None and (server is None or tuple(server) == (self.uds, None))


def _unauthorized(detail: str) -> RefusalError:
    return refusal(HTTPStatus.UNAUTHORIZED, "Unauthorized", detail, {"WWW-Authenticate": "Bearer"})


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    # A server of both IP versions sees IPv4 mapped into IPv6.
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def deployment_refusal(arguments: object, environment: Mapping[str, str]) -> str | None:
    """Return one sentence that names the option and the remedy, or None; ``arguments`` are vLLM's, parsed."""
    culprits = [
        f"--{name.replace('_', '-')}"
        for name, harmless in _SEVERAL.items()
        if getattr(arguments, name, None) not in harmless
    ]
    if environment.get("VLLM_DP_SIZE", "1") != "1":
        culprits.append("VLLM_DP_SIZE")
    if not culprits:
        return None
    # Each API server would have a round of its own, and each engine would compute the same nonces.
    return f"PoC needs one API server with one engine: leave {culprits[0]} out, and start several pods instead."


def check_round(request: RoundRequest, facts: ModelFacts, served_names: frozenset[str]) -> None:
    """Refuse what the model does not allow: 409 for another model, 422 for a number beyond a limit."""
    if facts["refusal"] is not None:
        raise refusal(HTTPStatus.CONFLICT, "ModelUnsupported", facts["refusal"])
    decodes = request.protocol is Protocol.DECODE
    if decodes and (why := decode_refusal(facts)) is not None:
        message = f"asks for the decode scheme, which this server does not offer: {why}"
        raise field_refusal("params.decode", message, reason="SchemeNotOffered")
    _check_seq_len(request, facts)
    if decodes:
        _check_chains(request, facts)
    if request.params is not None:
        _check_params(request.params, facts, served_names)


def decode_refusal(facts: ModelFacts) -> str | None:
    """Return why this server does not offer the decode scheme; None if it does. Nothing else decides that."""
    return facts["decode"]["refusal"] if "decode" in facts else _NO_DECODE


def offered_schemes(facts: ModelFacts) -> list[Scheme]:
    """Return the schemes that a client may order."""
    decodes = facts["refusal"] is None and decode_refusal(facts) is None
    return [Scheme.PREFILL, Scheme.DECODE] if decodes else [Scheme.PREFILL]


def check_callback(request: CallbackRequest, access: Access) -> None:
    """Refuse a callback to a host that is not allowed with 422."""
    host = urlsplit(request.receiver or "").hostname
    if host is None or access.allows_callback_to(host):
        return
    if access.callback_allow is not None:
        remedy = f"VLLM_POC_CALLBACK_ALLOW allows {', '.join(access.callback_allow)}"
    else:
        remedy = "set VLLM_POC_CALLBACK_ALLOW to the hosts that may get results, or set VLLM_POC_TOKEN"
    name = "url" if request.url is not None else "callback_url"
    raise field_refusal(name, f"callbacks to {host} are not allowed: {remedy}")


def check_validation(request: GenerateRequest) -> None:
    """Refuse with 400 artifacts that are not of exactly the request's nonces, or lack what is compared."""
    if unclaimed := request.unclaimed():
        message = (
            f"must each have k_points_steps in the decode scheme: {_some(set(unclaimed), _CLAIMS_NAMED)} have none"
        )
        raise field_refusal("validation.artifacts", message, status=HTTPStatus.BAD_REQUEST)
    missing, foreign = request.unmatched()
    if missing or foreign:
        message = (
            "must have one artifact for each of nonces and no other: "
            f"{_some(missing)} missing, {_some(foreign)} not in nonces"
        )
        raise field_refusal("validation.artifacts", message, status=HTTPStatus.BAD_REQUEST)


def slice_limit(request: RoundRequest, facts: ModelFacts) -> int:
    """Return how many nonces a forward pass holds that is not tuned: at least 1."""
    if request.protocol is Protocol.DECODE:
        fitting = _most_chains(request, facts)  # they take each step together, so that more of them cost hardly more
        return fitting if request.most_chains is None else min(fitting, request.most_chains)
    return min(request.batch_size, most_nonces(request, facts))


def most_nonces(request: RoundRequest, facts: ModelFacts) -> int:
    """Return how many nonces one forward pass may hold: at least 1."""
    return max(1, min(facts["max_batch_nonces"], facts["max_batch_tokens"] // request.effective_seq_len))


def _most_chains(request: RoundRequest, facts: ModelFacts) -> int:
    return chain_nonces(facts["decode"], request.effective_seq_len + request.max_tokens) if "decode" in facts else 0


def _check_chains(request: RoundRequest, facts: ModelFacts) -> None:
    tokens, longest = request.effective_seq_len + request.max_tokens, facts["max_model_len"]
    if tokens > longest:
        message = f"{request.max_tokens} and seq_len exceed the server's max_model_len of {longest} together"
        raise field_refusal("params.max_tokens", message, reason="SequenceTooLong")
    if not _most_chains(request, facts):
        message = (
            f"a chain of {tokens} tokens does not fit into the server's memory for chains: take fewer, or start it "
            f"with more {PREFIX}DECODE_RESERVE_BYTES"
        )
        raise field_refusal("params.max_tokens", message, reason="SequenceTooLong")


def _check_seq_len(request: RoundRequest, facts: ModelFacts) -> None:
    field = "params.seq_len" if request.params is not None else "seq_len"
    limits = {"max_model_len": facts["max_model_len"], "max_batch_tokens": facts["max_batch_tokens"]}
    for limit, allowed in limits.items():
        if request.effective_seq_len > allowed:
            message = f"{request.effective_seq_len} exceeds the server's {limit} of {allowed}"
            raise field_refusal(field, message, reason="SequenceTooLong")


def _check_params(params: ArtifactParams, facts: ModelFacts, served_names: frozenset[str]) -> None:
    if params.model not in served_names:
        served = ", ".join(sorted(served_names))
        raise refusal(
            HTTPStatus.CONFLICT,
            "ModelMismatch",
            f"params.model: {params.model} was requested, but this server serves {served}",
        )
    if params.k_dim > facts["hidden_size"]:
        raise field_refusal("params.k_dim", f"{params.k_dim} exceeds the hidden size of {facts['hidden_size']}")


def _some(nonces: Set[int], most: int = _NAMED) -> str:
    if not nonces:
        return "none"
    named = ", ".join(str(nonce) for nonce in sorted(nonces)[:most])
    return f"{named} and {len(nonces) - most} more" if len(nonces) > most else named
