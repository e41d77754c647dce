"""Where the graph is: the predicate index, stores on disk, SPARQL endpoints (a small one here, Virtuoso), FB15k-237, speed."""

import gc
import http.server
import random
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse

import pyoxigraph
import pytest

import envs
from envs.base import EnvFault, Status, assistant_call
from envs.check import check_env
from envs.instances import Instance
from envs.kg_env import official
from envs.kg_env.graph import shared_graph
from envs.kg_env.program import (TYPE_RELATION, And, Best, Class, Count, Entity, Join, parse_s_expression,
                                 predicates_sparql, run_actions)
from envs.kg_env.store import EndpointStore, GraphStore, Ontology, quads, write_store

GRAPH = shared_graph("micro")


def triples(graph):
    """All triples of a generated graph."""
    yield from ((entity, TYPE_RELATION, name) for entity, name in graph.types.items())
    yield from ((head, relation, tail) for head, pairs in graph.edges.items() for relation, tail in pairs)
    yield from graph.numbers


def random_program(rng, graph, depth):
    if depth == 0:
        return Entity(rng.choice(list(graph.types)))
    roll = rng.random()
    if roll < 0.6:
        return Join(rng.choice(sorted(graph.phrases)), random_program(rng, graph, depth - 1), rng.random() < 0.7)
    if roll < 0.7:
        return And(Class(rng.choice(sorted(graph.entities))), random_program(rng, graph, depth - 1))
    if roll < 0.85:
        return And(random_program(rng, graph, depth - 1), random_program(rng, graph, depth - 1))
    return Best(random_program(rng, graph, depth - 1), rng.choice(sorted(graph.ontology.attributes)), rng.random() < 0.5)


def walk(rng, graph, hops):
    """A program of hops along edges that exist, in half of the cases with a superlative at the end."""
    entity = rng.choice([entity for entity, pairs in graph.edges.items() if pairs])
    program = Entity(entity)
    for _ in range(hops):
        relation, entity = rng.choice(graph.edges[entity])
        program = Join(relation, program)
    own = sorted(name for head, name, _ in graph.numbers if head == entity) if rng.random() < 0.5 else []
    return Best(program, rng.choice(own), rng.random() < 0.5) if own else program


# ---- the predicate index --------------------------------------------------------------------------------------------
def by_query(store, program):
    """The predicates that SPARQL finds."""
    return tuple(sorted(store._select(predicates_sparql(program))))


def test_the_index_finds_what_sparql_finds():
    rng, found = random.Random(0), 0
    for index in range(400):
        program = walk(rng, GRAPH, rng.randint(1, 4)) if index % 2 else random_program(rng, GRAPH, rng.randint(0, 4))
        expected = by_query(GRAPH.store, program)
        assert GRAPH.store._query_predicates(program) == expected, program
        assert GRAPH.store.index.members_of(program) == GRAPH.store.execute(program), program
        found += bool(expected)
    assert found > 200


def test_the_index_on_odd_graphs():
    literal, date = pyoxigraph.Literal, pyoxigraph.NamedNode("http://www.w3.org/2001/XMLSchema#date")
    store = GraphStore([("m.0a", "r", "m.0b"), ("m.0a", "r", "m.0c"), ("m.0a", "r", literal("text")), ("m.0b", "s", "m.0a"),
                        ("m.0c", "t", "m.0a"), ("m.0a", "u", "m.0a"),
                        *((head, "born", literal(day, datatype=date)) for head, day in (
                            ("m.0c", "1990-01-01"), ("m.0b", "1980-05-05"), ("m.0b", "2000-05-05")))],
                       Ontology({name: "x" for name in "rstu"}, {}, frozenset({"born"})))
    a = Entity("m.0a")
    hop, back = Join("r", a), Join("t", a, outgoing=False)
    oldest, youngest = Best(hop, "born", False), Best(hop, "born")
    for program in (a, hop, oldest, youngest, back, Join("u", a), Entity("m.0zz"), Join("s", hop), Join("nothing", a),
                    Best(hop, "size"), Join("r", a, outgoing=False), And(hop, back), Class("m.0a"), Join("t", oldest)):
        assert store._query_predicates(program) == by_query(store, program), program
    assert store.relations(youngest) == ["s"] and store.relations(oldest) == ["s"] and store.relations(back) == ["t"]
    assert store.attributes(Join("r", a)) == ["born"] and store.relations(Join("u", a)) == []


