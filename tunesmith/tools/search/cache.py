"""Results of earlier searches in a SQLite file, which several runs and processes read and write at the same time.

Only results are stored, never failures. The file must be on a local disk: SQLite's write-ahead log does not work over a
network file system.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from pathlib import Path

from tunesmith.errors import StorageError
from tunesmith.tools.search.sources import FoundPassage

BUSY_TIMEOUT_S = 30.0
PRUNE = "DELETE FROM results WHERE rowid <= (SELECT max(rowid) FROM results) - ?"
"""Storing gives a row the next rowid, also when it replaces another."""
SCHEMA = "CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, passages TEXT NOT NULL, created REAL NOT NULL)"


class ResultCache:
    """Passages by key. One object serves any number of threads.

    Args:
        max_age_s: age of results that are no longer returned; None returns them forever.
        max_entries: number of results, of which the oldest are removed; None keeps them all.

    Raises:
        StorageError: the file cannot be opened, or is not a cache.
    """

    def __init__(self, path: str | Path, *, max_age_s: float | None = None, max_entries: int | None = None) -> None:
        self._path = Path(path).expanduser()
        self._max_age_s = max_age_s
        self._max_entries = max_entries
        self._lock = threading.Lock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                self._path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
            )
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"cannot use {self._path} as a cache of searches: {error}") from error

    def get(self, key: str) -> list[FoundPassage] | None:
        """The stored passages, or None if there are none or they are too old."""
        found = self._execute("SELECT passages, created FROM results WHERE key = ?", (key,))
        if not found:
            return None
        text, created = found[0]
        if self._max_age_s is not None and time.time() - created > self._max_age_s:
            return None
        return [FoundPassage(*row) for row in json.loads(text)]

    def put(self, key: str, passages: list[FoundPassage]) -> None:
        """Store passages, and remove the oldest over the limit; another process may have stored the same key."""
        text = json.dumps([(each.passage_id, each.contents) for each in passages])
        self._execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", (key, text, time.time()))
        if self._max_entries is not None:
            self._execute(PRUNE, (self._max_entries,))

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _execute(self, statement: str, values: tuple[str | float, ...]) -> list[tuple[str, float]]:
        try:
            with self._lock:
                return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StorageError(f"cannot use {self._path} as a cache of searches: {error}") from error
