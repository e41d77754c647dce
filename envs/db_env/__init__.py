"""The database task (AgentBench DBBench, function-call form): answer questions with SQL, or change tables as asked.

Tools: `execute_sql(query)` and `commit_final_answer(answers)`; all calls of a turn run in order. Rows come back as the Python
text of a list of tuples, errors in MySQL's words. Source of rules and limits: THUDM/AgentBench, src/server/tasks/dbbench.

Back ends: SQLite in a worker process (the default; MySQL's statements are translated, `dialect.py`), or a MySQL or MariaDB
server by URL (`server.py`). Official files: those of DBBench, or of Spider and BIRD (`files.py`).

A statement that does not end is a time-out error for the agent; its effects are undone, and the episode goes on. If the
database cannot be built again after that, the episode ends with status "task error": the agent's SQL did it.
"""

from __future__ import annotations

import random
from typing import Any, Sequence

from envs.base import Env, EnvFault, Message, Status, StepResult, assistant_call, function_tool
from envs.db_env import dialect, files, grading, official, slots, tasks
from envs.db_env.embedded import EmbeddedDatabase, FileDatabase
from envs.db_env.server import ServerDatabase
from envs.db_env.worker import StateLost
from envs.instances import Instance
from envs.tool_calls import ParsedTurn, ToolCall

_TOOLS = [
    function_tool("execute_sql", "Run one SQL statement on the database and get its rows.", query="The SQL statement."),
    function_tool("commit_final_answer", "End the task with the final answer.", answers={
        "type": "array", "items": {"type": "string"}, "description": "The answers, one text each."}),
]
_SYSTEM = {"micro": "Query the tables with SQL, then commit the answer.", "small": (
    "You answer a question, or carry out a change, on a {0} database that you reach only through two tools.\n"
    "In every round, think aloud about the problem and your plan, then call a tool.\n"
    "Use execute_sql to run SQL: one statement a call, written on one line. "
    "You get {0}'s raw reply and must interpret it yourself.\n"
    "Use commit_final_answer when you are done. Call it only when you are sure: the answer must be exactly right, "
    "and it ends the task.\n"
    "If the task is to modify the database, make the change first; the answer itself may then be anything.\n"
    "Always answer through the tool, never in the text of your message.")}
_OBSERVATION_CHARS = {"micro": 120, "small": 800}
_TRUNCATED = "[TRUNCATED]"


