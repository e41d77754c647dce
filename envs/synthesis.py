"""Self-Instruct (arXiv 2212.10560) for the environments: a model proposes instances, the environment decides which are kept.

A proposal is kept if it can be read, its world can be built, its reference solution runs and gives the same in a second world,
playing it earns reward 1 where committing nothing earns 0, its question is like none that is known (ROUGE-L below
`MAX_SIMILARITY`) and like no test item, and its world and solution are those of none. Everything else is counted by reason.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import envs
from envs.base import Env, EnvFault, Message, assistant_call
from envs.instances import Instance, fingerprint
from envs.proposals import read_proposals, request_messages, rouge_l

MAX_SIMILARITY = 0.7
MAX_ANSWER_CHARS = 200
MAX_QUESTION, MAX_CHARS, MAX_COLUMNS, MAX_ROWS = 1000, 20_000, 30, 200     # characters of a question and a proposal; its table
OTHERS = "for p in /proc/[0-9]*; do case ${p#/proc/} in 1|$$|$PPID) ;; *) echo $p ;; esac; done"       # processes but our own
EXAMPLES = 4                                                # shown with each request


class Dropped(ValueError):
    """The proposal is not kept; the text is the reason that is counted."""


# ---- one module of checks per task ---------------------------------------------------------------------------------------
def _text(proposal: dict[str, Any], key: str) -> str:
    value = proposal.get(key)
    if not isinstance(value, str) or not value.strip():
        raise Dropped(f"no {key}")
    return value


def _os(env: Env, proposal: dict[str, Any]) -> dict[str, Any]:
    from envs.os_env.tasks import problem

    question, init, solution = (_text(proposal, key) for key in ("question", "init", "solution"))
    outputs = []
    for _ in range(2):
        try:
            box, _ = env._open({"init": init})
        except EnvFault as fault:
            raise Dropped("its world cannot be built") from fault
        with box:
            if box.check(OTHERS).text:
                raise Dropped("its world leaves processes running")
            output = box.run(solution)
        if output.code or output.why != "exit":
            raise Dropped("its reference solution does not run")
        outputs.append(output.text.strip())
    if outputs[0] != outputs[1]:
        raise Dropped("its reference solution gives different answers")
    if not 0 < len(outputs[0]) <= MAX_ANSWER_CHARS:
        raise Dropped("its answer is empty or too long")
    if not outputs[0].replace("\n", "").isprintable() or "\ufffd" in outputs[0]:
        raise Dropped("its answer is no plain text")
    kind = "integer" if re.fullmatch(r"-?\d+", outputs[0]) else "string"
    return problem(question, [init], [solution], answer=(kind, outputs[0]))


def _db(env: Env, proposal: dict[str, Any]) -> dict[str, Any]:
    from envs.db_env.grading import states_match

    question, sql, table = _text(proposal, "question"), _text(proposal, "sql"), proposal.get("table")
    try:
        columns = [[str(name), kind] for name, kind in table["columns"]]
        rows = [[cell if isinstance(cell, str) else _number(cell) for cell in row] for row in table["rows"]]
        name, names = table["name"], {name.lower() for name, _ in columns}
        if not (isinstance(name, str) and name.strip() and not name.lower().startswith("sqlite_")):
            raise ValueError("no usable name")
        if not (0 < len(columns) <= MAX_COLUMNS and len(names) == len(columns) and all(map(str.strip, names))
                and {kind for _, kind in columns} <= {"TEXT", "INT"}):
            raise ValueError("no usable columns")
        if not 0 < len(rows) <= MAX_ROWS or any(len(row) != len(columns) for row in rows):
            raise ValueError("rows do not fit the columns")
    except (TypeError, KeyError, ValueError) as error:
        raise Dropped("its world cannot be built") from error
    tables = [{"name": name, "columns": columns, "rows": rows}]
    changes = sql.split()[0].upper() in ("INSERT", "UPDATE", "DELETE", "REPLACE")
    data = {"question": question, "tables": tables, "sql": [sql], "label": [], "ordered": False, "changes": changes}
    (found, state), (mirrored, mirrored_state) = (_run_sql([tables[0] | {"rows": rows[::order]}], sql) for order in (1, -1))
    if Counter(found) != Counter(mirrored) or not states_match(mirrored_state, state):
        raise Dropped("the data do not determine its answer")
    if changes:
        return data
    label = ["NULL" if row[0] is None else str(row[0]) for row in found]
    if any(len(row) != 1 for row in found) or not label or sum(map(len, label)) > MAX_ANSWER_CHARS:
        raise Dropped("its answer is empty or too long")
    return data | {"label": label}


def _run_sql(tables: list[dict[str, Any]], sql: str) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """The rows of a statement, and the tables after it."""
    from envs.db_env.embedded import EmbeddedDatabase
    from envs.db_env.worker import StateLost

    database = EmbeddedDatabase(tables)
    try:
        outcome, state = database.query(sql), database.state()
        if outcome.failed or state is None:
            raise Dropped("its reference solution does not run")
        return ast.literal_eval(outcome.text), state
    except (ValueError, SyntaxError, StateLost) as error:    # a row that is not plain values, a worker that it ended
        raise Dropped("its reference solution does not run") from error
    finally:
        database.close()


def _number(cell: Any) -> str:
    """The text of a number; ValueError for anything else."""
    if not isinstance(cell, (int, float)):
        raise ValueError("a cell is neither text nor number")
    return str(cell)


def _kg(env: Env, proposal: dict[str, Any]) -> dict[str, Any]:
    from envs.kg_env.env import MAX_QUERY
    from envs.kg_env.graph import shared_graph
    from envs.kg_env.program import Count, mentioned, query_size, run_actions, s_expression

    question, entities, actions = _text(proposal, "question"), proposal.get("entities"), proposal.get("actions")
    names = shared_graph(env.size).names
    if not isinstance(entities, dict) or not entities or any(
            not isinstance(entity, str) or names.get(entity) != name for name, entity in entities.items()):
        raise Dropped("it names entities that are not in the graph")
    try:
        program = run_actions([str(action) for action in actions])[-1]
        if query_size(program) > MAX_QUERY:
            raise ValueError("built from too many steps")
        answer = sorted(env.store.execute(program))
    except (TypeError, ValueError, IndexError, KeyError, SyntaxError) as error:
        raise Dropped("its reference solution does not run") from error
    if set(mentioned(program)) - set(entities.values()):
        raise Dropped("its solution uses entities that the question does not name")
    if not 0 < len(answer) <= 60 or answer == ["0"]:
        raise Dropped("its answer is empty or too long")
    kind = "Value" if isinstance(program, Count) else "Entity"
    return {"question": question, "entities": entities, "s_expression": s_expression(program),
            "actions": [str(action) for action in actions],
            "answer": [{"answer_type": kind, "answer_argument": argument} for argument in answer]}


CHECKS: dict[str, Callable[[Env, dict[str, Any]], dict[str, Any]]] = {"os": _os, "db": _db, "kg": _kg}
NOTHING = {"os": assistant_call("answer_action", answer=""), "db": assistant_call("commit_final_answer", answers=[]),
           "kg": {"role": "assistant", "content": "Final Answer: #0"}}


def as_example(task: str, data: dict[str, Any]) -> dict[str, Any]:
    """An instance as a proposal, to show."""
    if task == "os":
        return {"question": data["question"], "init": data["init"], "solution": data["steps"][-1]}
    if task == "db":
        return {"question": data["question"], "table": data["tables"][0], "sql": data["sql"][-1]}
    return {key: data[key] for key in ("question", "entities", "actions")}


def _mark(task: str, data: dict[str, Any]) -> str:
    """Equal for instances that differ in the wording of their question only."""
    shown = {"tables": data["tables"], "sql": data["sql"]} if task == "db" else as_example(task, data)
    return fingerprint({key: value for key, value in shown.items() if key != "question"})


def _play(env: Env, data: dict[str, Any], turns: Sequence[Message] | None = None) -> Any:
    """The last result of an episode on `data`: the given turns, or the expert's."""
    env.instances = (Instance("proposal", env.task, "proposal", data),)
    try:
        env.reset(0)
    except EnvFault as fault:                                # it could be built before: its script throws dice
        raise Dropped("its world cannot be built") from fault
    while True:
        for turn in [env.expert()] if turns is None else turns:
            result = env.step(turn)
        if result.done or turns is not None:
            return result