def hub_graph(entities, edges, seed=0):
    """Triples with a hub: a third of all edges lead to or from the first three entities."""
    rng = random.Random(seed)
    relations = [f"domain.type.relation_{number}" for number in range(120)]
    found = set()
    while len(found) < edges // 2:
        head, tail = rng.randrange(entities), rng.randrange(3) if rng.random() < 0.35 else rng.randrange(entities)
        if head != tail:
            found.add((head, relations[int(len(relations) * rng.random() ** 3)], tail))
    for head, relation, tail in sorted(found):
        yield f"m.{head:06x}", relation, f"m.{tail:06x}"
        yield f"m.{tail:06x}", relation + "_inv", f"m.{head:06x}"


@pytest.mark.extended
def test_tool_calls_on_a_million_triples_stay_below_three_milliseconds(capsys):
    """Every look-up is made for the first time; half of the walks start at a hub, so that sets of 20,000 members occur."""
    entities, per_entity, rng = 60_000, 2, random.Random(1)
    edges = list(hub_graph(entities, 1_000_000 - per_entity * entities))
    numbers = [(f"m.{entity:06x}", f"domain.type.number_{place}", rng.randrange(1000)) for entity in range(entities)
               for place in range(per_entity)]
    ontology = Ontology({relation: "domain.type" for _, relation, _ in edges}, {},
                        frozenset(f"domain.type.number_{place}" for place in range(per_entity)))
    started = time.perf_counter()
    store = GraphStore(edges + numbers, ontology)
    built = time.perf_counter() - started
    env, spent = envs.make("kg", size="small", split="dev"), []
    env.store, env.max_turns = store, 10_000
    starts = [f"m.{number:06x}" for number in range(3)] * 40 + [f"m.{rng.randrange(entities):06x}" for _ in range(120)]

    def timed(name, **arguments):
        started = time.thread_time()                        # not the wall's: what else runs here is none of the call
        text = env.step(assistant_call(name, **arguments)).messages[0]["content"]
        spent.append(time.thread_time() - started)
        return text

    largest = 0
    gc.collect(), gc.freeze()                               # the graph as Python objects is this test's, not the store's
    for start in starts:
        env.instances = [Instance("kg-test", "kg", "own", {"question": "q", "entities": {"start": start}, "answer": []})]
        env.reset(0)
        at = "start"
        for _ in range(3):
            listed = timed("get_relations", variable=at).removeprefix("Observation: [").rstrip("]").split(", ")
            if listed == [""]:
                break
            assert timed("get_neighbors", variable=at, relation=rng.choice(listed)).startswith("Observation: variable")
            at = f"#{len(env.variables) - 1}"
            largest = max(largest, int(store.index._members(env.variables[-1].program).sum()))
        if at != "start":
            timed("get_attributes", variable=at), timed("argmax", variable=at, attribute="domain.type.number_0")
            timed("get_relations", variable=f"#{len(env.variables) - 1}"), timed("count", variable=at)
            timed("intersection", variable1=at, variable2="#0")
    gc.unfreeze()
    times = sorted(spent)
    with capsys.disabled():
        print(f"\n{len(edges) + len(numbers)} triples, built in {built:.1f} s, sets of up to {largest}; "
              f"{len(times)} first calls: mean {1000 * sum(times) / len(times):.2f} ms, "
              f"p99 {1000 * times[int(0.99 * len(times))]:.2f} ms, "
              f"max {1000 * times[-1]:.2f} ms")
    assert largest > 10_000 and times[-1] < 0.003 and sum(times) / len(times) < 0.001


