"""Small problems: one table of 15 to 60 rows of text in the official classes, in full sentences, three wordings a class.

Numbers are stored as text, as in the official set, so that sorting or comparing them without a cast goes wrong.
"""

from __future__ import annotations

import random
from typing import Any

from envs.db_env.domains import DOMAINS, Domain, draw_names, draw_rows, draw_table
from envs.db_env.tasks import Problem, literal

# In the proportions of the official set (a third INSERT, a third UPDATE, a third queries), but two of 24 are DELETE.
KINDS = ("other", "INSERT", "UPDATE", "counting", "INSERT", "UPDATE", "comparison", "INSERT", "UPDATE", "ranking", "INSERT",
         "UPDATE", "aggregation-SUM", "INSERT", "UPDATE", "aggregation-MIN", "DELETE", "UPDATE", "aggregation-MAX", "INSERT",
         "DELETE", "aggregation-AVG", "INSERT", "UPDATE")
_WORDS = {"SUM": ("total", "sum of the"), "MIN": ("smallest", "lowest"), "MAX": ("largest", "highest"),
          "AVG": ("average", "mean")}


def problem(rng: random.Random, index: int) -> Problem:
    """A problem of kind `KINDS[index % 24]` over a random domain."""
    return Scene(rng, KINDS[index % len(KINDS)]).draw()