class Synthesis:
    """Proposals in, instances out.

    Args:
        task: os, db or kg. ask: sends chat messages to a model and returns its text, or raises Dropped. size: of the examples
        and of the world. test_questions: what nothing may resemble; the generated test split of `size` is added. limit: of
        instances to keep.

    Attributes:
        kept: the instances. dropped: reason -> number of proposals. requests: how many rounds there were.
    """

    def __init__(self, task: str, ask: Callable[[list[Message]], str], *, size: str = "small", seed: int = 0,
                 test_questions: Sequence[str] = (), limit: int | None = None) -> None:
        self.task, self.ask, self.seed, self.limit = task, ask, seed, limit
        self.env = envs.make(task, size=size, split="train")
        self.pool = [item for item in self.env.instances if self._shows(item)]
        self.known = [item.data["question"] for item in self.pool]
        test = envs.make(task, size=size, split="test")
        self.tests = [*test_questions, *(item.data["question"] for item in test.instances)]
        self._test_marks = {_mark(task, item.data) for item in test.instances}
        self._marks = {_mark(task, item.data) for item in self.env.instances}
        test.close()
        self.kept, self.dropped, self.requests = [], Counter(), 0

    def _shows(self, item: Instance) -> bool:
        return "answer" in item.data if self.task == "os" else self.task == "kg" or len(item.data["tables"]) == 1

    def round(self, count: int) -> None:
        """Ask for `count` proposals and judge what comes."""
        rng = random.Random(f"{self.seed}/{self.requests}")  # of the number alone, so that a resumed run asks the same
        own = rng.sample(self.kept, min(2, len(self.kept)))
        examples = [as_example(self.task, item.data) for item in rng.sample(self.pool, EXAMPLES - len(own)) + own]
        messages = request_messages(self.task, examples, count, self._hints(rng))
        try:
            text = self.ask(messages)
        except Dropped as reason:
            text = ""
            self.dropped[str(reason)] += 1
        self.requests += 1
        for proposal in read_proposals(text):
            try:
                if proposal is None:
                    raise Dropped("not a JSON object")
                if self.limit is not None and len(self.kept) >= self.limit:
                    raise Dropped("it is more than was asked for")
                self._keep(proposal)
            except Dropped as reason:
                self.dropped[str(reason)] += 1

    def _keep(self, proposal: dict[str, Any]) -> None:
        question = _text(proposal, "question")
        try:
            if len(question) > MAX_QUESTION or len(json.dumps(proposal, ensure_ascii=False).encode()) > MAX_CHARS:
                raise Dropped("it is too long")
        except UnicodeEncodeError as error:                  # a lone surrogate, which nothing could save
            raise Dropped("it is no valid text") from error
        if any(rouge_l(question, other) >= MAX_SIMILARITY for other in self.tests):
            raise Dropped("it overlaps a test item")
        if any(rouge_l(question, other) >= MAX_SIMILARITY for other in self.known):
            raise Dropped("it is too much like one that is known")
        data = CHECKS[self.task](self.env, proposal)
        mark = _mark(self.task, data)
        if mark in self._test_marks:
            raise Dropped("it overlaps a test item")
        if mark in self._marks:
            raise Dropped("it is too much like one that is known")
        if _play(self.env, data).reward != 1.0:
            raise Dropped("its reference solution does not pass its own checker")
        if _play(self.env, data, [NOTHING[self.task]]).reward != 0.0:
            raise Dropped("doing nothing passes its checker")
        self.add(data)

    def add(self, data: dict[str, Any]) -> None:
        """Keep an instance that has been judged, here or before the command was ended."""
        self.kept.append(Instance(f"{self.task}-synthetic-train-{len(self.kept)}", self.task, "synthetic", data))
        self.known.append(data["question"])
        self._marks.add(_mark(self.task, data))

    def _hints(self, rng: random.Random) -> str:
        if self.task != "kg":
            return ""
        from envs.kg_env.graph import shared_graph
        from envs.kg_env.program import Entity

        graph = shared_graph(self.env.size)
        lines = []
        for entity in rng.sample(sorted(graph.names), 8):
            lines.append(f"{graph.names[entity]} ({entity}): {', '.join(self.env.store.relations(Entity(entity)))}")
        return "\nSome entities and their relations:\n" + "\n".join(lines) + "\n"

    def close(self) -> None:
        self.env.close()