def resident():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1])


def test_memory_is_flat_over_300_cycles():
    marks, rng = [], random.Random(0)
    for cycle in range(300):
        with envs.make("kg", size="small", split="dev") as env:
            env.reset(cycle % 64)
            result = None
            while result is None or not result.done:
                result = env.step(env.mistake(rng) if rng.random() < 0.2 else env.expert())
        if cycle in (149, 299):
            marks.append(resident())
    assert marks[1] - marks[0] < 6000


# ---- disk and endpoints ---------------------------------------------------------------------------------------------
def play(env, count):
    """Rewards of the oracle's play of the first instances."""
    rewards = []
    for index in range(count):
        env.reset(index)
        for turn in env.oracle(index):
            result = env.step(turn)
        rewards.append(result.reward)
    return rewards


def observations(env, index):
    env.reset(index)
    return [message["content"] for turn in env.oracle(index) for message in env.step(turn).messages]


def test_a_store_on_disk(tmp_path):
    write_store(tmp_path / "store", triples(GRAPH))
    backend = f"disk:{tmp_path / 'store'}"
    assert envs.available("kg", backend) == (True, "")
    with envs.make("kg", split="dev", backend=backend) as disk, envs.make("kg", split="dev") as memory:
        assert play(disk, 24) == [1.0] * 24
        assert [observations(disk, index) for index in range(12)] == [observations(memory, index) for index in range(12)]
    ok, reason = envs.available("kg", f"disk:{tmp_path / 'absent'}")
    assert not ok and "absent" in reason
    with pytest.raises(EnvFault, match="no store of pyoxigraph"):
        envs.make("kg", backend=f"disk:{tmp_path / 'absent'}")


class Endpoint(http.server.BaseHTTPRequestHandler):
    """A SPARQL 1.1 endpoint over the micro graph, as small as the protocol allows."""

    protocol_version = "HTTP/1.1"
    behaviour = "answer"

    def do_POST(self):
        query = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["query"][0]
        status, body = 200, b"<html>not JSON</html>"
        if self.behaviour == "silent" or self.behaviour == "slow" and "ASK" not in query:
            time.sleep(1.0)
        elif self.behaviour == "slow":
            body = b'{"head": {}, "boolean": true}'
        elif self.behaviour == "refuse":
            status, body = 500, b"Virtuoso 42000 Error The estimated execution time 900 (sec) exceeds the limit of 400 (sec)."
        elif self.behaviour == "answer":
            body = GRAPH.store._store.query(query).serialize(format=pyoxigraph.QueryResultsFormat.JSON)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    """The URL of a running `Endpoint`."""
    monkeypatch.setattr(Endpoint, "behaviour", "answer")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/sparql"
    server.shutdown()
    server.server_close()


def test_any_sparql_endpoint(endpoint):
    assert envs.available("kg", endpoint) == (True, "")
    with envs.make("kg", split="dev", backend=endpoint) as remote, envs.make("kg", split="dev") as memory:
        assert play(remote, 18) == [1.0] * 18
        assert [observations(remote, index) for index in range(12)] == [observations(memory, index) for index in range(12)]


def test_a_refused_query_is_an_error_text_and_a_wrong_answer(endpoint, monkeypatch):
    with envs.make("kg", split="dev", backend=endpoint, rules="agentbench") as env:
        index = next(index for index, instance in enumerate(env.instances) if instance.kind == "count")
        env.reset(index)
        *calls, answer = env.oracle(index)
        for turn in calls:
            env.step(turn)
        monkeypatch.setattr(Endpoint, "behaviour", "refuse")
        entity = GRAPH.entities["city"][-1]
        refused = env.step(assistant_call("get_relations", variable=entity)).messages[0]["content"]
        assert refused.startswith("Error processing tool call: the endpoint answers 500: Virtuoso 42000 Error")
        result = env.step(answer)
        assert (result.status, result.reward, result.info["executable"]) == (Status.VALIDATION_FAILED, 0.0, False)


