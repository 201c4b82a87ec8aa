# SPDX-License-Identifier: Apache-2.0
"""A gateway in use is copied, and a fresh one goes on from the copy, with the commands of the page on backups."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
from sqlalchemy import make_url, select, text

from hack.images.site import ROOT
from poc_gateway.store import schema
from poc_gateway.store.backup import MARGIN_BYTES, BackupError, back_up, restore
from poc_gateway.store.database import Database, FenceLost
from poc_gateway.store.fence import fence_of
from poc_gateway.store.reserve import cannot_shrink
from tests.simulation.gateway_process import GatewayProcess, gateway
from tests.support.builders.deliveries import JSON, a_round, artifacts, path, round_body
from tests.support.builders.forwarding import Post, Receiver, until
from tests.support.builders.stored import store
from tests.support.servers.postgres import PostgresServer

PAGE = ROOT / "docs" / "operate" / "backup.md"
BATCH, PAYLOAD = 20, 50
_PROGRAMS = max(Path("/usr/lib/postgresql").glob("*/bin"), default=Path("/usr/bin"))


def command_of_page(pattern: str) -> str:
    """The one command of the page that matches."""
    (found,) = re.findall(rf"^ *({pattern}.*)$", PAGE.read_text(), re.MULTILINE)
    return str(found)


def shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the page where the reader is."""
    folders = os.pathsep.join(str(ROOT / name) for name in ("operator", "image"))
    search = os.pathsep.join((str(Path(sys.executable).parent), str(_PROGRAMS), os.environ["PATH"]))
    environment = {**os.environ, "PYTHONPATH": folders, "PATH": search, **variables}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=100
    )


class Copies:
    """Copies and restores as the page says; a restored database is a new one."""

    def __init__(self, url: str, folder: Path, new_database: Callable[[], str]) -> None:
        self._url = url
        self._folder = folder
        self._new_database = new_database
        self._is_sqlite = make_url(url).get_backend_name() == "sqlite"

    def copy(self) -> None:
        if self._is_sqlite:
            self._run(command_of_page("python3 -m poc_gateway backup - >"), POC_GATEWAY_DATABASE=self._url)
        else:
            self._run(command_of_page("pg_dump "), DATABASE=self._url)

    def restored(self) -> str:
        """The URL of a database that has the copy."""
        if self._is_sqlite:
            url = f"sqlite:///{self._folder}/restored.db"
            self._run(command_of_page("python3 -m poc_gateway restore - "), POC_GATEWAY_DATABASE=url)
            return url
        url = self._new_database()
        self._run(command_of_page("pg_restore "), NEW_DATABASE=url)
        return url

    def _run(self, command: str, **variables: str) -> None:
        done = shell(command, self._folder, **variables)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


