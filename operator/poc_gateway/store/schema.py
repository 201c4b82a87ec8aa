# SPDX-License-Identifier: Apache-2.0
"""The tables. One schema for SQLite and PostgreSQL; ``migrations`` makes it.

Moments are integers, milliseconds since 1970. A vector is kept as its fp16 little-endian bytes, and so is, in the same
column, a chain of the decode scheme as one byte per step: which of the two, the round says.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    false,
)
from sqlalchemy import UniqueConstraint as Unique

metadata = MetaData()

#: Of a vector.
BYTES_PER_NUMBER = 2

_ID = BigInteger().with_variant(Integer(), "sqlite")  # only an INTEGER key counts itself there


def _round_key(*, nullable: bool = False, primary_key: bool = False) -> Column[int]:
    of_round = ForeignKey("rounds.id", ondelete="CASCADE")
    return Column("round_id", _ID, of_round, nullable=nullable, primary_key=primary_key)


def _slot_key() -> Column[int]:
    return Column("slot_id", _ID, ForeignKey("slots.id", ondelete="CASCADE"), primary_key=True)


#: The rounds that pods have delivered for, as their PoCRounds described them.
rounds = Table(
    "rounds",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("uid", Text, nullable=False, unique=True),
    Column("namespace", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("block_hash", Text, nullable=False),
    Column("block_height", BigInteger, nullable=False),
    Column("public_key", Text, nullable=False),
    Column("protocol", Text, nullable=False),
    Column("k_dim", Integer),  # of the artifact protocol
    Column("r_target", Double),  # of the distance protocol
    Column("max_tokens", Integer),  # of the decode scheme
    Column("model", Text, nullable=False),
    Column("seq_len", Integer, nullable=False),
    Column("node_count", Integer, nullable=False),
    Column("n_groups", Integer, nullable=False),
    Column("receiver", Text),  # where results are forwarded to; null to keep them here
    Column("receiver_secret", Text),  # name of the Secret with its user and password; null if it asks for none
    Column("created_at", BigInteger, nullable=False),
    Column("deleted_at", BigInteger),  # when its deletion began; the row goes last
    # What its last complete archive has, as `poc_gateway.store.retention.content_version`, and when it was complete;
    # since when another is being written; why the last try failed.
    Column("archived_version", BigInteger),
    Column("archived_at", BigInteger),
    Column("archiving_since", BigInteger),
    Column("archive_error", Text),
    Column("limit_reached", Text),  # the limit for which its last new results were refused; null if they were stored
    sqlite_autoincrement=True,  # an id is never given again, not even to what is on its way
)
#: Which rounds there are: one whose deletion has begun is gone for everybody but the retention.
ROUND_IS_KEPT = rounds.c.deleted_at.is_(None)

#: The slots of a round that this cluster serves. ``slot`` is the offset, the slot's first nonce.
#:
#: ``stored`` counts artifacts, ``last_nonce`` is the largest stored, ``missing_nonce`` the first that is not.
#: ``forwarded`` counts what the receiver has accepted; every artifact up to ``forwarded_nonce`` has been accepted by
#: it, or is in ``late_items`` or in a row of ``ended_ranges``. ``heard_at`` is the moment of the last delivery for the
#: slot, whatever it held. ``late`` counts the slot's rows in ``late_arrivals``: they are numbered by it.
slots = Table(
    "slots",
    metadata,
    Column("id", _ID, primary_key=True),
    _round_key(),
    Column("slot", Integer, nullable=False),
    Column("node_id", Integer, nullable=False),
    Column("group_id", Integer, nullable=False),
    Column("stored", BigInteger, nullable=False, server_default="0"),
    Column("last_nonce", BigInteger, nullable=False, server_default="-1"),
    Column("duplicates", BigInteger, nullable=False, server_default="0"),
    Column("conflicts", BigInteger, nullable=False, server_default="0"),
    Column("forwarded", BigInteger, nullable=False, server_default="0"),
    Column("forwarded_nonce", BigInteger, nullable=False, server_default="-1"),
    Column("missing_nonce", BigInteger, nullable=False, server_default="0"),
    Column("heard_at", BigInteger, nullable=False, server_default="0"),
    Column("late", BigInteger, nullable=False, server_default="0"),
    Unique("round_id", "slot"),
    sqlite_autoincrement=True,  # an id is never given again, not even to what is on its way
)

#: Pods that deliver for a slot, by the credential that the operator gave them; ``since`` is when the first delivery
#: came. ``refused`` counts deliveries that no pod of the slot may send, ``refusal`` says what was wrong with the last.
authors = Table(
    "authors",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("slot_id", _ID, ForeignKey("slots.id", ondelete="CASCADE"), nullable=False),
    Column("pod_uid", Text, nullable=False),
    Column("pod", Text, nullable=False),
    Column("refused", BigInteger, nullable=False, server_default="0"),
    Column("refusal", Text),
    Column("since", BigInteger, nullable=False),
    Unique("slot_id", "pod_uid"),
    sqlite_autoincrement=True,  # ids are kept in memory
)

#: What was computed for one nonce: a vector, a chain or a distance, as the round's protocol has it.
artifacts = Table(
    "artifacts",
    metadata,
    _slot_key(),
    Column("nonce", Integer, primary_key=True, autoincrement=False),
    Column("vector", LargeBinary),
    Column("distance", Double),
    Column("received_at", BigInteger, nullable=False),
    Column("author", BigInteger),  # of `authors`; null if the gateway asks for no credentials
    sqlite_with_rowid=False,
)

#: Other results that arrived for a nonce which is stored already: a sick or a cheating pod. The first ones of a slot,
#: and each author's first for a nonce; the slot's counter goes on. ``truth`` is a `poc_operator.observed.Truth` once a
#: pod, ``decided_by``, has computed the nonce.
conflicts = Table(
    "conflicts",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("slot_id", _ID, ForeignKey("slots.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("nonce", Integer, nullable=False),
    Column("vector", LargeBinary),
    Column("distance", Double),
    Column("received_at", BigInteger, nullable=False),
    Column("author", BigInteger),
    Column("truth", Text),
    Column("decided_by", Text),
    Column("decided_at", BigInteger),
    Index("ix_conflicts_nonce", "slot_id", "nonce"),
)

#: Artifacts that are not forwarded in the order of their nonces, each with a state of `poc_gateway.outbox.states`:
#: ``waiting`` if it is to be sent by itself, since it arrived late or is replayed, ``disputed`` if its honest result is
#: to be found first, else how it ended and why.
late_items = Table(
    "late_items",
    metadata,
    _slot_key(),
    Column("nonce", Integer, primary_key=True, autoincrement=False),
    Column("state", Text, nullable=False, index=True),
    Column("reason", Text, nullable=False),
    Column("since", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

#: Artifacts that arrived when a larger nonce of their slot was stored already, numbered from 1 in the order of their
#: arrival: who has read the slot up to a nonce finds here what came below it later. So do artifacts whose results were
#: ``replaced`` by a decision, whenever they had arrived.
late_arrivals = Table(
    "late_arrivals",
    metadata,
    _slot_key(),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("nonce", Integer, nullable=False),
    Column("replaced", Boolean, nullable=False, server_default=false()),
    sqlite_with_rowid=False,
)

#: Artifacts of a slot, from the first to the last nonce, that ended together before their turn: ``artifacts`` counts
#: them. Late items between these nonces are not among them.
ended_ranges = Table(
    "ended_ranges",
    metadata,
    _slot_key(),
    Column("first_nonce", Integer, primary_key=True, autoincrement=False),
    Column("last_nonce", Integer, nullable=False),
    Column("artifacts", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("since", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

#: Work that the network asked for by ``POST generate``: kept until its result expires, so that it outlives a restart.
jobs = Table(
    "jobs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("request", Text, nullable=False),  # JSON
    Column("state", Text, nullable=False),
    Column("result", Text),  # JSON
    Column("error", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("finished_at", BigInteger),
    Column("nonces", Integer, nullable=False, server_default="0"),  # how many it asks for
)

#: Callbacks that are not artifacts of a round: verdicts, and results of jobs. ``url`` is the whole address. The states
#: are those of `poc_gateway.outbox.states`; ``attempts`` counts posts that failed.
callbacks = Table(
    "callbacks",
    metadata,
    Column("id", _ID, primary_key=True),
    _round_key(nullable=True),
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE")),
    Column("url", Text),  # null to keep it here
    Column("body", Text, nullable=False),  # JSON
    Column("state", Text, nullable=False),
    Column("reason", Text),  # of its end, or of the last failure
    Column("created_at", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("next_try_at", BigInteger, nullable=False, server_default="0"),
    Column("ended_at", BigInteger),
    Index("ix_callbacks_due", "state", "url", "attempts", "next_try_at"),
    Index("ix_callbacks_round_id", "round_id"),
    Index("ix_callbacks_job_id", "job_id"),
)

#: Pauses after failures, so that a restart does not forget them. ``scope`` is what pauses: a receiver's address without
#: its query, or ``round:ID``.
backoffs = Table(
    "backoffs",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("failures", Integer, nullable=False),
    Column("retry_at", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
)

#: One row: the wall clock as it was last seen, and for how long it had run evenly by then, in milliseconds.
clock = Table(
    "clock",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("seen_at", BigInteger, nullable=False),
    Column("steady", BigInteger, nullable=False),
)

#: What is to be done with a round by the process that owns the database (`poc_gateway.outbox.commands`): ``kind`` says
#: what, ``body`` is JSON, ``done`` counts the items that were changed so far. It was given up if it has ended with an
#: ``error``, after so many ``failures``.
commands = Table(
    "commands",
    metadata,
    Column("id", _ID, primary_key=True),
    _round_key(),
    Column("kind", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("done", BigInteger, nullable=False, server_default="0"),
    Column("ended_at", BigInteger),
    Column("failures", Integer, nullable=False, server_default="0"),
    Column("error", Text),
    Index("ix_commands_ended_at", "ended_at"),
    Index("ix_commands_round_id", "round_id"),
    sqlite_autoincrement=True,  # who asked waits for the id
)

#: One row: ``epoch`` counts the processes that have owned the database. One that finds a larger number owns it no more.
#: ``given_up`` is 1 if the last one has ended in order, so that nothing of it is on its way.
fence = Table(
    "fence",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
    Column("given_up", Integer, nullable=False, server_default="1"),
)


#: Verdicts that were taken, so that each is passed on once: by round, author (0 if not known) and ``batch``, which
#: stands for the nonces they are about. ``digest`` is of the whole message.
verdicts = Table(
    "verdicts",
    metadata,
    _round_key(primary_key=True),
    Column("author", BigInteger, primary_key=True, autoincrement=False),
    Column("batch", Text, primary_key=True),
    Column("digest", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)


def one_line(text: str) -> str:
    """Return the text as one line of printable characters.

    PostgreSQL refuses NUL in a text, and no database takes half a surrogate pair; the log is one line per event.
    """
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.split())
