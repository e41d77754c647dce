"""The knowledge-graph task: answer a question with seven tools over a graph that is never shown.

Contract: AgentBench's function-call form (THUDM/AgentBench, Apache-2.0): numbered variables, literal observations, the final
answer as plain text, reward 1 for an exact match of sets. What an episode builds is a program (`program.py`); until the
answer is graded only relation and attribute look-ups are executed.
"""

from __future__ import annotations

import difflib
import importlib.util
import random
import re
from dataclasses import dataclass
from typing import Any, Iterable, Sequence

from envs.base import Env, EnvFault, Message, Status, check_name
from envs.instances import Instance, generate
from envs.kg_env import official
from envs.kg_env.expert import next_step, solution, wrong_step
from envs.kg_env.graph import Graph, shared_graph
from envs.kg_env.program import And, Best, Count, Entity, Join, Program, is_entity_id, query_size
from envs.kg_env.store import BACKENDS, Ontology, QueryFailed, Store, backend_kind, open_store
from envs.kg_env.tasks import SHAPES, draw
from envs.kg_env.tools import FULL_PROMPT, MICRO_PROMPT, TOOLS
from envs.tool_calls import ParsedTurn, ToolCall

_ANSWER = re.compile(r"(?:Final|Find) Answer: #([0-9]+)")
_REFERENCE = re.compile(r"#([0-9]{1,6})\Z")
NUMBER = "int"                                             # the type of a counted variable
MAX_QUERY = 100                                             # patterns in one query: nested superlatives double
MICRO_CUT = 120                                             # characters of an observation


class ToolError(ValueError):
    """A call that cannot be carried out; its text is what the agent reads."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A set that the episode has built: the type of its members and the program that denotes it."""

    type: str
    program: Program