def test_a_query_that_takes_too_long_is_the_agents_and_a_silent_endpoint_is_not(endpoint, monkeypatch):
    monkeypatch.setattr("envs.kg_env.store.TIMEOUT_S", 0.3)
    with envs.make("kg", split="dev", backend=endpoint) as env:
        env.reset(0)
        *calls, answer = env.oracle(0)
        for turn in calls:
            env.step(turn)
        monkeypatch.setattr(Endpoint, "behaviour", "slow")
        result = env.step(answer)
        assert (result.status, result.info["error"]) == (Status.VALIDATION_FAILED, "the query takes the endpoint more than 0.3 s")
        env.reset(1)
        monkeypatch.setattr(Endpoint, "behaviour", "silent")
        entity = next(iter(env.entities))
        assert env.step(assistant_call("get_relations", variable=entity)).status == Status.ENVIRONMENT_ERROR


def test_an_endpoint_that_fails_is_a_fault_of_the_machine(endpoint, monkeypatch):
    env = envs.make("kg", split="dev", backend=endpoint)
    monkeypatch.setattr(Endpoint, "behaviour", "babble")
    env.reset(0)
    result = env.step(env.oracle(0)[0])
    assert result.status == Status.ENVIRONMENT_ERROR and "SPARQL JSON" in result.info["error"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}/sparql"
    ok, reason = envs.available("kg", gone)
    assert not ok and "no answer from 127.0.0.1" in reason


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(EnvFault, match="about Freebase"):
        envs.make("kg", source="official")
    with pytest.raises(ValueError, match="no micro questions"):
        envs.make("kg", backend="fb15k237")
    with pytest.raises(ValueError, match="unknown kg: backend 'ftp://x/y'"):
        envs.make("kg", backend="ftp://x/y")


@pytest.mark.extended
def test_virtuoso(tmp_path, capsys):
    """Virtuoso on loopback with a database of its own: generated questions of all shapes, in its dialect."""
    programs = [shutil.which(name) for name in ("virtuoso-t", "isql-vt")]
    if None in programs:
        pytest.skip("virtuoso-opensource-7 is not installed")
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    graph = shared_graph("small")
    with open(tmp_path / "graph.nt", "wb") as file:
        store = pyoxigraph.Store()
        store.bulk_extend(quads(triples(graph)))
        store.dump(file, format=pyoxigraph.RdfFormat.N_TRIPLES, from_graph=pyoxigraph.DefaultGraph())
    (tmp_path / "virtuoso.ini").write_text(f"""[Database]
DatabaseFile = {tmp_path}/v.db
ErrorLogFile = {tmp_path}/v.log
LockFile = {tmp_path}/v.lck
TransactionFile = {tmp_path}/v.trx
xa_persistent_file = {tmp_path}/v.pxa
[TempDatabase]
DatabaseFile = {tmp_path}/t.db
TransactionFile = {tmp_path}/t.trx
[Parameters]
ServerPort = 127.0.0.1:{ports[0]}
DirsAllowed = {tmp_path}
NumberOfBuffers = 5000
MaxDirtyBuffers = 3000
[HTTPServer]
ServerPort = 127.0.0.1:{ports[1]}
ServerRoot = {tmp_path}
[SPARQL]
ResultSetMaxRows = 50000
MaxQueryExecutionTime = 60
DefaultGraph = http://rdf.freebase.com
""")
    process = subprocess.Popen([programs[0], "+configfile", str(tmp_path / "virtuoso.ini"), "+foreground", "+wait"],
                               cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        backend, deadline = f"virtuoso+http://127.0.0.1:{ports[1]}/sparql", time.monotonic() + 90
        while not envs.available("kg", backend)[0]:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "v.log").read_text()[-2000:]
            time.sleep(0.3)
        load = (f"DB.DBA.TTLP_MT(file_to_string_output('{tmp_path}/graph.nt'), '', 'http://rdf.freebase.com'); checkpoint;")
        subprocess.run([programs[1], f"127.0.0.1:{ports[0]}", "dba", "dba", f"exec={load}"], check=True, capture_output=True)
        with envs.make("kg", size="small", split="dev", backend=backend) as remote, \
                envs.make("kg", size="small", split="dev") as memory:
            started = time.perf_counter()
            assert play(remote, 64) == [1.0] * 64
            spent = time.perf_counter() - started
            assert [observations(remote, index) for index in range(21)] == [observations(memory, index) for index in range(21)]
        rng, store, found = random.Random(0), EndpointStore(backend, graph.ontology), 0
        for _ in range(60):
            program = walk(rng, graph, rng.randint(1, 3))
            expected = graph.store.execute(program)
            assert store.execute(program) == expected and store.execute(Count(program)) == {str(len(expected))}, program
            assert store.relations(program) == graph.store.relations(program)
            found += bool(expected)
        with capsys.disabled():
            print(f"\nVirtuoso: 64 oracle episodes in {spent:.1f} s; 60 programs agree, {found} of them with answers")
    finally:
        process.terminate()
        process.wait(60)


