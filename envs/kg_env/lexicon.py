"""Words of the generated graphs: names of entities, put together from the slots of the schema's name patterns."""

from __future__ import annotations

# Micro names are drawn anew for every question, "adjective noun": a name says nothing about the type behind it.
MICRO_ADJECTIVES = ("red blue green gold silver black white gray dark light cold warm old new big small long short high low "
                    "fast slow soft hard dry wet deep wild quiet loud sweet bitter young early late north south east west "
                    "round").split()
MICRO_NOUNS = ("river hill lake stone tree bird fox wolf bear horse moon star sun cloud rain snow wind fire sand wave road "
               "bridge tower garden field forest island valley harbor castle window door lamp clock bell drum song dream "
               "shadow crown").split()

LEXICON = {
    "first": ("Ada Alma Anton Beatrix Bela Carl Clara Dario Edith Elias Emil Enzo Felix Flora Greta Hugo Ida Igor Ines Ivan "
              "Jana Jonas Karin Lars Lena Leon Livia Magda Marta Milo Nadia Nils Nora Olga Oscar Otto Paula Petra Rafael "
              "Rosa Ruben Selma Simon Sofia Tilda Tomas Vera Viktor Wanda Yusuf").split(),
    "last": ("Abbot Adler Alder Banks Barlow Becker Bellamy Brandt Calder Castell Corbin Dalton Decker Draper Ekman Ellery "
             "Falk Fenwick Garner Gilmore Hale Harlow Hartman Holt Ibsen Jansen Keller Kessler Lachance Larkin Lindqvist "
             "Marsh Mercer Moreau Nolan Novak Ortega Palmer Quill Ramsey Renner Sandoval Sharp Thorne Ulrich Vance Voss "
             "Weller Winter Yates Zeller").split(),
    "adjective": ("Amber Ancient Bitter Bright Broken Burning Crimson Distant Eager Early Endless Fading Fallen Final "
                  "Frozen Gentle Golden Hidden Hollow Iron Ivory Lonely Lost Midnight Modern Nordic Pale Quiet Restless "
                  "Rising Scarlet Secret Silent Silver Southern Stolen Summer Velvet Wandering Western").split(),
    "noun": ("Anchor Arrow Beacon Canyon Cathedral Circle Comet Compass Crown Current Desert Diary Ember Engine Falcon "
             "Forest Garden Harbor Horizon Island Journey Lantern Letter Lighthouse Meadow Mirror Mountain Orchard Palace "
             "Raven River Shadow Signal Station Stranger Tide Tower Valley Voyage Window").split(),
    "place": ("Alden Arling Aven Bram Brook Calder Carl Cran Dun Edge Elm Fair Glen Grant Hart Haven Kings Lang Mill North "
              "Oak Pem Port Raven Rock Sel Stan Thorn Wake Wal West Win").split(),
    "suffix": "borough bridge bury dale field ford ham mouth port stead ton wick".split(),
    "realm": "land mark ovia stan esia".split(),
    "film_genre": ("Western,Thriller,Film noir,Road movie,Melodrama,Space opera,Heist film,Slapstick,War film,Disaster film,"
                   "Mockumentary,Costume drama,Screwball comedy,Musical film,Ghost film,Courtroom drama").split(","),
    "book_genre": ("Satire,Fable,Saga,Memoir,Travelogue,Gothic fiction,Spy fiction,Sea story,Verse novel,Epistolary novel,"
                   "Detective fiction,Picaresque,Utopian fiction,Family saga,Historical novel,Folk tale").split(","),
    "field": ("Algebra,Anatomy,Astronomy,Botany,Chemistry,Ecology,Economics,Ethics,Geology,Geometry,Grammar,History,Law,"
              "Linguistics,Logic,Medicine,Meteorology,Music theory,Optics,Philology,Physics,Rhetoric,Statistics,"
              "Zoology").split(","),
    "instrument": "flute harp lute drum horn zither fiddle".split(),
    "ingredient": "barley bean beet cabbage carrot cheese fennel leek lentil mushroom pepper plum rice turnip".split(),
    "meal": "soup stew pie salad curry dumplings".split(),
    "number": [str(number) for number in range(100, 1000, 10)],
    "ordinal": ["", *(" " + ordinal for ordinal in "II III IV V VI VII VIII IX X XI XII XIII XIV XV XVI".split())]}
