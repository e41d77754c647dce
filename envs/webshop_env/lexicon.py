"""The words of the generated catalogues."""

from __future__ import annotations

# micro: common short words, each in one role only
MICRO_COLORS = "red blue green black white yellow brown pink gray gold silver orange".split()
MICRO_NOUNS = {"wear": "shirt hat coat scarf belt bag sock glove".split(),
               "home": "lamp table chair bowl cup box rug shelf".split()}
MICRO_OPTIONS = {"size": ("small", "large"), "fit": ("slim", "loose"), "shape": ("round", "square")}
MICRO_GROUPS = {"wear": ("size", "fit"), "home": ("size", "shape")}

# small and full: six departments of six products each; no option value contains a colour word that it is not, because agentbench's
# rules cut it to that word and then do not take it for the one that is wanted
COLORS = ("black white red navy teal olive ivory coral burgundy charcoal lavender mustard turquoise beige maroon "
          "silver").split()
SCENTS = "unscented lavender bergamot vanilla citrus cedarwood jasmine eucalyptus".split()
AUDIENCES = {"fashion": ("Men", "Women", "Teens"), "home": ("Living Room", "Bedroom", "Office"),
             "beauty": ("Dry Skin", "Sensitive Skin", "Daily Use"), "grocery": ("Snacking", "Baking", "Breakfast"),
             "electronics": ("Travel", "Home", "Gaming"), "garden": ("Patio", "Balcony", "Backyard")}
DEPARTMENTS = {
    "fashion": {
        "path": "Clothing", "price": (9, 120),
        "nouns": {"dress shirt": "Shirts", "hooded sweatshirt": "Hoodies", "running shorts": "Shorts", "winter coat": "Coats",
                  "yoga leggings": "Leggings", "ankle boots": "Boots"},
        "attributes": ("machine washable", "slim fit", "long sleeve", "quick drying", "moisture wicking", "elastic waist",
                       "button closure", "cotton spandex", "hand wash", "light weight", "water resistant", "non slip"),
        "options": {"color": COLORS, "size": ("x-small", "small", "medium", "large", "x-large", "xx-large")}},
    "home": {
        "path": "Home & Kitchen", "price": (15, 400),
        "nouns": {"console table": "Tables", "table lamp": "Lamps", "throw pillow": "Pillows", "window curtain": "Curtains",
                  "bar stool": "Stools", "storage bench": "Benches"},
        "attributes": ("solid wood", "easy assembly", "space saving", "metal legs", "mid century", "easy clean", "white finish",
                       "heavy duty", "faux leather", "high density", "super soft", "wall mounted"),
        "options": {"color": COLORS, "size": ("18 inch", "24 inch", "36 inch", "48 inch", "60 inch")}},
    "beauty": {
        "path": "Beauty & Personal Care", "price": (5, 60),
        "nouns": {"face cream": "Moisturizers", "hair shampoo": "Shampoo", "lip balm": "Lip Care", "body lotion": "Lotions",
                  "nail polish": "Nails", "beard oil": "Shaving"},
        "attributes": ("cruelty free", "paraben free", "tea tree", "essential oils", "long lasting", "sulfate free",
                       "coconut oil", "hyaluronic acid", "fragrance free", "natural ingredients", "dermatologist tested",
                       "travel size"),
        "options": {"scent": SCENTS, "size": ("2 ounce", "4 ounce", "8 ounce", "16 ounce")}},
    "grocery": {
        "path": "Grocery & Gourmet Food", "price": (4, 50),
        "nouns": {"trail mix": "Nuts", "protein bar": "Bars", "green tea": "Tea", "ground coffee": "Coffee",
                  "tortilla chips": "Chips", "oat granola": "Cereal"},
        "attributes": ("gluten free", "non gmo", "low sugar", "high protein", "dairy free", "plant based", "certified organic",
                       "low sodium", "nut free", "artificial colors free", "high fiber", "individually wrapped"),
        "options": {"flavor": ("original", "honey", "chocolate", "cinnamon", "sea salt", "maple", "cherry"),
                    "size": ("6 count", "12 count", "24 count", "48 count")}},
    "electronics": {
        "path": "Electronics", "price": (12, 600),
        "nouns": {"bluetooth speaker": "Speakers", "wireless earbuds": "Headphones", "phone charger": "Chargers",
                  "laptop stand": "Stands", "security camera": "Cameras", "smart watch": "Wearables"},
        "attributes": ("fast charging", "noise cancelling", "water proof", "hands free", "carrying case", "aluminum alloy",
                       "high resolution", "usb port", "long battery life", "motion detection", "plug and play", "dual band"),
        "options": {"color": COLORS, "style": ("single", "two pack", "bundle", "with case", "pro")}},
    "garden": {
        "path": "Patio, Lawn & Garden", "price": (10, 300),
        "nouns": {"patio umbrella": "Umbrellas", "garden hose": "Watering", "planter box": "Planters",
                  "solar light": "Lighting", "folding chair": "Chairs", "fire pit": "Heating"},
        "attributes": ("weather resistant", "rust proof", "easy install", "stainless steel", "uv protected", "drain holes",
                       "powder coated", "auto shut off", "tear resistant", "solar powered", "hand crafted", "quick connect"),
        "options": {"color": COLORS, "size": ("small", "medium", "large", "25 ft", "50 ft", "100 ft")}},
}
BRAND_STARTS = "Nor Vel Cas Bri Tam Dor Kel Lum Ster Wil Har Pen Quin Ros Fen Gal".split()
BRAND_ENDS = "vale mont wick ford line croft bury stead ton mere field worth".split()