@pytest.fixture
def copies(database_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Copies:
    def new_database() -> str:
        server: PostgresServer = request.getfixturevalue("postgres_server")
        return server.new_database()

    return Copies(database_url, tmp_path, new_database)


class Pod:
    """Delivers batch after batch."""

    def __init__(self, running: GatewayProcess) -> None:
        self._url = running.url + path()
        self.acknowledged = set[int]()

    async def run(self) -> None:
        """Deliver until cancelled, or the gateway is gone."""
        async with httpx.AsyncClient(timeout=60) as client:
            with suppress(httpx.HTTPError):
                while True:
                    first = len(self.acknowledged)
                    batch = range(first, first + BATCH)
                    answer = await client.post(self._url, content=artifacts(batch), headers=JSON)
                    if answer.status_code == 200:
                        self.acknowledged.update(batch)


def nonces(posts: Sequence[Post]) -> list[int]:
    """What a receiver accepted, in its order."""
    return [artifact["nonce"] for post in posts for artifact in post.body["artifacts"]]


def stored_in(url: str) -> set[int]:
    """The nonces in a database that no gateway uses."""
    database = Database.open(url)
    try:
        with database.engine.connect() as connection:
            return set(connection.scalars(select(schema.artifacts.c.nonce)))
    finally:
        database.close()


def epoch_of(url: str) -> int:
    database = Database.open(url)
    with database.engine.connect() as connection:
        found = int(connection.execute(select(schema.fence.c.epoch)).scalar_one())
    database.close()
    return found


@pytest.mark.long
async def test_a_copy_of_a_gateway_in_use_loses_nothing_and_repeats_little(
    database_url: str, tmp_path: Path, copies: Copies
) -> None:
    rounds = tmp_path / "rounds.json"
    async with Receiver().served() as receiver:
        rounds.write_text(json.dumps([round_body(callbackURL=receiver.url)]))
        settings = {"POC_GATEWAY_RECEIVER_PRIVATE": "127.0.0.0/8", "POC_GATEWAY_PAYLOAD_ARTIFACTS": str(PAYLOAD)}
        with gateway(database_url, rounds, tmp_path / "first", settings) as first:
            pod = Pod(first)
            delivering = asyncio.create_task(pod.run())
            await until(lambda: len(receiver.accepted) > 10, seconds=60)
            before, sent = set(pod.acknowledged), len(receiver.accepted)
            await asyncio.to_thread(copies.copy)
            during = len(pod.acknowledged)
            await until(lambda: len(pod.acknowledged) > during + 10 * BATCH, seconds=60)
            delivering.cancel()
            first.process.kill()
            await asyncio.to_thread(first.process.wait)
        assert during > len(before), "nothing arrived meanwhile"
        restored = await asyncio.to_thread(copies.restored)
        kept = await asyncio.to_thread(stored_in, restored)
        assert before <= kept <= set(range(max(pod.acknowledged) + 1 + BATCH))
        assert len(kept) < len(pod.acknowledged)
        # The last payload may have been accepted, and the copy been made before that was written down.
        surely, ever = set(nonces(receiver.accepted[: sent - 1])), set(nonces(receiver.accepted))
        del receiver.accepted[:]
        owner = await asyncio.to_thread(epoch_of, restored)
        with gateway(restored, rounds, tmp_path / "second", settings) as second:
            async with httpx.AsyncClient(timeout=30) as client:
                new = range(max(kept) + 1, max(kept) + 1 + BATCH)
                answer = await client.post(second.url + path(), content=artifacts(new), headers=JSON)
                assert answer.json()["stored"] == BATCH
            await until(lambda: new[-1] in nonces(receiver.accepted), seconds=60)
        # From where the first was at the copy on, each once and in order.
        again = nonces(receiver.accepted)
        assert again == list(range(again[0], new[-1] + 1))
        assert max(surely) < again[0] <= max(kept) + 1
        assert ever >= set(range(again[0]))
        assert await asyncio.to_thread(epoch_of, restored) == owner + 1


@pytest.fixture
def url(tmp_path: Path, sqlite_template: Path) -> str:
    """A SQLite database."""
    (tmp_path / "gateway.db").write_bytes(sqlite_template.read_bytes())
    return f"sqlite:///{tmp_path}/gateway.db"


async def fill(url: str, count: int = 50, uid: str = "uid-1") -> None:
    database = Database.open(url)
    await store(database, a_round(uid), range(count))
    database.close()


async def test_who_owned_the_database_before_the_restore_writes_no_more(url: str, tmp_path: Path) -> None:
    first = Database.open(url, fenced=True)
    back_up(url, str(tmp_path / "copy"))
    restore(url, str(tmp_path / "copy"), replace=True)
    second = Database.open(url, fenced=True)
    first.engine.dispose()  # its connections, which have the old file open
    with pytest.raises(FenceLost):
        await first.write(lambda connection: connection.execute(text("SELECT 1")) and None)
    await second.write(lambda connection: connection.execute(text("SELECT 1")) and None)
    first.close()
    second.close()


async def test_a_copy_gives_room_back_and_is_small(url: str, tmp_path: Path) -> None:
    await fill(url, 20_000)
    size = back_up(url, str(tmp_path / "copy"))
    assert size == (tmp_path / "copy").stat().st_size <= (tmp_path / "gateway.db").stat().st_size
    copy = Database.open(f"sqlite:///{tmp_path}/copy")
    assert not await copy.read(cannot_shrink)
    copy.close()


async def test_a_database_that_is_there_is_kept_with_its_log(url: str, tmp_path: Path) -> None:
    await fill(url, 10)
    back_up(url, str(tmp_path / "copy"))
    open_ = Database.open(url)  # so that what follows stays in the log
    await store(open_, a_round("uid-2"), range(100, 105))
    with pytest.raises(BackupError, match=r"restore with --replace to keep it as gateway\.db\.replaced"):
        restore(url, str(tmp_path / "copy"), replace=False)
    assert stored_in(url) == {*range(10), *range(100, 105)}
    await store(open_, a_round("uid-3"), [200])
    log = (tmp_path / "gateway.db-wal").stat().st_size
    assert log > 0
    restore(url, str(tmp_path / "copy"), replace=True)
    assert (tmp_path / "gateway.db.replaced-wal").stat().st_size == log
    assert stored_in(url) == set(range(10))
    assert stored_in(f"sqlite:///{tmp_path}/gateway.db.replaced") == {*range(10), *range(100, 105), 200}
    with pytest.raises(BackupError, match="is there from an earlier restore"):
        restore(url, str(tmp_path / "copy"), replace=True)
    open_.close()


async def test_what_is_no_whole_copy_is_refused_and_changes_nothing(url: str, tmp_path: Path) -> None:
    await fill(url, 5_000)
    copy = tmp_path / "copy"
    back_up(url, str(copy))
    whole = copy.read_bytes()
    middle = len(whole) // 2
    for bad in (b"", b"text", whole[:middle], whole[:-4096], whole[:middle] + bytes(4096) + whole[middle + 4096 :]):
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(BackupError, match=r"no whole copy of a gateway's database .*: copy it again"):
            restore(url, str(tmp_path / "bad"), replace=True)
        assert len(stored_in(url)) == 5_000
    with pytest.raises(BackupError, match="there is no copy"):
        restore(url, str(tmp_path / "nothing"), replace=True)
    assert set(os.listdir(tmp_path)) == {"gateway.db", "gateway.db-lock", "copy", "bad"}  # noqa: PTH208


def test_a_restore_waits_for_no_gateway(url: str, tmp_path: Path) -> None:
    back_up(url, str(tmp_path / "copy"))
    owner = fence_of(url)
    assert owner.take()
    with pytest.raises(BackupError, match=r"a gateway owns .*: stop it first"):
        restore(url, str(tmp_path / "copy"), replace=True)
    owner.close()
    restore(url, str(tmp_path / "copy"), replace=True)


def test_a_file_is_not_written_over(url: str, tmp_path: Path) -> None:
    (tmp_path / "copy").write_text("mine")
    with pytest.raises(BackupError, match="is not written over"):
        back_up(url, str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_text() == "mine"


def test_without_room_nothing_is_begun(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=MARGIN_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(BackupError, match=r"bytes free, and the copy may need .*: name another volume"):
        back_up(url, str(tmp_path / "copy"))
    assert {file.name for file in tmp_path.iterdir()} == {"gateway.db"}


@pytest.mark.parametrize(
    ("arguments", "database", "message"),
    [
        ("backup copy", "postgresql://u:hidden@127.0.0.1:9/d", "use pg_dump and pg_restore for PostgreSQL"),
        ("restore copy", "postgresql://u:hidden@127.0.0.1:9/d", "use pg_dump and pg_restore for PostgreSQL"),
        ("backup copy", "sqlite:////nowhere/gateway.db", "there is no database /nowhere/gateway.db"),
        ("backup /nowhere/copy", "", "/nowhere/copy cannot be written"),
    ],
)
def test_a_command_that_fails_says_why(arguments: str, database: str, message: str, url: str, tmp_path: Path) -> None:
    run = partial(shell, f"python3 -m poc_gateway {arguments}", tmp_path)
    done = run(POC_GATEWAY_DATABASE=database or url)
    assert done.returncode == 1
    assert message in json.loads(done.stderr.splitlines()[-1])["message"]
    assert "hidden" not in done.stderr