class Scene:
    """A filled table and the pieces from which questions about it are made."""

    rows = (15, 60)

    def __init__(self, rng: random.Random, kind: str) -> None:
        self.rng, self.kind = rng, kind
        self.domain: Domain = rng.choice(DOMAINS)
        self.table: dict[str, Any] = draw_table(rng, self.domain, rng.randint(*self.rows))
        self.name, self.noun = tick(self.table["name"]), self.domain.noun
        self.nouns = self.noun + "s"

    def draw(self) -> Problem:
        """A problem of the scene's kind."""
        if self.kind.startswith("aggregation"):
            return self.aggregation(self.kind.split("-")[1])
        return {"other": self.other, "counting": self.counting, "comparison": self.comparison, "ranking": self.ranking,
                "INSERT": self.insert, "UPDATE": self.update, "DELETE": self.delete}[self.kind]()

    def problem(self, question: str, sql: str, **settings: Any) -> Problem:
        return Problem(self.kind, question, [self.table], [sql], **settings)

    def number(self) -> tuple[str, str]:
        """A number column and its numeric SQL expression."""
        column = self.rng.choice(list(self.domain.numbers))
        return column, f"CAST({tick(column)} AS SIGNED)"

    def row(self) -> dict[str, str]:
        return dict(zip(self.domain.columns, self.rng.choice(self.table["rows"])))

    def group(self) -> tuple[str, str]:
        """A condition on a category that some row fulfils: words and SQL."""
        column = self.rng.choice(list(self.domain.words))
        value = self.row()[column]
        return f"{column} is {value}", f"{tick(column)} = {literal(value)}"

    def threshold(self) -> tuple[str, str]:
        """A condition on a number, at a value near those of some row: words and SQL."""
        column, expression = self.number()
        value = int(self.row()[column])
        word, sign = self.rng.choice((("greater than", ">"), ("less than", "<"), ("at least", ">="), ("at most", "<=")))
        return f"{column} is {word} {value}", f"{expression} {sign} {value}"

    def other(self) -> Problem:
        row = self.row()
        column = self.rng.choice(self.domain.columns[1:])
        key = tick(self.domain.key)
        if self.rng.random() < 0.5:
            asked = self.rng.choice((f"What is the {column} of the {self.noun} {row[self.domain.key]}?",
                                     f"I need the {column} recorded for {row[self.domain.key]}."))
            return self.problem(asked, f"SELECT {tick(column)} FROM {self.name} WHERE {key} = {literal(row[self.domain.key])}")
        date = self.domain.date[0]
        return self.problem(f"Which {self.noun} has the {date} {row[date]}?",
                            f"SELECT {key} FROM {self.name} WHERE {tick(date)} = {literal(row[date])}")

    def counting(self) -> Problem:
        (words, condition), (more, second) = self.group(), self.threshold()
        if self.rng.random() < 0.5:
            words, condition = f"{words} and whose {more}", f"{condition} AND {second}"
        asked = self.rng.choice((f"How many {self.nouns} are there whose {words}?", f"Count the {self.nouns} whose {words}.",
                                 f"What is the number of {self.nouns} whose {words}?"))
        return self.problem(asked, f"SELECT COUNT(*) FROM {self.name} WHERE {condition}")

    def comparison(self) -> Problem:
        (words, condition), (more, second) = self.group(), self.threshold()
        key = self.domain.key
        asked = self.rng.choice((f"Which {self.nouns} are there whose {words} and whose {more}? Give each {key}.",
                                 f"List the {key} of every {self.noun} whose {words} and whose {more}."))
        return self.problem(asked, f"SELECT {tick(key)} FROM {self.name} WHERE {condition} AND {second}")

    def ranking(self) -> Problem:
        column, expression = self.number()
        word, order = self.rng.choice((("highest", "DESC"), ("lowest", "ASC")))
        start = f"SELECT {tick(self.domain.key)} FROM {self.name}"
        if self.rng.random() < 0.4:
            count = self.rng.randint(2, 4)
            direction = "from highest to lowest" if order == "DESC" else "from lowest to highest"
            return self.problem(f"Name the {count} {self.nouns} with the {word} {column}, ordered {direction}.",
                                f"{start} ORDER BY {expression} {order} LIMIT {count}", ordered=True)
        words, condition = self.group()
        asked = self.rng.choice((f"Among the {self.nouns} whose {words}, which one has the {word} {column}?",
                                 f"Which {self.noun} has the {word} {column}, looking only at those whose {words}?"))
        return self.problem(asked, f"{start} WHERE {condition} ORDER BY {expression} {order} LIMIT 1")

    def aggregation(self, function: str) -> Problem:
        column, expression = self.number()
        words, condition = self.group()
        word = self.rng.choice(_WORDS[function])
        asked = self.rng.choice((f"What is the {word} {column} over all {self.nouns} whose {words}?",
                                 f"Considering only {self.nouns} whose {words}, compute the {word} {column}."))
        if function == "AVG":
            asked += " Round to two decimals."
            return self.problem(asked, f"SELECT ROUND(AVG({expression}), 2) FROM {self.name} WHERE {condition}")
        return self.problem(asked, f"SELECT {function}({expression}) FROM {self.name} WHERE {condition}")

    def insert(self) -> Problem:
        taken = {row[0] for row in self.table["rows"]}
        name = self.rng.choice([name for name in draw_names(self.rng, self.domain.names, 80) if name not in taken])
        row = draw_rows(self.rng, self.domain, [name])[0]
        listed = ", ".join(f"{column} {value!r}" for column, value in zip(self.domain.columns, row))
        asked = self.rng.choice((f"Add a new {self.noun} to the table {self.table['name']} with {listed}.",
                                 f"Insert a row into {self.table['name']}: {listed}.",
                                 f"Record one more {self.noun} with these values: {listed}."))
        columns, values = ", ".join(map(tick, self.domain.columns)), ", ".join(map(literal, row))
        return self.problem(asked, f"INSERT INTO {self.name} ({columns}) VALUES ({values})", changes=True)

    def update(self) -> Problem:
        row, new = self.row(), draw_rows(self.rng, self.domain, [""])[0]
        changed = self.rng.sample(list(zip(self.domain.columns, new))[1:], self.rng.choice((1, 1, 2)))
        parts = " and ".join(f"{column} to {value!r}" for column, value in changed)
        sets = ", ".join(f"{tick(column)} = {literal(value)}" for column, value in changed)
        key = self.domain.key
        if self.rng.random() < 0.3:
            (words, condition), (more, second) = self.group(), self.threshold()
            return self.problem(f"For every {self.noun} whose {words} and whose {more}, change {parts}.",
                                f"UPDATE {self.name} SET {sets} WHERE {condition} AND {second}", changes=True)
        asked = self.rng.choice((f"Update the {self.noun} {row[key]}: set {parts}.", f"Set {parts} for {row[key]}.",
                                 f"In the table {self.table['name']}, change {parts} where the {key} is {row[key]}."))
        return self.problem(asked, f"UPDATE {self.name} SET {sets} WHERE {tick(key)} = {literal(row[key])}", changes=True)

    def delete(self) -> Problem:
        if self.rng.random() < 0.5:
            words, condition = self.threshold()
            group, second = self.group()
            return self.problem(f"Remove all {self.nouns} whose {words} and whose {group} from the table.",
                                f"DELETE FROM {self.name} WHERE {condition} AND {second}", changes=True)
        key, row = self.domain.key, self.row()
        return self.problem(f"Delete the {self.noun} {row[key]} from {self.table['name']}.",
                            f"DELETE FROM {self.name} WHERE {tick(key)} = {literal(row[key])}", changes=True)


def tick(name: str) -> str:
    """`name` in MySQL's identifier quotes."""
    return f"`{name}`"
