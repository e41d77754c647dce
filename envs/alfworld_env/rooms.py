"""Facts about ALFRED's 120 rooms: what stands where, what fits into what, what can be done with what.

Measured on the 3,553 solvable training games of ALFWorld (json_2.1.1); names are ALFRED's types in lower case.
"""

from __future__ import annotations

# room -> receptacle type -> (share of rooms that have it, fewest, 90th percentile of how many)
RECEPTACLES: dict[str, dict[str, tuple[float, int, int]]] = {
    "kitchen": {"cabinet": (1.00, 2, 21), "coffeemachine": (1.00, 1, 1), "countertop": (1.00, 1, 3),
                "diningtable": (0.56, 1, 2), "drawer": (0.98, 1, 12), "fridge": (1.00, 1, 1), "garbagecan": (1.00, 1, 1),
                "microwave": (1.00, 1, 1), "safe": (0.04, 1, 1), "shelf": (0.21, 3, 3), "sidetable": (0.11, 1, 1),
                "sinkbasin": (1.00, 1, 1), "stoveburner": (1.00, 4, 4), "toaster": (1.00, 1, 1)},
    "living": {"armchair": (0.92, 1, 2), "cabinet": (0.16, 1, 8), "coffeetable": (0.82, 1, 2), "desk": (0.02, 1, 1),
                "diningtable": (0.47, 1, 2), "drawer": (0.79, 1, 8), "dresser": (0.39, 1, 1), "garbagecan": (1.00, 1, 1),
                "ottoman": (0.13, 1, 1), "safe": (0.02, 1, 1), "shelf": (0.38, 1, 13), "sidetable": (0.81, 1, 3),
                "sofa": (1.00, 1, 2), "tvstand": (0.35, 1, 2)},
    "bedroom": {"armchair": (0.20, 1, 3), "bed": (1.00, 1, 2), "cabinet": (0.17, 1, 4), "countertop": (0.03, 1, 1),
                "desk": (0.69, 1, 2), "diningtable": (0.14, 1, 1), "drawer": (0.96, 2, 11), "dresser": (0.44, 1, 2),
                "garbagecan": (1.00, 1, 1), "laundryhamper": (0.28, 1, 1), "safe": (0.15, 1, 1), "shelf": (0.67, 1, 9),
                "sidetable": (0.67, 1, 2)},
    "bathroom": {"bathtubbasin": (0.68, 1, 1), "cabinet": (0.44, 2, 5), "cart": (0.09, 1, 1), "countertop": (0.87, 1, 2),
                "drawer": (0.60, 1, 8), "dresser": (0.10, 1, 1), "garbagecan": (1.00, 1, 1), "handtowelholder": (1.00, 1, 2),
                "shelf": (0.28, 1, 4), "sidetable": (0.06, 1, 1), "sinkbasin": (1.00, 1, 2), "toilet": (1.00, 1, 1),
                "toiletpaperhanger": (1.00, 1, 1), "towelholder": (1.00, 1, 2)},
}
# room -> type of portable object (and desk lamp) -> (share of rooms that have it, most instances)
OBJECTS: dict[str, dict[str, tuple[float, int]]] = {
    "kitchen": {"apple": (1.00, 4), "book": (0.12, 3), "bowl": (1.00, 4), "bread": (1.00, 4), "butterknife": (0.96, 4),
                "cellphone": (0.11, 3), "creditcard": (0.09, 3), "cup": (1.00, 4), "dishsponge": (1.00, 3), "egg": (1.00, 4),
                "fork": (1.00, 3), "glassbottle": (0.24, 3), "kettle": (0.53, 4), "knife": (1.00, 3), "ladle": (0.36, 4),
                "lettuce": (1.00, 4), "mug": (1.00, 4), "pan": (1.00, 3), "papertowelroll": (0.35, 1), "pen": (0.06, 3),
                "pencil": (0.07, 3), "peppershaker": (1.00, 4), "plate": (1.00, 4), "pot": (1.00, 3), "potato": (1.00, 4),
                "saltshaker": (1.00, 4), "soapbottle": (1.00, 3), "spatula": (1.00, 4), "spoon": (1.00, 4),
                "spraybottle": (0.06, 3), "statue": (0.16, 3), "tomato": (1.00, 4), "vase": (0.16, 3),
                "winebottle": (0.42, 4)},
    "living": {"book": (0.27, 4), "bowl": (0.09, 3), "box": (1.00, 3), "candle": (0.09, 3), "cellphone": (0.23, 3),
                "creditcard": (1.00, 4), "desklamp": (0.26, 1), "keychain": (1.00, 4), "laptop": (1.00, 3),
                "newspaper": (0.61, 4), "pen": (0.21, 3), "pencil": (0.17, 4), "pillow": (1.00, 3), "plate": (0.32, 3),
                "remotecontrol": (1.00, 4), "statue": (0.96, 7), "tissuebox": (0.35, 4), "vase": (0.58, 6),
                "watch": (0.48, 4), "wateringcan": (0.52, 3)},
    "bedroom": {"alarmclock": (1.00, 4), "book": (1.00, 4), "bowl": (0.43, 4), "box": (0.48, 1), "cd": (1.00, 4),
                "cellphone": (1.00, 4), "cloth": (0.20, 3), "creditcard": (1.00, 4), "desklamp": (0.70, 2),
                "keychain": (1.00, 4), "laptop": (1.00, 4), "mug": (0.51, 3), "pen": (1.00, 4), "pencil": (1.00, 4),
                "pillow": (1.00, 4), "remotecontrol": (0.13, 3), "statue": (0.15, 3), "teddybear": (0.34, 1),
                "tissuebox": (0.15, 4), "vase": (0.05, 3), "watch": (0.07, 4)},
    "bathroom": {"candle": (1.00, 4), "cloth": (1.00, 4), "dishsponge": (0.24, 4), "handtowel": (1.00, 2),
                "papertowelroll": (0.15, 1), "soapbar": (1.00, 4), "soapbottle": (1.00, 4), "spraybottle": (1.00, 4),
                "tissuebox": (0.26, 4), "toiletpaper": (1.00, 4), "towel": (1.00, 2)},
}
# receptacle type -> object types that the domain lets be put there
CONTAINS: dict[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in {
    "armchair": "book box cellphone cloth creditcard keychain laptop newspaper pillow remotecontrol",
    "bathtubbasin": "cloth dishsponge handtowel soapbar",
    "bed": "baseballbat basketball book cellphone laptop pillow tennisracket",
    "cabinet": ("book bowl box candle cd cloth cup dishsponge glassbottle handtowel kettle ladle mug newspaper pan "
        "peppershaker plate plunger pot saltshaker soapbar soapbottle spraybottle tissuebox toiletpaper vase "
        "wateringcan winebottle"),
    "cart": "candle cloth dishsponge handtowel plunger soapbar soapbottle spraybottle tissuebox toiletpaper",
    "coffeemachine": "mug",
    "coffeetable": ("book bowl box candle cellphone creditcard keychain laptop newspaper pen pencil plate remotecontrol "
        "statue tissuebox vase watch wateringcan"),
    "countertop": ("alarmclock apple book bowl bread butterknife candle cd cellphone cloth creditcard cup dishsponge egg "
        "fork glassbottle handtowel kettle keychain knife ladle laptop lettuce mug pan pen pencil peppershaker "
        "plate pot potato remotecontrol saltshaker soapbar soapbottle spatula spoon spraybottle statue tissuebox "
        "toiletpaper tomato vase winebottle"),
    "desk": ("alarmclock basketball book bowl box cd cellphone cloth creditcard keychain laptop mug pen pencil "
        "remotecontrol statue tennisracket tissuebox vase watch wateringcan"),
    "diningtable": ("alarmclock apple baseballbat basketball book bowl box bread butterknife candle cd cellphone cloth "
        "creditcard cup dishsponge egg fork glassbottle kettle keychain knife ladle laptop lettuce mug newspaper "
        "pan pen pencil peppershaker plate pot potato remotecontrol saltshaker soapbottle spatula spoon "
        "spraybottle statue tennisracket tissuebox tomato vase watch wateringcan winebottle"),
    "drawer": ("book butterknife candle cd cellphone cloth creditcard dishsponge fork handtowel keychain knife ladle "
        "newspaper pen pencil peppershaker remotecontrol saltshaker soapbar soapbottle spatula spoon spraybottle "
        "tissuebox toiletpaper watch wateringcan"),
    "dresser": ("alarmclock basketball book bowl box candle cd cellphone cloth creditcard keychain laptop mug newspaper "
        "pen pencil plate remotecontrol spraybottle statue tennisracket tissuebox toiletpaper vase watch "
        "wateringcan"),
    "fridge": "apple bowl bread cup egg glassbottle lettuce mug pan plate pot potato tomato winebottle",
    "garbagecan": ("apple bread cd cloth dishsponge egg handtowel lettuce newspaper pen pencil potato soapbar soapbottle "
        "spraybottle tissuebox toiletpaper tomato winebottle"),
    "handtowelholder": "handtowel",
    "laundryhamper": "cloth",
    "microwave": "apple bowl bread cup egg glassbottle mug plate potato tomato",
    "ottoman": "book box cellphone creditcard keychain laptop newspaper pillow remotecontrol",
    "safe": "cd cellphone creditcard keychain statue vase",
    "shelf": ("alarmclock book bowl box candle cd cellphone cloth creditcard cup dishsponge glassbottle handtowel "
        "kettle keychain mug newspaper pen pencil peppershaker plate pot remotecontrol saltshaker soapbar "
        "soapbottle spraybottle statue tissuebox toiletpaper vase watch wateringcan winebottle"),
    "sidetable": ("alarmclock apple baseballbat basketball book bowl box bread butterknife candle cd cellphone cloth "
        "creditcard cup dishsponge egg fork handtowel kettle keychain knife laptop lettuce mug newspaper pan pen "
        "pencil peppershaker plate pot potato remotecontrol saltshaker soapbar soapbottle spatula spoon "
        "spraybottle statue tennisracket tissuebox toiletpaper tomato vase watch wateringcan winebottle"),
    "sinkbasin": ("apple bowl butterknife cloth cup dishsponge egg fork glassbottle handtowel kettle knife ladle lettuce "
        "mug pan plate pot potato soapbar spatula spoon tomato"),
    "sofa": "book box cellphone creditcard keychain laptop newspaper pillow remotecontrol",
    "stoveburner": "kettle pan pot",
    "toilet": "candle cloth dishsponge handtowel soapbar soapbottle spraybottle tissuebox toiletpaper",
    "toiletpaperhanger": "toiletpaper",
    "towelholder": "towel",
    "tvstand": "tissuebox",
}.items()}
# receptacle type -> share of its instances that open
OPENABLE = {"fridge": 1.0, "microwave": 1.0, "drawer": 0.84, "cabinet": 0.83, "safe": 0.83}
# predicate of the domain -> object types it holds for
ABLE: dict[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in {
    "heatable": "apple bread cup egg mug plate potato tomato",
    "coolable": "apple bowl bread cup egg lettuce mug pan plate pot potato tomato winebottle",
    "cleanable": ("apple bowl butterknife cloth cup dishsponge egg fork kettle knife ladle lettuce mug pan plate pot potato "
        "soapbar spatula spoon tomato"),
    "sliceable": "apple bread egg lettuce potato tomato",
    "toggleable": "desklamp floorlamp",
    "isreceptacleobject": "bowl box cup mug pan plate pot",
}.items()}
