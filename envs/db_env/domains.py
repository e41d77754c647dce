"""The worlds of the small problems: what a table is about, its columns, and how their values are drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

FIRST = ("Alice Bruno Carla Daniel Elena Felix Greta Hassan Ingrid Jonas Keiko Liam Marta Nikolai Olga Pedro Quentin Rosa "
         "Samir Tanja Ursula Victor Wanda Xavier Yusuf Zoe").split()
LAST = ("Abbott Becker Castro Dubois Eriksen Ferrari Garcia Hoffman Ivanov Jansen Kowalski Lindqvist Moretti Novak Okafor "
        "Petrov Quinn Rossi Schmidt Tanaka Ueda Vargas Weber Young Zhang O'Brien").split()
PLACES = ("Ashford Brightwater Clearfield Dunmore Eastbrook Fairview Greenport Hillcrest Ironwood Juniper Kingsbridge Lakeside "
          "Millbrook Northgate Oakridge Pinehurst Queensbury Riverton Stonehaven Thornton Upland Valemont Westfield "
          "Yarrow").split()
ADJECTIVES = ("Silent Golden Broken Hidden Crimson Distant Electric Frozen Gentle Hollow Lonely Midnight Northern "
              "Painted").split()
NOUNS = "River Garden Mirror Harbor Lantern Orchard Compass Shadow Winter Bridge Signal Forest Island Letter".split()


@dataclass(frozen=True, slots=True)
class Domain:
    """A table theme. `key` names the column of unique names; `words` maps category columns to their values; `numbers` maps
    number columns to their ranges; `date` is a date column with its years."""

    table: str
    noun: str
    key: str
    names: str
    words: dict[str, tuple[str, ...]]
    numbers: dict[str, tuple[int, int]]
    date: tuple[str, int, int]

    @property
    def columns(self) -> list[str]:
        return [self.key, *self.words, *self.numbers, self.date[0]]


_NAMES = {"person": [f"{first} {last}" for first in FIRST for last in LAST],
          "place": [f"{place} {suffix}" for place in PLACES for suffix in ("Central", "Park", "North", "Old Town")],
          "title": [f"The {adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]}


def draw_names(rng: random.Random, style: str, count: int) -> list[str]:
    """`count` distinct names in the style "person", "place" or "title"."""
    return rng.sample(_NAMES[style], count)


def draw_rows(rng: random.Random, domain: Domain, names: list[str]) -> list[list[str]]:
    """A row of texts for each name, in the order of `domain.columns`."""
    count, (_, first_year, last_year) = len(names), domain.date
    words = [rng.choices(values, k=count) for values in domain.words.values()]
    numbers = [list(map(str, rng.choices(range(low, high + 1), k=count))) for low, high in domain.numbers.values()]
    days = zip(rng.choices(range(first_year, last_year + 1), k=count), rng.choices(range(1, 13), k=count),
               rng.choices(range(1, 29), k=count))
    dates = [f"{year}-{month:02}-{day:02}" for year, month, day in days]
    return [list(row) for row in zip(names, *words, *numbers, dates)]


def draw_table(rng: random.Random, domain: Domain, rows: int) -> dict[str, Any]:
    """A table of `rows` rows; every column is TEXT, as in the official set."""
    return {"name": domain.table, "columns": [[column, "TEXT"] for column in domain.columns],
            "rows": draw_rows(rng, domain, draw_names(rng, domain.names, rows))}


DOMAINS = (
    Domain("Employee Records", "employee", "Employee", "person",
           {"Department": ("Finance", "Engineering", "Marketing", "Legal", "Support"),
            "Office": ("Lisbon", "Oslo", "Denver", "Osaka")},
           {"Salary (USD)": (28000, 145000), "Years of Service": (0, 35)}, ("Hire Date", 1990, 2023)),
    Domain("football_players", "player", "Player", "person",
           {"Position": ("Goalkeeper", "Defender", "Midfielder", "Forward"),
            "Nationality": ("Brazil", "Spain", "Ghana", "Japan", "Norway", "Chile")},
           {"Goals": (0, 42), "Appearances": (1, 380), "Assists": (0, 60)}, ("Debut", 1995, 2022)),
    Domain("Film Catalogue", "film", "Title", "title",
           {"Genre": ("Drama", "Comedy", "Thriller", "Documentary", "Western"),
            "Country": ("France", "Italy", "India", "Canada", "Mexico")},
           {"Running Time": (71, 214), "Box Office (thousands)": (120, 98000)}, ("Release Date", 1960, 2020)),
    Domain("library_loans", "book", "Book", "title",
           {"Section": ("History", "Science", "Fiction", "Travel"), "Language": ("English", "German", "Polish", "Korean")},
           {"Pages": (64, 1150), "Copies": (1, 24), "Times Borrowed": (0, 310)}, ("Acquired", 1985, 2023)),
    Domain("Railway Stations", "station", "Station", "place",
           {"Line": ("Red Line", "Coast Line", "Valley Line", "Airport Express"), "Zone": ("A", "B", "C", "D")},
           {"Platforms": (1, 18), "Daily Passengers": (150, 98000)}, ("Opened", 1870, 2015)),
    Domain("hospital_patients", "patient", "Patient", "person",
           {"Ward": ("Cardiology", "Neurology", "Surgery", "Maternity"), "Blood Type": ("A+", "B+", "O-", "AB+")},
           {"Age": (1, 97), "Visits": (1, 28), "Days in Care": (1, 45)}, ("Admitted", 2015, 2023)),
    Domain("Power Plants", "plant", "Plant", "place",
           {"Fuel": ("Hydro", "Gas", "Wind", "Nuclear", "Solar"), "Operator": ("Norvolt", "Sunbelt Power", "Delta Energy")},
           {"Capacity (MW)": (5, 3200), "Units": (1, 12)}, ("Commissioned", 1950, 2020)),
    Domain("Race Results", "driver", "Driver", "person",
           {"Team": ("Falcon Racing", "Apex GP", "Nordic Motors", "Scuderia Blu"),
            "Class": ("GT3", "Prototype", "Touring")},
           {"Laps": (3, 78), "Points": (0, 412), "Pit Stops": (0, 9)}, ("Licence Date", 1998, 2021)),
    Domain("hotel_listing", "hotel", "Hotel", "place",
           {"Category": ("Budget", "Business", "Luxury", "Boutique"), "Region": ("Coast", "Mountains", "City", "Countryside")},
           {"Rooms": (8, 640), "Price per Night": (35, 890), "Reviews": (0, 4200)}, ("Renovated", 2000, 2023)),
    Domain("University Courses", "course", "Course", "title",
           {"Faculty": ("Arts", "Physics", "Medicine", "Law", "Economics"), "Term": ("Autumn", "Winter", "Spring", "Summer")},
           {"Credits": (2, 15), "Enrolled": (4, 380)}, ("First Offered", 1980, 2022)),
    Domain("Museum Exhibits", "exhibit", "Exhibit", "title",
           {"Gallery": ("East Wing", "West Wing", "Rotunda", "Annex"),
            "Material": ("Bronze", "Marble", "Oil", "Wood", "Glass")},
           {"Height (cm)": (4, 620), "Insured Value": (400, 950000)}, ("Acquisition Date", 1920, 2022)),
    Domain("shipping_log", "cargo ship", "Vessel", "title",
           {"Flag": ("Panama", "Liberia", "Malta", "Greece"), "Cargo": ("Grain", "Steel", "Timber", "Coal", "Cars")},
           {"Tonnage": (900, 84000), "Crew": (6, 34)}, ("Departure", 2005, 2023)),
)