class KGEnv(Env):
    """Knowledge-graph questions on a SPARQL store.

    `backend` says where the graph is: "embedded" (the default: the generated graph of the size, in memory), "fb15k237" (that
    graph, from the folder of the official files, in memory), "disk:FOLDER" (a store of pyoxigraph, see `store.write_store`), or
    the URL of an endpoint, with "virtuoso+" before it for Virtuoso's dialect. Generated questions are about the graph of the
    size, which a store on disk or behind a URL has to hold, or about FB15k-237. The official questions are about Freebase,
    which no public file holds whole: they need a store that has it.

    Grading: `reward` is 1 where predicted and gold set are equal, `score` is their F1; `info` adds `executable` (the final
    answer named a variable) and the two sizes. An answer that names no variable is wrong: 0, "agent validation failed".
    Duplicates cannot count. F1 is 0 where nothing is shared, so also where a set is empty. An empty prediction equals an
    empty gold set under rules="agentbench" only; under "strict" it is wrong. Strict also accepts entity names in quotes or
    in another case, refuses entities that the question does not name, and says in errors what would have been valid.
    """

    task = "kg"
    turn_limits = {"micro": 6, "small": 15, "full": 15, "official": 15}
    honours_all_calls = True
    sizes = ("micro", "small", "full")
    sources = ("generated", "official")
    tools = TOOLS

    def __init__(self, **settings: Any) -> None:
        backend, generated = settings.get("backend"), settings.get("source") != "official"
        if backend_kind(backend) is None:
            check_name("kg: backend", backend, BACKENDS)
        if not generated and backend_kind(backend) == "embedded":
            raise EnvFault("kg: the official questions are about Freebase, which the embedded graph is not; name a store that "
                           "holds it, such as backend='virtuoso+http://127.0.0.1:3001/sparql', or 'fb15k237' for the few "
                           "that this part of Freebase answers")
        if generated and settings.get("size", "micro") == "micro" and backend_kind(backend) == "fb15k237":
            raise ValueError("kg: FB15k-237 has no micro questions; pass size='small' or 'full'")
        super().__init__(**settings)
        self._micro = self.source == "generated" and self.size == "micro"
        self.store = self._open()

    def _graph(self) -> Graph:
        """The graph that generated questions are about."""
        if backend_kind(self.backend) == "fb15k237":
            return official.shared_fb15k237(official.data_folder(self.path))
        return shared_graph(self.size)

    def _open(self) -> Store:
        kind = backend_kind(self.backend)
        if kind in ("embedded", "fb15k237"):
            return self._graph().store
        ontology = (official.load_ontology(official.data_folder(self.path) / "ontology") if self.source == "official" else
                    shared_graph(self.size).ontology)
        return open_store(self.backend, ontology)

    def _load(self) -> Sequence[Instance]:
        if self.source == "official":
            records = official.load_records(official.data_folder(self.path), self.split)
            if backend_kind(self.backend) != "fb15k237":
                return records
            graph = self._graph()
            return [instance for instance in records if not official.unknown_to(graph, instance.data)]
        graph = self._graph()
        shapes = [shape for shape in SHAPES[self.size] if graph.schema.attributes or shape.last != "superlative"]
        return generate("kg", self.size, self.split, lambda rng, index: draw(rng, index, graph, shapes),
                        key=lambda data: data["s_expression"])  # the program decides the split, not names or words

    @classmethod
    def available(cls, backend: str | None = None) -> tuple[bool, str]:
        kind = backend_kind(backend)
        if kind is None:
            return False, f"unknown kg backend {backend!r}; known: {', '.join(BACKENDS)}"
        if not importlib.util.find_spec("pyoxigraph"):
            return False, "the package pyoxigraph is not installed"
        if kind in ("embedded", "fb15k237"):
            return True, ""
        try:
            reason = open_store(backend, Ontology({}, {}, frozenset())).ping()
        except EnvFault as fault:
            reason = str(fault)
        return not reason, reason

    def _start(self, instance: Instance, rng: random.Random) -> list[Message]:
        self.entities: dict[str, str] = instance.data["entities"]
        self.variables: list[Variable] = []
        self.listed: set[tuple[str, Program]] = set()       # look-ups that the agent has made
        system = MICRO_PROMPT if self._micro else FULL_PROMPT.format(turns=self.max_turns)
        return [{"role": "system", "content": system},
                {"role": "user", "content": f"{instance.data['question']}\nEntities: [{', '.join(self.entities)}]"}]

    # ---- tools ------------------------------------------------------------------------------------------------------
    def _call(self, call: ToolCall) -> str:
        try:
            return self._cut("Observation: " + getattr(self, f"_tool_{call.name}")(**call.arguments))
        except (ToolError, QueryFailed) as error:
            self.invalid_calls += 1
            return self._cut(f"Error processing tool call: {error}" if self.rules == "agentbench" else f"Error: {error}")

    def _tool_get_relations(self, variable: str) -> str:
        return self._listing("relations", self._term(variable))

    def _tool_get_attributes(self, variable: str) -> str:
        return self._listing("attributes", self._term(variable))

    def _tool_get_neighbors(self, variable: str, relation: str) -> str:
        source, relation = self._term(variable), relation.strip()
        self._check_listed("relations", source, relation, variable)
        return self._new(Variable(self.store.ontology.ranges[relation], Join(relation, source)))

    def _tool_intersection(self, variable1: str, variable2: str) -> str:
        left, right = self._variable(variable1), self._variable(variable2)
        if left.type != right.type:
            raise ToolError(f"an intersection needs two variables of the same type, not {left.type} and {right.type}")
        return self._new(Variable(left.type, And(left.program, right.program)))

    def _tool_argmax(self, variable: str, attribute: str, highest: bool = True) -> str:
        source, attribute = self._variable(variable), attribute.strip()
        self._check_listed("attributes", source.program, attribute, variable)
        return self._new(Variable(source.type, Best(source.program, attribute, highest)))

    def _tool_argmin(self, variable: str, attribute: str) -> str:
        return self._tool_argmax(variable, attribute, highest=False)

    def _tool_count(self, variable: str) -> str:
        return self._new(Variable(NUMBER, Count(self._variable(variable).program)))

    def _new(self, variable: Variable) -> str:
        if query_size(variable.program) > MAX_QUERY:
            raise ToolError("the variable is built from too many steps; start again from an earlier one")
        self.variables.append(variable)
        what = "which is a number" if variable.type == NUMBER else f"which are instances of {variable.type}"
        return f"variable #{len(self.variables) - 1}, {what}"

    def _listing(self, kind: str, program: Program) -> str:
        self.listed.add((kind, program))
        return f"[{', '.join(getattr(self.store, kind)(program))}]"

    def _check_listed(self, kind: str, program: Program, name: str, given: str) -> None:
        """Refuse a relation or attribute that the look-up does not show; the look-up is made here if the agent has not."""
        known = getattr(self.store, kind)(program)
        if name not in known:
            near = sorted(difflib.get_close_matches(name[:80], known, n=5, cutoff=0.0))
            raise ToolError(f"{_short(name)} is not one of the {kind} of {_short(given)}; try [{', '.join(near)}]")

    def _term(self, text: str) -> Program:
        """The program of an argument that may be a variable or an entity."""
        found = self._lookup(text)
        return found if isinstance(found, Entity) else self._members(found, text)

    def _variable(self, text: str) -> Variable:
        """The variable of an argument that has to be one."""
        found = self._lookup(text)
        if isinstance(found, Entity):
            raise ToolError(f"{_short(text)} is an entity; this tool needs a variable such as #0")
        self._members(found, text)
        return found

    def _members(self, variable: Variable, text: str) -> Program:
        if variable.type == NUMBER:
            raise ToolError(f"{_short(text)} is a number, not a set of entities")
        return variable.program

    def _lookup(self, text: str) -> Variable | Entity:
        """What an argument names: an entity by name, or by id where the rules allow it, or a variable."""
        text = text.strip()
        if text in self.entities:
            return Entity(self.entities[text])
        if self.rules == "agentbench":
            if is_entity_id(text) and not text.startswith("g."):
                return Entity(text)
        else:
            text = text.strip("'\"` ")
            for name, entity in self.entities.items():
                if text == entity or text.casefold() == name.casefold():
                    return Entity(entity)
        reference = _REFERENCE.match(text)
        if reference and int(reference.group(1)) < len(self.variables):
            return self.variables[int(reference.group(1))]
        made = f"#0 to #{len(self.variables) - 1}" if self.variables else "none yet"
        raise ToolError(f"{_short(text)} is neither a variable ({made}) nor an entity of the question "
                        f"({', '.join(self.entities)})")

    # ---- turns without a tool call, errors, the end -----------------------------------------------------------------
    def _play(self, parsed: ParsedTurn) -> list[Message]:
        answer = None if parsed.calls else _ANSWER.search(parsed.content.split("Observation:")[0])
        if answer is None:
            return super()._play(parsed)
        self._grade(answer.group(1))
        return []

    def _grade(self, reference: str) -> None:
        gold = {str(answer["answer_argument"]) for answer in self.instance.data["answer"]}
        sizes = {"gold_size": len(gold)}
        if len(reference) > 6 or int(reference) >= len(self.variables):
            error = f"the final answer #{_short(reference)} names none of {len(self.variables)} variables"
            self._finish(Status.VALIDATION_FAILED, 0.0, info=sizes | {"executable": False, "error": error})
            return
        try:
            predicted = self.store.execute(self.variables[int(reference)].program)
        except QueryFailed as failure:
            self._finish(Status.VALIDATION_FAILED, 0.0, info=sizes | {"executable": False, "error": str(failure)})
            return
        exact, f1 = compare_sets(predicted, gold, self.rules)
        self._finish(Status.COMPLETED, exact, f1, info=sizes | {"executable": True, "predicted_size": len(predicted)})

    def _no_call(self, parsed: ParsedTurn) -> Message:
        return {"role": "user", "content": "No tool call and no final answer. Call a tool, or write Final Answer: #id."}

    def _bad_call(self, call: ToolCall) -> str:
        if self.rules == "agentbench" and call.name not in self.tool_names:
            return self._cut(f"Function {_short(call.name)} does not exist.")
        if self.rules == "agentbench":
            return self._cut(f"The arguments do not match the function {_short(call.name)}.")
        return self._cut(f"Error: {call.error[:300]}")

    def _cut(self, text: str) -> str:
        """The observation, in micro at most MICRO_CUT characters; what is cut is counted."""
        if not self._micro or len(text) <= MICRO_CUT:
            return text
        self.cut_chars += len(text) - MICRO_CUT
        return text[:MICRO_CUT]

    # ---- expert -----------------------------------------------------------------------------------------------------
    def expert(self) -> Message:
        return next_step(self)

    def oracle(self, index: int) -> list[Message]:
        return solution(self.instances[index].data)

    def mistake(self, rng: random.Random) -> Message:
        return wrong_step(self, rng)


def compare_sets(predicted: Iterable[str], gold: Iterable[str], rules: str) -> tuple[float, float]:
    """Exact match (0 or 1) and F1 of two answer sets; see `KGEnv` for the empty cases."""
    predicted, gold = set(predicted), set(gold)
    hits = len(predicted & gold)
    exact = predicted == gold and (bool(predicted) or rules == "agentbench")
    return float(exact), 2 * hits / (len(predicted) + len(gold)) if hits else 0.0


def _short(text: str) -> str:
    """A model's text as errors quote it: one line of valid Unicode, at most 40 characters."""
    text = " ".join(text[:80].encode(errors="replace").decode().split())
    return text if len(text) <= 40 else text[:37] + "..."
