"""The database task (AgentBench DBBench, function-call form): answer questions with SQL, or change tables as asked.

Tools: `execute_sql(query)` and `commit_final_answer(answers)`; all calls of a turn run in order. Rows come back as the Python
text of a list of tuples, errors in MySQL's words. Source of rules and limits: THUDM/AgentBench, src/server/tasks/dbbench.

A statement that does not end is a time-out error for the agent; its effects are undone, and the episode goes on. If the
database cannot be built again after that, the episode ends with status "task error": the agent's SQL did it.
"""

from __future__ import annotations

import random
from typing import Any, Sequence

from envs.base import Env, EnvFault, Message, Status, StepResult, assistant_call, function_tool
from envs.db_env import dialect, grading, official, tasks
from envs.db_env.worker import Database, StateLost
from envs.instances import Instance
from envs.tool_calls import ParsedTurn, ToolCall

_TOOLS = [
    function_tool("execute_sql", "Run one SQL statement on the database and get its rows.", query="The SQL statement."),
    function_tool("commit_final_answer", "End the task with the final answer.", answers={
        "type": "array", "items": {"type": "string"}, "description": "The answers, one text each."}),
]
_SYSTEM = {"micro": "Query the tables with SQL, then commit the answer.", "small": (
    "You answer a question, or carry out a change, on a MySQL database that you reach only through two tools.\n"
    "In every round, think aloud about the problem and your plan, then call a tool.\n"
    "Use execute_sql to run SQL: one statement a call, written on one line. You get MySQL's raw reply and must interpret it yourself.\n"
    "Use commit_final_answer when you are done. Call it only when you are sure: the answer must be exactly right, "
    "and it ends the task.\n"
    "If the task is to modify the database, make the change first; the answer itself may then be anything.\n"
    "Always answer through the tool, never in the text of your message.")}
_OBSERVATION_CHARS = {"micro": 120, "small": 800}
_TRUNCATED = "[TRUNCATED]"