# ---- the official records and FB15k-237 -----------------------------------------------------------------------------
def test_official_records_on_a_store_that_lacks_them(eppo_data, endpoint):
    """The tools work on every record's own program; the endpoint here has none of Freebase, so nothing is found."""
    folder = str(eppo_data("kg/train.json").parent.parent)
    with envs.make("kg", source="official", split="train", path=folder, backend=endpoint, rules="agentbench") as env:
        assert len(env.instances) == 1214 and env.max_turns == 15
        for index in range(0, 1214, 100):
            opening = env.reset(index)
            data = env.instance.data
            assert opening[1]["content"] == f"{data['question']}\nEntities: [{', '.join(data['entities'])}]"
            assert len(opening[0]["content"]) > 800
            result = env.step(assistant_call("get_relations", variable=next(iter(data["entities"]))))
            assert result.messages[0]["content"] == "Observation: []"
            assert 6 <= len(env.oracle(index)) - 1 <= 9


@pytest.mark.extended
def test_fb15k237_as_a_graph(eppo_data, capsys):
    folder = str(eppo_data("kg/fb15k237_triples.tsv.gz").parent.parent)
    settings = {"backend": "fb15k237", "path": folder}
    graph = official.shared_fb15k237(official.data_folder(folder))
    rng, times = random.Random(0), []
    for index in range(400):
        program = walk(rng, graph, rng.randint(0, 3))
        started = time.thread_time()
        predicates = graph.store._query_predicates(program)
        times.append(time.thread_time() - started)
        if index % 10 == 0:
            assert predicates == by_query(graph.store, program)
    times.sort()
    answerable = {split: [instance for instance in official.load_records(official.data_folder(folder), split)
                          if not official.unknown_to(graph, instance.data)] for split in ("train", "dev")}
    for instance in answerable["train"] + answerable["dev"]:
        graph.store.execute(run_actions(instance.data["actions"])[-1])
    with capsys.disabled():
        print(f"\nFB15k-237: first look-ups mean {1000 * sum(times) / 400:.2f} ms, p99 {1000 * times[395]:.2f} ms, max "
              f"{1000 * times[-1]:.2f} ms; official questions inside: {list(map(len, answerable.values()))} of 1214 and 20")
    assert times[-1] < 0.003
    rows = check_env("kg", sizes=("small",), splits=("dev",), **settings)
    assert {row["kind"] for row in rows} == {"intersection", "count", "join"}
    with envs.make("kg", size="small", split="dev", **settings) as env:
        calls = [len(instance.data["actions"]) for instance in env.instances]
        assert min(calls) == 6 and max(calls) == 9
        for instance in env.instances:
            gold = {answer["answer_argument"] for answer in instance.data["answer"]}
            assert graph.store.execute(parse_s_expression(instance.data["s_expression"])) == gold
