"""What the generated graphs are made of: types, linked relations, attributes, names. Pure data.

Each `Link` is a relation with its inverse, as every edge of Freebase has one. `phrase` says the relation in a question
("directors of {}"), `inverse_phrase` the way back ("films directed by {}").
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    relation: str
    inverse: str
    degree: tuple[int, int]                                 # edges per entity of the relation's own type
    phrase: str
    inverse_phrase: str


@dataclass(frozen=True, slots=True)
class Attribute:
    """A number that every entity of `type` has, drawn from `low..high`. `noun` names it in questions."""

    name: str
    type: str
    low: int
    high: int
    noun: str


@dataclass(frozen=True)
class Schema:
    """`types`: type -> (number of entities, name pattern over LEXICON slots, None where questions give names of their own)."""

    types: dict[str, tuple[int, str | None]]
    links: tuple[Link, ...]
    attributes: tuple[Attribute, ...]


def _plain(own: str, inverse: str, low: int, high: int) -> Link:
    """A link of the micro schema, where the phrase is the relation's last word."""
    return Link(own, inverse, (low, high), own.split(".")[1] + " of {}", inverse.split(".")[1] + " of {}")


MICRO = Schema(
    types={"author": (100, None), "book": (150, None), "film": (150, None), "genre": (12, None), "actor": (80, None),
           "city": (60, None), "team": (40, None), "player": (160, None)},
    links=(_plain("book.author", "author.books", 1, 1), _plain("book.genre", "genre.books", 1, 1),
           _plain("film.book", "book.films", 1, 1), _plain("film.genre", "genre.films", 1, 1),
           _plain("film.actors", "actor.films", 2, 3), _plain("author.city", "city.authors", 1, 1),
           _plain("actor.city", "city.actors", 1, 1), _plain("team.city", "city.teams", 1, 1),
           _plain("player.team", "team.players", 1, 1), _plain("player.city", "city.players", 1, 1)),
    attributes=(Attribute("book.pages", "book", 40, 999, "pages"), Attribute("book.cost", "book", 5, 99, "cost"),
                Attribute("film.cost", "film", 5, 99, "cost"), Attribute("film.length", "film", 60, 240, "length"),
                Attribute("player.age", "player", 17, 45, "age"), Attribute("player.goals", "player", 1, 400, "goals")))