class DBEnv(Env):
    """See the module's and `Env`'s docstrings. `skipped`: (line, reason) of each record of an official file that cannot be used."""

    task = "db"
    turn_limits = {"micro": 6, "small": 15, "official": 15}
    honours_all_calls = True
    sources = ("generated", "official")
    tools = _TOOLS

    skipped: Sequence[tuple[int, str]] = ()
    _database: Database | None = None

    def _load(self) -> Sequence[Instance]:
        if self.backend not in (None, "sqlite"):
            raise ValueError(f"db: unknown backend {self.backend!r}; known: sqlite (the default)")
        if self.source == "official":
            instances, self.skipped = official.load(self.path, self.split)
            return instances
        return tasks.instances(self.size, self.split)

    def _start(self, instance: Instance, rng: random.Random) -> list[Message]:
        self.close()
        self._data = instance.data
        self._micro = self.source == "generated" and self.size == "micro"
        self._cut = _OBSERVATION_CHARS["micro" if self._micro else "small"]
        self._cut_chars = self._sql_errors = 0
        self._tried: set[str] = set()
        self._gold: dict[str, Any] | None = None
        self._database = Database(self._data["tables"])
        return [{"role": "system", "content": _SYSTEM["micro" if self._micro else "small"]},
                {"role": "user", "content": self._prompt()}]

    def _prompt(self) -> str:
        data = self._data
        if self._micro:
            named = (" ".join(["table", table["name"], "columns", *(name for name, _ in table["columns"])]) for table in data["tables"])
            return ". ".join([*named, data["question"]])
        described = data.get("description")
        if described is None:
            described = " ".join(f"The table is called {table['name']}; its columns are {', '.join(name for name, _ in table['columns'])}."
                                 for table in data["tables"])
        evidence = f"Evidence: {data['evidence']}\n" if data.get("evidence") else ""
        return evidence + (f"About the table: {described}\n" if described else "") + f"Question: {data['question']}"

    def step(self, turn: str | Message, finish_reason: str = "stop") -> StepResult:
        result = super().step(turn, finish_reason)
        result.info |= {"cut_chars": self._cut_chars, "sql_errors": self._sql_errors}
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
        outcome = self._database.execute(dialect.to_sqlite(sql, self._data["tables"]))
        text = outcome.text
        if outcome.error is not None or outcome.timed_out or outcome.crashed:
            self._sql_errors += 1
            text = dialect.mysql_error(outcome, sql)
        if len(text) > self._cut:
            self._cut_chars += len(text) - self._cut
            text = text[:self._cut] + _TRUNCATED
        return text

    def _commit(self, answers: Any) -> None:
        if self._data["changes"]:
            right = self._changed_rightly()
        elif self.rules == "agentbench":
            right = grading.agentbench_match(answers, self._data["label"], self.instance.kind)
        else:
            right = grading.answers_match(answers, self._data["label"], self._data["ordered"])
        self._finish(Status.COMPLETED, float(right))

    def _changed_rightly(self) -> bool:
        state, recorded = self._database.state(), self._data.get("answer_md5")
        if self.rules == "agentbench" or (recorded and self._gold_state() is None):
            truth = recorded or grading.state_hash(self._data["tables"], self._gold_state())
            return grading.agentbench_match(grading.state_hash(self._data["tables"], state), truth, self.instance.kind)
        return grading.states_match(state, self._gold_state())

    def _gold_state(self) -> dict[str, Any] | None:
        """The tables after the gold statements; None if an official gold statement does not run, or not to the recorded hash."""
        if self._gold is None:
            tables, recorded = self._data["tables"], self._data.get("answer_md5")
            try:
                gold = self._database.gold_state([dialect.to_sqlite(sql, tables) for sql in self._data["sql"]])
            except ValueError as error:
                if not recorded:
                    raise EnvFault(f"db: {self.instance.id}: {error}") from error
                return None
            if recorded and not grading.agentbench_match(grading.state_hash(tables, gold), recorded, self.instance.kind):
                return None
            self._gold = gold
        return self._gold

    def _bad_call(self, call: ToolCall) -> str | None:
        if self.rules != "agentbench":
            return super()._bad_call(call)
        if call.name not in self.tool_names:
            return "Invalid function call. Please call a tool instead."
        return self._call_by_position(call)

    def _call_by_position(self, call: ToolCall) -> str | None:
        """AgentBench takes the first value whatever its key is; a commit that it cannot read ends the task."""
        values = list(call.raw.values()) if isinstance(call.raw, dict) else []
        if call.name == "execute_sql":
            if not values or not isinstance(values[0], str):
                return "Error executing query: no statement given"
        elif not values or (values[0] and not isinstance(values[0], (str, list))):
            self._finish(Status.TASK_ERROR, 0.0, info={"error": call.error})
            return None
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
        initial = {table["name"]: [[name for name, _ in table["columns"]], table["rows"]] for table in self._data["tables"]}
        if grading.states_match(state, initial):
            return self._data["sql"][-1]
        return tasks.repair(state or {}, gold)

    def oracle(self, index: int) -> list[Message]:
        data = self.instances[index].data
        return [assistant_call("execute_sql", query=sql) for sql in data["sql"]] + [_commit_call(data)]

    def mistake(self, rng: random.Random) -> Message:
        """A look at everything, a wrong column, table or value, or, one time in twenty, a wrong answer."""
        table = rng.choice(self._data["tables"])
        name, columns = dialect.identifier(table["name"]), [name for name, _ in table["columns"]]
        key = dialect.identifier(columns[0])
        cell = tasks.literal(rng.choice(table["rows"])[0]) if table["rows"] else "''"
        draw = rng.random()
        if draw < 0.05:
            return assistant_call("commit_final_answer", answers=[str(rng.randint(1000, 9999))])
        if draw < 0.25:
            return assistant_call("execute_sql", query=f"SELECT * FROM {name}")
        if draw < 0.5:
            return assistant_call("execute_sql", query=f"SELECT {rng.choice(_WRONG)} FROM {name} WHERE {key}={cell}")
        if draw < 0.75:
            return assistant_call("execute_sql", query=f"SELECT {key} FROM {rng.choice(_WRONG)} WHERE {key}={cell}")
        return assistant_call("execute_sql", query=f"SELECT {rng.choice([dialect.identifier(c) for c in columns])} FROM {name} WHERE {key}={cell}")


_WRONG = ("value", "item", "data", "id", "total", "list")


def _commit_call(data: dict[str, Any]) -> Message:
    """The commit of the gold answer; after a change any answer will do. Rows of several columns go cell by cell."""
    answers = ["done"] if data["changes"] else [str(cell) for row in data["label"] for cell in (row if isinstance(row, list) else [row])]
    return assistant_call("commit_final_answer", answers=answers)
