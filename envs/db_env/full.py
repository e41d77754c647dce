"""Full problems: tables of 40 to 78 rows, often beside a second one, and questions that take a sub-query or a group.

The classes and their shares are those of the small problems, and half of the questions are of the small forms.
"""

from __future__ import annotations

import random

from envs.db_env.domains import DOMAINS, draw_names, draw_rows, draw_table
from envs.db_env.small import KINDS, Scene, tick
from envs.db_env.tasks import Problem, literal


def problem(rng: random.Random, index: int) -> Problem:
    """A problem of kind `KINDS[index % 24]` over a random domain."""
    return FullScene(rng, KINDS[index % len(KINDS)]).draw()


class FullScene(Scene):
    """A scene with longer tables, perhaps a second one that nobody asks about, and harder questions."""

    rows = (40, 78)

    def __init__(self, rng: random.Random, kind: str) -> None:
        super().__init__(rng, kind)
        other = rng.choice([domain for domain in DOMAINS if domain is not self.domain])
        self.beside = [draw_table(rng, other, rng.randint(10, 40))] if rng.random() < 0.5 else []

    def draw(self) -> Problem:
        self.hard = self.rng.random() < 0.5
        drawn = super().draw()
        drawn.tables = [self.table, *self.beside]
        return drawn

    def year(self) -> tuple[str, str]:
        """A condition on the year of some row: words and SQL."""
        date = self.domain.date[0]
        year = int(self.row()[date][:4])
        word, sign = self.rng.choice((("after", ">"), ("before", "<"), ("in", "=")))
        return f"{date} is {word} {year}", f"YEAR({tick(date)}) {sign} {year}"

    def other(self) -> Problem:
        if not self.hard:
            return super().other()
        row, key, date = self.row(), self.domain.key, self.domain.date[0]
        word, order = self.rng.choice((("latest", "DESC"), ("earliest", "ASC")))
        column = self.rng.choice(list(self.domain.words))
        return self.problem(
            f"Among all {self.nouns} that have the same {column} as {row[key]}, which one has the {word} {date}?",
            f"SELECT {tick(key)} FROM {self.name} WHERE {tick(column)} = (SELECT {tick(column)} FROM {self.name} "
            f"WHERE {tick(key)} = {literal(row[key])}) ORDER BY {tick(date)} {order} LIMIT 1")

    def counting(self) -> Problem:
        if not self.hard:
            return super().counting()
        column, expression = self.number()
        words, condition = self.rng.choice((self.group, self.year))()
        return self.problem(f"How many {self.nouns} whose {words} have a {column} above the average of all {self.nouns}?",
                            f"SELECT COUNT(*) FROM {self.name} WHERE {condition} AND {expression} > "
                            f"(SELECT AVG({expression}) FROM {self.name})")

    def comparison(self) -> Problem:
        if not self.hard:
            return super().comparison()
        (column, expression), row, key = self.number(), self.row(), self.domain.key
        words, condition = self.group()
        word, sign = self.rng.choice((("greater", ">"), ("smaller", "<")))
        return self.problem(f"Which {self.nouns} whose {words} have a {word} {column} than {row[key]}? Give each {key}.",
                            f"SELECT {tick(key)} FROM {self.name} WHERE {condition} AND {expression} {sign} "
                            f"(SELECT {expression} FROM {self.name} WHERE {tick(key)} = {literal(row[key])})")

    def ranking(self) -> Problem:
        if not self.hard:
            return super().ranking()
        (column, expression), group = self.number(), self.rng.choice(list(self.domain.words))
        word, order = self.rng.choice((("highest", "DESC"), ("lowest", "ASC")))
        if self.rng.random() < 0.5:
            return self.problem(f"Which {group} has the {word} total {column} over its {self.nouns}?",
                                f"SELECT {tick(group)} FROM {self.name} GROUP BY {tick(group)} "
                                f"ORDER BY SUM({expression}) {order} LIMIT 1")
        words, condition = self.year()
        return self.problem(f"Counting only {self.nouns} whose {words}, which one comes second when they are sorted by "
                            f"{column}, {word} first?", f"SELECT {tick(self.domain.key)} FROM {self.name} WHERE {condition} "
                            f"ORDER BY {expression} {order} LIMIT 1 OFFSET 1")

    def aggregation(self, function: str) -> Problem:
        drawn = super().aggregation(function)
        if not self.hard:
            return drawn
        words, condition = self.year()
        question, ending = drawn.question, ""
        if question.endswith(" Round to two decimals."):
            question, ending = question.removesuffix(" Round to two decimals."), " Round to two decimals."
        return self.problem(f"{question} Count only {self.nouns} whose {words}.{ending}", f"{drawn.sql[0]} AND {condition}")

    def insert(self) -> Problem:
        if not self.hard:
            return super().insert()
        taken = {row[0] for row in self.table["rows"]}
        free = [name for name in draw_names(self.rng, self.domain.names, 96) if name not in taken]
        rows = draw_rows(self.rng, self.domain, free[:2])
        listed = "; ".join(", ".join(f"{column} {value!r}" for column, value in zip(self.domain.columns, row)) for row in rows)
        values = ", ".join(f"({', '.join(map(literal, row))})" for row in rows)
        return self.problem(f"Add two new {self.nouns} to the table {self.table['name']}: {listed}.",
                            f"INSERT INTO {self.name} ({', '.join(map(tick, self.domain.columns))}) VALUES {values}",
                            changes=True)

    def update(self) -> Problem:
        if not self.hard:
            return super().update()
        (column, expression), (words, condition) = self.number(), self.group()
        more, second = self.year()
        step = self.rng.randint(2, 50)
        return self.problem(f"Raise the {column} of every {self.noun} whose {words} and whose {more} by {step}.",
                            f"UPDATE {self.name} SET {tick(column)} = {expression} + {step} WHERE {condition} AND {second}",
                            changes=True)

    def delete(self) -> Problem:
        if not self.hard:
            return super().delete()
        (words, condition), (more, second) = self.year(), self.threshold()
        return self.problem(f"Delete every {self.noun} whose {words} and whose {more} from {self.table['name']}.",
                            f"DELETE FROM {self.name} WHERE {condition} AND {second}", changes=True)
