"""What a MySQL or MariaDB server would do for an agent although its user has no rights beyond one database.

Refused, each tried out on MariaDB 10.11: XA transactions, whose locks outlive the connection; a new password for the user's own
account, which locks out the next episode; statements that lift their own time limit (SET STATEMENT, compound statements) or hide
what they do (PREPARE, EXECUTE, executable comments); tables of engines that reach files or other servers with the server's
rights; files in a folder of the agent's choice; thousands of partitions, which take the server minutes to make and remove.

The text is read as the server reads it with an empty `sql_mode` and utf8mb4, which `server.py` sets before every statement.
"""

from __future__ import annotations

import re

from envs.db_env.dialect import syntax_error

DENIED = "1142 (42000): command denied to user"
_STATEMENTS = frozenset("SELECT WITH TABLE VALUES INSERT REPLACE UPDATE DELETE TRUNCATE CREATE ALTER DROP RENAME SHOW DESCRIBE DESC "
                        "EXPLAIN ANALYZE CHECK CHECKSUM OPTIMIZE REPAIR START BEGIN COMMIT ROLLBACK SAVEPOINT RELEASE SET USE DO "
                        "HELP".split())
_OTHERS = frozenset("XA PREPARE EXECUTE DEALLOCATE CALL HANDLER LOCK UNLOCK LOAD GRANT REVOKE KILL FLUSH INSTALL UNINSTALL RESET "
                    "SHUTDOWN PURGE CHANGE BACKUP CACHE BINLOG IF CASE LOOP WHILE REPEAT FOR SIGNAL RESIGNAL GET STOP".split())
_SAFE_ENGINES = frozenset("INNODB MYISAM ARIA MEMORY HEAP".split())
_ENGINES = frozenset("FEDERATED FEDERATEDX CONNECT SPIDER S3 MROONGA OQGRAPH SPHINX SEQUENCE CSV ARCHIVE BLACKHOLE MERGE MRG_MYISAM "
                     "ROCKSDB COLUMNSTORE EXAMPLE NDB NDBCLUSTER PERFORMANCE_SCHEMA TOKUDB ?".split())
_PIECE = re.compile(r"""'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | `(?:[^`]|``)*`                 # texts and quoted names
    | /\*(?!M?!).*?\*/ | \#[^\n]* | --(?=[\x00-\x20]|\Z)[^\n]*                              # comments but for executable ones
    """, re.S | re.X)
_DENIED = re.compile(r"/\*M?! | \A SET\s+STATEMENT\b | \A SET\b.*\bPASSWORD\b | \A BEGIN\s+NOT\b", re.I | re.S | re.X)
_DENIED_OPTION = re.compile(r"\bDIRECTORY\b | \bPARTITIONS?\b | \bCONNECTION\s*[=?]", re.I | re.X)
_ENGINE = re.compile(r"\bENGINE\s*(=?)\s*(\w+|\?)", re.I)


def refusal(sql: str) -> str | None:
    """The error of a statement that the server is not to be given, else None."""
    bare = _PIECE.sub(lambda piece: "?" if piece[0][0] in "'\"`" else " ", sql).lstrip("(; \t\r\n\v\f").rstrip()
    if not bare:
        return None                                         # the server has its own words for that
    first = (re.match(r"[A-Za-z]*", bare)[0]).upper()
    if first not in _STATEMENTS:
        return DENIED if first in _OTHERS else syntax_error(bare)
    denied = _DENIED.search(bare) or (first in ("CREATE", "ALTER") and _has_denied_option(_outside_parentheses(bare)))
    return DENIED if denied else None


def _has_denied_option(text: str) -> bool:
    engines = [(sign, name.upper()) for sign, name in _ENGINE.findall(text)]
    return _DENIED_OPTION.search(text) is not None or any(
        name in _ENGINES or (sign and name not in _SAFE_ENGINES) for sign, name in engines)


def _outside_parentheses(text: str) -> str:
    """`text` without what stands in parentheses: the options of a table, not its columns or the query that fills it."""
    kept, depth = [], 0
    for piece in re.split(r"([()])", text):
        if piece in "()":
            depth += {"(": 1, ")": -1}.get(piece, 0)
        elif depth <= 0:
            kept.append(piece)
    return " ".join(kept)