class DBEnv(Env):
    """See the docstrings of the module and of `Env`."""

    task = "db"
    turn_limits = {"micro": 6, "small": 15, "full": 15, "official": 15}
    honours_all_calls = True
    sizes = ("micro", "small", "full")
    sources = ("generated", "official")
    tools = _TOOLS

    _database: EmbeddedDatabase | FileDatabase | ServerDatabase | None = None

    def __init__(self, **settings: Any) -> None:
        ok, reason = self.available(settings.get("backend"))
        if not ok:
            raise EnvFault(reason)
        super().__init__(**settings)

    @classmethod
    def available(cls, backend: str | None = None) -> tuple[bool, str]:
        """Whether `backend` (None, "sqlite" or a server's URL) can be used here, and why not. ValueError: it is neither."""
        reason = "" if backend in (None, "sqlite") else slots.unavailable(backend)
        return not reason, reason

    @property
    def skipped(self) -> Sequence[tuple[int, str]]:
        """(line or position, reason) of each record of the official file that cannot be used."""
        return self._official()[1] if self.source == "official" else ()

    def _official(self) -> tuple[Sequence[Instance], Sequence[tuple[int, str]]]:
        return (files if files.found(self.path, self.split) else official).load(self.path, self.split)

    def _load(self) -> Sequence[Instance]:
        return self._official()[0] if self.source == "official" else tasks.instances(self.size, self.split)

    def _start(self, instance: Instance, rng: random.Random) -> list[Message]:
        self.close()
        self._data = instance.data
        self._micro = self.source == "generated" and self.size == "micro"
        self._cut = _OBSERVATION_CHARS["micro" if self._micro else "small"]
        self._sql_errors = 0
        self._tried: set[str] = set()
        self._gold: dict[str, Any] | None = None
        self._database = self._open()
        system = _SYSTEM["micro"] if self._micro else _SYSTEM["small"].format("SQLite" if "file" in self._data else "MySQL")
        return [{"role": "system", "content": system},
                {"role": "user", "content": self._prompt()}]

    def _open(self) -> EmbeddedDatabase | FileDatabase | ServerDatabase:
        if "file" in self._data:
            return FileDatabase(self._data["file"])
        if self.backend in (None, "sqlite"):
            return EmbeddedDatabase(self._data["tables"])
        return ServerDatabase(self.backend, self._data["tables"], raw=self.rules == "agentbench")

    def _prompt(self) -> str:
        data = self._data
        if self._micro:
            named = (f"table {table['name']} columns {' '.join(_columns(table))}" for table in data["tables"])
            return ". ".join([*named, data["question"]])
        described = data.get("description")
        if described is None:
            described = " ".join(f"The table is called {table['name']}; its columns are {', '.join(_columns(table))}."
                                 for table in data["tables"])
        evidence = f"Evidence: {data['evidence']}\n" if data.get("evidence") else ""
        return evidence + (f"About the table: {described}\n" if described else "") + f"Question: {data['question']}"

    def step(self, turn: str | Message, finish_reason: str = "stop") -> StepResult:
        result = super().step(turn, finish_reason)
        result.info["sql_errors"] = self._sql_errors
        if result.done:
            self.close()
        return result

    def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    # ---- calls ----------------------------------------------------------------------------------------------------
    def _call(self, call: ToolCall) -> Message | str | None:
        return self._run(call.name, next(iter(call.arguments.values())))

    def _run(self, name: str, argument: Any) -> str | None:
        try:
            if name == "execute_sql":
                return self._execute(argument)
            self._commit(argument)
        except StateLost as lost:
            self._finish(Status.TASK_ERROR, 0.0, info={"error": str(lost)})
        return None

    def _execute(self, sql: str) -> str:
        self._tried.add(sql)
        outcome = self._database.query(sql)
        self._sql_errors += outcome.failed
        text = outcome.text if outcome.error is None else outcome.error.encode("utf-8", "backslashreplace").decode()
        if outcome.timed_out and self.rules == "agentbench":
            text = "Error: SQL execution timed out."
        if len(text) > self._cut:
            self.cut_chars += len(text) - self._cut
            text = text[:self._cut] + _TRUNCATED
        return text

    def _commit(self, answers: Any) -> None:
        if self._data["changes"]:
            right = self._changed_rightly()
        elif self.rules == "agentbench":
            right = grading.agentbench_match(answers, self._data.get("raw_label", self._data["label"]), self.instance.kind)
        else:
            right = grading.answers_match(answers, self._data["label"], self._data["ordered"])
        self._finish(Status.COMPLETED, float(right))

    def _changed_rightly(self) -> bool:
        """Strict: the tables are the gold's. AgentBench: their hash is the recorded one, or the gold's if none is recorded."""
        tables, recorded, state = self._data["tables"], self._data.get("answer_md5"), self._database.state()
        if self.rules == "strict" and (gold := self._gold_state()) is not None:
            return grading.states_match(state, gold)
        truth = recorded or grading.state_hash(tables, self._gold_state())
        return grading.agentbench_match(grading.state_hash(tables, state), truth, self.instance.kind)

    def _gold_state(self) -> dict[str, Any] | None:
        """The tables after the gold statements; None if an official statement does not run here to its recorded hash."""
        if self._gold is None:
            tables, recorded = self._data["tables"], self._data.get("answer_md5")
            try:
                gold = self._database.gold_state(self._data["sql"])
            except ValueError as error:
                if recorded:
                    return None
                raise EnvFault(f"db: {self.instance.id}: {error}") from error
            hashed = grading.state_hash(tables, gold)
            if recorded and grading.clean(recorded) and not grading.agentbench_match(hashed, recorded, self.instance.kind):
                return None
            self._gold = gold
        return self._gold

    def _bad_call(self, call: ToolCall) -> str | None:
        if self.rules != "agentbench":
            return super()._bad_call(call)
        if not call.name or isinstance(call.raw, str):
            return "Error: the tool call cannot be parsed; its format is incorrect."
        if call.name not in self.tool_names:
            return "Invalid function call. Please call a tool instead."
        return self._call_by_position(call)

    def _call_by_position(self, call: ToolCall) -> str | None:
        """AgentBench takes the first value whatever its key is; a commit that it cannot read ends the task."""
        values = list(call.raw.values()) if isinstance(call.raw, dict) else []
        if call.name == "execute_sql":
            if not values or not isinstance(values[0], str):
                return "Error executing query: list index out of range"
        elif not values or (values[0] and not isinstance(values[0], (str, list))):
            self._finish(Status.TASK_ERROR, 0.0, info={"error": call.error})
            return "Error: the answer cannot be read"
        return self._run(call.name, values[0])

    def _no_call(self, parsed: ParsedTurn) -> Message:
        if self.rules != "agentbench":
            return super()._no_call(parsed)
        return {"role": "user", "content": "Internal error: no tool calls found."}

    # ---- expert ---------------------------------------------------------------------------------------------------
    def expert(self) -> Message:
        """The next gold statement that was not run yet, then the commit; a damaged table is repaired row by row first."""
        data = self._data
        for sql in data["sql"][:-1] if data["changes"] else data["sql"]:
            if sql not in self._tried:
                return assistant_call("execute_sql", query=sql)
        if data["changes"] and (sql := self._next_change()):
            return assistant_call("execute_sql", query=sql)
        return _commit_call(data)

    def _next_change(self) -> str | None:
        state, gold = self._database.state(), self._gold_state()
        if gold is None:                                    # an official record: trust its statement
            return None if self._data["sql"][-1] in self._tried else self._data["sql"][-1]
        if grading.states_match(state, gold):
            return None
        initial = {table["name"]: [_columns(table), table["rows"]] for table in self._data["tables"]}
        if grading.states_match(state, initial):
            return self._data["sql"][-1]
        return tasks.repair(state or {}, gold)

    def oracle(self, index: int) -> list[Message]:
        data = self.instances[index].data
        return [assistant_call("execute_sql", query=sql) for sql in data["sql"]] + [_commit_call(data)]

    def mistake(self, rng: random.Random) -> Message:
        """A look at everything, a wrong column, table or row, or, one time in twenty, an answer at random."""
        table = rng.choice(self._data["tables"])
        name, columns = dialect.identifier(table["name"]), list(map(dialect.identifier, _columns(table)))
        key, value = columns[0], tasks.literal(rng.choice(table["rows"])[0] if table["rows"] else "1")
        draw = rng.random()
        if draw < 0.05:
            return assistant_call("commit_final_answer", answers=[str(rng.randint(1, 999))])
        if draw < 0.25:
            query = f"SELECT * FROM {name}"
        elif draw < 0.5:
            query = f"SELECT {rng.choice(_WRONG)} FROM {name} WHERE {key}={value}"
        elif draw < 0.75:
            query = f"SELECT {key} FROM {rng.choice(_WRONG)} WHERE {key}={value}"
        else:
            query = f"SELECT {rng.choice(columns)} FROM {name} WHERE {key}={value}"
        return assistant_call("execute_sql", query=query)


def _columns(table: dict[str, Any]) -> list[str]:
    return [name for name, _ in table["columns"]]


_WRONG = ("value", "item", "data", "list", "total", "kind")


def _commit_call(data: dict[str, Any]) -> Message:
    """The commit of the gold answer; after a change any answer will do. Rows of several columns go cell by cell."""
    cells = [cell for row in data["label"] for cell in (row if isinstance(row, list) else [row])]
    return assistant_call("commit_final_answer", answers=["done"] if data["changes"] else list(map(str, cells)))
