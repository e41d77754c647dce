"""Micro problems: one or two tables, named in the prompt, their rows unseen; seven kinds, each with a fixed call pattern.

    table shop columns name price color. find price of kiwi
        SELECT price FROM shop WHERE name='kiwi'  ->  [(42,)]  ->  commit ["42"]
"""

from __future__ import annotations

import random
from typing import Any

from envs.db_env.tasks import Problem

TABLES = ("shop store market garden kitchen office school club house farm camp fleet museum library hotel bank port station "
          "park field cellar studio clinic factory depot gallery harbor stable village team").split()
ITEMS = ("apple pear plum kiwi lemon grape melon peach cherry fig bread cheese butter sugar salt rice bean corn onion carrot "
         "chair sofa lamp clock mirror pillow blanket basket bottle candle hammer ladder bucket shovel brush rope nail saw "
         "drill paint book pencil paper ruler folder stamp wallet watch ring coat shirt glove boot scarf hat belt drum flute "
         "guitar piano tent boat wheel engine").split()
NUMBERS = "price size age weight height score stock level speed cost length width".split()
WORDS = {"color": "red blue green black white yellow brown gray pink purple orange silver".split(),
         "city": "paris rome london berlin madrid vienna oslo dublin athens lisbon warsaw prague cairo delhi tokyo lima boston "
                 "dallas denver miami austin seattle chicago toronto".split(),
         "owner": "anna bob carl dora emma frank grace henry iris jack karen leo mary nora oscar paul rosa sam tina victor "
                  "alice david laura peter".split(),
         "shape": "round square flat long thin thick curved narrow wide oval".split()}
KINDS = ("other", "counting", "ranking", "chain", "UPDATE", "INSERT", "copy")


def problem(rng: random.Random, index: int) -> Problem:
    """A problem of kind `KINDS[index % 7]`."""
    kind = KINDS[index % len(KINDS)]
    return {"other": _other, "counting": _counting, "ranking": _ranking, "chain": _chain, "UPDATE": _update, "INSERT": _insert,
            "copy": _copy}[kind](rng)


def _table(rng: random.Random, columns: list[str], rows: int, taken: tuple[str, ...] = ()) -> dict[str, Any]:
    """A table with a name column and `columns`; names differ, and so do the numbers of a column."""
    values = [rng.sample(ITEMS, rows)]
    for column in columns:
        values.append(rng.sample(range(1, 1000), rows) if column in NUMBERS else rng.choices(WORDS[column], k=rows))
    return {"name": rng.choice([name for name in TABLES if name not in taken]),
            "columns": [["name", "TEXT"]] + [[column, "INT" if column in NUMBERS else "TEXT"] for column in columns],
            "rows": [list(row) for row in zip(*values)]}


def _columns(rng: random.Random) -> list[str]:
    columns = [rng.choice(NUMBERS), rng.choice(list(WORDS))]
    rng.shuffle(columns)
    return columns


def _other(rng: random.Random) -> Problem:
    table = _table(rng, _columns(rng), rng.randint(4, 6))
    column, item = rng.choice(table["columns"][1:])[0], rng.choice(table["rows"])[0]
    return Problem("other", f"find {column} of {item}", [table], [f"SELECT {column} FROM {table['name']} WHERE name='{item}'"])


def _counting(rng: random.Random) -> Problem:
    """The table is longer than the others, or the count could be guessed."""
    column = rng.choice(list(WORDS))
    table = _table(rng, [column], rng.randint(24, 48))
    value, count = rng.choice(WORDS[column]), rng.randint(2, 20)
    others = [word for word in WORDS[column] if word != value]
    for place, row in enumerate(table["rows"]):
        row[1] = value if place < count else rng.choice(others)
    rng.shuffle(table["rows"])
    return Problem("counting", f"count {column} {value}", [table],
                   [f"SELECT COUNT(*) FROM {table['name']} WHERE {column}='{value}'"])


def _ranking(rng: random.Random) -> Problem:
    table, (word, order) = _table(rng, _columns(rng), rng.randint(4, 6)), rng.choice((("highest", "DESC"), ("lowest", "ASC")))
    column = next(name for name, kind in table["columns"] if kind == "INT")
    return Problem("ranking", f"find name with {word} {column}", [table],
                   [f"SELECT name FROM {table['name']} ORDER BY {column} {order} LIMIT 1"])


def _chain(rng: random.Random) -> Problem:
    """Two dependent look-ups: the item's owner in one table, then a property of that owner in the other."""
    goods = _table(rng, ["owner"], rng.randint(4, 6))
    people = _table(rng, [rng.choice(NUMBERS + ["city"])], 5, taken=(goods["name"],))
    names = rng.sample(WORDS["owner"], 5)
    for row, name in zip(people["rows"], names):
        row[0] = name
    for row in goods["rows"]:
        row[1] = rng.choice(names)
    item, owner = rng.choice(goods["rows"])
    column = people["columns"][1][0]
    return Problem("chain", f"find {column} of owner of {item}", [goods, people],
                   [f"SELECT owner FROM {goods['name']} WHERE name='{item}'",
                    f"SELECT {column} FROM {people['name']} WHERE name='{owner}'"])


def _update(rng: random.Random) -> Problem:
    table = _table(rng, _columns(rng), rng.randint(4, 6))
    column, item = rng.choice(table["columns"][1:])[0], rng.choice(table["rows"])[0]
    value = rng.randint(1, 999) if column in NUMBERS else rng.choice(WORDS[column])
    text = value if column in NUMBERS else f"'{value}'"
    return Problem("UPDATE", f"set {column} of {item} to {value}", [table],
                   [f"UPDATE {table['name']} SET {column}={text} WHERE name='{item}'"], changes=True)


def _insert(rng: random.Random) -> Problem:
    column = rng.choice(NUMBERS)
    table = _table(rng, [column], rng.randint(4, 6))
    item = rng.choice([item for item in ITEMS if item not in {row[0] for row in table["rows"]}])
    value = rng.randint(1, 999)
    return Problem("INSERT", f"add {item} with {column} {value}", [table],
                   [f"INSERT INTO {table['name']} VALUES ('{item}', {value})"], changes=True)


def _copy(rng: random.Random) -> Problem:
    """A value is read from one row and written to another."""
    column = rng.choice(NUMBERS)
    table = _table(rng, [column], rng.randint(4, 6))
    (source, value), (target, _) = rng.sample(table["rows"], 2)
    return Problem("copy", f"set {column} of {target} to {column} of {source}", [table],
                   [f"SELECT {column} FROM {table['name']} WHERE name='{source}'",
                    f"UPDATE {table['name']} SET {column}={value} WHERE name='{target}'"], changes=True)