SMALL = Schema(
    types={
        "film.film": (600, "The {adjective} {noun}"), "film.director": (200, "{first} {last}"),
        "film.actor": (450, "{first} {last}"), "film.film_genre": (16, "{film_genre}"),
        "film.production_company": (60, "{adjective} {noun} Pictures"), "book.book": (600, "{noun} of {place}"),
        "book.author": (300, "{first} {last}"), "book.publisher": (60, "{last} and {last} Publishing"),
        "book.literary_genre": (16, "{book_genre}"), "music.album": (500, "{adjective} {noun}s"),
        "music.artist": (250, "{first} {last}"), "music.record_label": (50, "{adjective} {noun} Records"),
        "music.instrument": (20, "{adjective} {instrument}"), "location.city": (250, "{place}{suffix}"),
        "location.country": (40, "{place}{realm}"), "education.university": (150, "University of {place}{suffix}"),
        "education.field_of_study": (24, "{field}"), "sports.team": (120, "{place} {noun}s"),
        "sports.athlete": (600, "{first} {last}"), "sports.stadium": (120, "{place}{suffix} Arena"),
        "sports.league": (12, "{adjective} League"), "award.award": (40, "{last} Prize"),
        "aviation.airport": (150, "{place}{suffix} Airport"), "aviation.airline": (60, "{adjective} {noun} Airways"),
        "aviation.aircraft_model": (60, "{last} {number}"), "aviation.manufacturer": (12, "{last} Aircraft"),
        "food.dish": (200, "{adjective} {ingredient} {meal}"), "food.ingredient": (60, "{adjective} {ingredient}")},
    links=(
        Link("film.film.directed_by", "film.director.films", (1, 2), "directors of {}", "films directed by {}"),
        Link("film.film.starring", "film.actor.films", (2, 5), "actors starring in {}", "films starring {}"),
        Link("film.film.genre", "film.film_genre.films_in_this_genre", (1, 2), "film genres of {}", "films classified as {}"),
        Link("film.film.production_companies", "film.production_company.films", (1, 2), "production companies behind {}",
             "films produced by {}"),
        Link("film.film.based_on", "book.book.film_adaptations", (0, 1), "books that {} is based on", "film adaptations of {}"),
        Link("film.film.featured_locations", "location.city.featured_in_films", (0, 2), "cities featured in {}",
             "films set in {}"),
        Link("book.book.written_by", "book.author.works_written", (1, 2), "authors of {}", "books written by {}"),
        Link("book.book.published_by", "book.publisher.books_published", (1, 1), "publishers of {}", "books published by {}"),
        Link("book.book.genre", "book.literary_genre.books_in_this_genre", (1, 2), "literary genres of {}",
             "books classified as {}"),
        Link("book.book.subjects", "education.field_of_study.books_on_this_subject", (0, 2), "subjects of {}",
             "books about {}"),
        Link("book.author.influenced_by", "book.author.influenced", (0, 3), "authors who influenced {}",
             "authors influenced by {}"),
        Link("book.author.alma_mater", "education.university.author_alumni", (1, 1), "universities attended by {}",
             "authors who studied at {}"),
        Link("music.album.artist", "music.artist.albums", (1, 1), "artists of {}", "albums by {}"),
        Link("music.album.label", "music.record_label.albums", (1, 1), "record labels of {}", "albums released by {}"),
        Link("music.album.soundtrack_of", "film.film.soundtracks", (0, 1), "films that use {} as soundtrack",
             "soundtrack albums of {}"),
        Link("music.artist.instruments_played", "music.instrument.played_by", (1, 3), "instruments played by {}",
             "artists who play {}"),
        Link("music.artist.origin", "location.city.musical_artists", (1, 1), "home cities of {}", "musical artists from {}"),
        Link("location.city.country", "location.country.cities", (1, 1), "countries of {}", "cities in {}"),
        Link("location.city.twin_towns", "location.city.twin_town_of", (0, 2), "twin towns of {}",
             "cities that have {} as twin town"),
        Link("education.university.city", "location.city.universities", (1, 1), "cities where {} is located",
             "universities in {}"),
        Link("education.university.fields", "education.field_of_study.taught_at", (2, 5), "fields taught at {}",
             "universities that teach {}"),
        Link("sports.team.home_city", "location.city.teams", (1, 1), "home cities of the team {}", "teams based in {}"),
        Link("sports.team.players", "sports.athlete.teams", (5, 9), "players of {}", "teams that employed {}"),
        Link("sports.team.stadium", "sports.stadium.home_teams", (1, 1), "stadiums of {}", "teams that play at {}"),
        Link("sports.team.league", "sports.league.teams", (1, 1), "leagues of {}", "teams in {}"),
        Link("sports.athlete.nationality", "location.country.athletes", (1, 1), "nationalities of {}", "athletes from {}"),
        Link("film.actor.nationality", "location.country.actors", (1, 1), "home countries of {}", "actors from {}"),
        Link("award.award.directors_honored", "film.director.awards_won", (3, 9), "directors honored with {}",
             "film awards won by {}"),
        Link("award.award.authors_honored", "book.author.awards_won", (3, 9), "authors honored with {}",
             "literary awards won by {}"),
        Link("aviation.airport.city_served", "location.city.airports", (1, 1), "cities served by {}", "airports that serve {}"),
        Link("aviation.airline.hubs", "aviation.airport.hub_for", (1, 4), "hub airports of {}", "airlines with a hub at {}"),
        Link("aviation.airline.fleet", "aviation.aircraft_model.operators", (2, 6), "aircraft models flown by {}",
             "airlines that fly {}"),
        Link("aviation.aircraft_model.manufacturer", "aviation.manufacturer.models", (1, 1), "manufacturers of {}",
             "aircraft models made by {}"),
        Link("food.dish.ingredients", "food.ingredient.used_in_dishes", (2, 5), "ingredients of {}", "dishes made with {}"),
        Link("food.dish.country_of_origin", "location.country.dishes", (1, 1), "countries of origin of {}",
             "dishes from {}")),
    attributes=(
        Attribute("film.film.runtime_minutes", "film.film", 61, 240, "runtime"),
        Attribute("film.film.release_year", "film.film", 1921, 2020, "release year"),
        Attribute("film.actor.birth_year", "film.actor", 1901, 2000, "birth year"),
        Attribute("film.director.birth_year", "film.director", 1901, 1995, "birth year"),
        Attribute("book.book.number_of_pages", "book.book", 48, 1400, "number of pages"),
        Attribute("book.book.publication_year", "book.book", 1780, 2020, "publication year"),
        Attribute("book.author.birth_year", "book.author", 1750, 1995, "birth year"),
        Attribute("music.album.release_year", "music.album", 1950, 2022, "release year"),
        Attribute("music.album.length_seconds", "music.album", 1200, 6000, "length"),
        Attribute("location.city.population", "location.city", 4000, 9_000_000, "population"),
        Attribute("location.city.elevation_meters", "location.city", 0, 3600, "elevation"),
        Attribute("location.country.area_km2", "location.country", 300, 3_000_000, "area"),
        Attribute("education.university.number_of_students", "education.university", 900, 90_000, "number of students"),
        Attribute("education.university.founding_year", "education.university", 1180, 1990, "founding year"),
        Attribute("sports.athlete.height_cm", "sports.athlete", 155, 218, "height"),
        Attribute("sports.athlete.birth_year", "sports.athlete", 1940, 2004, "birth year"),
        Attribute("sports.team.founding_year", "sports.team", 1860, 2010, "founding year"),
        Attribute("sports.stadium.capacity", "sports.stadium", 2000, 99_000, "capacity"),
        Attribute("aviation.aircraft_model.range_km", "aviation.aircraft_model", 600, 17_000, "range"),
        Attribute("aviation.airport.elevation_meters", "aviation.airport", 0, 3600, "elevation"),
        Attribute("food.dish.preparation_minutes", "food.dish", 5, 240, "preparation time")))

# The small world eight times over, but for the closed lists (genres, fields, leagues, ...); names repeat with an ordinal.
_CLOSED = ("film.film_genre", "book.literary_genre", "music.instrument", "education.field_of_study", "sports.league",
           "aviation.manufacturer")
FULL = Schema({name: (count, pattern) if name in _CLOSED else (8 * count, pattern + "{ordinal}")
               for name, (count, pattern) in SMALL.types.items()}, SMALL.links, SMALL.attributes)

SCHEMAS = {"micro": MICRO, "small": SMALL, "full": FULL}
