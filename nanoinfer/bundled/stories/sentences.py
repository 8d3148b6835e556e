"""The sentences of the stories: every rule of the grammar except the twelve plots, which are in plots.py.

grammar.py says how a slot is read. __init__.py has the cast (hero, kind, friend, place, color, toy, n, ...). A slot that is
not in the cast is a rule below, and is drawn anew each time. Earlier alternatives are more likely.

A new sentence must keep three properties, which tests check. For 60 tokens or more after the opening, only pronouns name the
hero. The last name in a story is the hero's. A story has fewer than 200 tokens.
"""

from nanoinfer.bundled.stories.plots import PLOTS

RULES = {
    "story": "{opening} {about} {day} {plot} {ending}",
    # Tales are for training only: very short stories, and scenes in which a thing, a colour or a number returns.
    "tale": """
        {opening} {day} {scene} {ending}
        {opening} {ending}
    """,
    "scene": """
        {lost_it} {look_then}
        {found_it} {keep_it} {tell_color}
        {a_gift} {meet_two} {give} {ask} {answer}
        {how_old} {candles} {a_present}
        {have} {meet} {give_some}
        {wanted} {worked}
        {a_map} {read_map} {dig}
    """,
    "question": """
        Tell me a story about {hero}
        Please tell me a story about {hero}.
        Can you tell me a story about {hero}?
    """,
    # The hero. From here to the middle of the plot, only pronouns name the hero.
    "opening": """
        Once upon a time, there was {a trait} {kind} named {hero}.
        {Hero} was {a trait} {kind} with {feature}.
        Once there lived {a look} {kind} called {hero}.
        Long ago, {a trait} {kind} named {hero} lived {home}.
        This is the story of {hero}, {a look}, {trait} {kind}.
        Far away, {home}, there lived {a trait} {kind} named {hero}.
    """,
    "he": "{hero.he}",
    "him": "{hero.him}",
    "his": "{hero.his}",
    "trait": "kind|brave|clever|curious|cheerful|shy|gentle|honest|funny|lively|patient|polite|silly|quiet|friendly|helpful",
    "look": "little|tiny|big|young|round|tall|fluffy|small|skinny|plump",
    "feature": """
        a warm heart | big eyes | a loud laugh | a lovely smile | a good memory | messy hair | long ears | quick feet
        a soft voice | a wild imagination
    """,
    "home": "in {a house_look} {house} {nearby}",
    "house_look": "cozy|wooden|crooked|narrow|simple|dusty|pretty",
    "house": "cottage|house|cabin|hut|tower|tent|windmill",
    "nearby": "by the sea|near the woods|on a hill|beside a waterfall|at the edge of town|in the valley|under a rainbow",
    "about": """
        {He} loved to {hobby}, and {he} liked {meal} best of all.
        Every morning, {he} ate {number} {snack} for breakfast.
        {He} had {number} brothers and {number} sisters, and they were all {mood}.
        {He} always wore {a shade} {clothing}, even in bed.
        More than anything, {he} wanted to see {wonder}.
        Everyone liked {him}, because {he} was so {trait}.
        {He} could {hobby} better than anyone else.
    """,
    "hobby": """
        climb trees|sing songs|draw pictures|tell jokes|bake bread|collect shells|watch birds|build towers|ride a bicycle
        jump rope|read books|catch butterflies
    """,
    "meal": "soup|pie|rice|pancakes|honey|noodles|salad|toast|porridge|pudding",
    "snack": "pancakes|muffins|carrots|eggs|waffles|bananas|crackers|biscuits",
    "number": "two|three|four|five|six|seven|eight|nine|ten",
    "family": "mother|father|grandmother|grandfather|aunt|uncle",
    "mood": "happy|hungry|noisy|sleepy|proud|merry|busy|tired|grumpy",
    "clothing": "coat|dress|sweater|shirt|cape|jacket|vest|belt",
    "shade": "red|blue|green|yellow|purple|pink|white|brown|gray|black|orange|silver",
    "wonder": "a whale|the snow|a real dragon|the moon up close|a pirate ship|a circus|the ocean|a shooting star",
    "day": """
        One {weather} {daytime}, {he} went to {place}.
        On a {weather} {daytime}, {he} walked to {place} {alone}.
        One {weekday}, {he} put on {his} boots and ran to {place}.
        It was a {weather} {daytime}, so {he} {hurried} to {place}.
    """,
    "weather": "sunny|windy|cloudy|warm|cool|bright|rainy|foggy|snowy|frosty|mild|stormy",
    "daytime": "day|morning|afternoon|evening",
    "season": "spring|summer|autumn|winter",
    "alone": "alone|all by {hero.him}self|with a basket|in a good mood|with a song",
    "weekday": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
    "hurried": "hurried|skipped|raced|wandered|hopped|marched",
    "plot": "{lost}|{gift}|{found}|{share}|{help}|{hide}|{dark}|{learn}|{birthday}|{treasure}|{seed}|{build}",
    # Meeting the friend.
    "meet": """
        Just then, {friend} the {friend_kind} {came} by.
        Soon {he} met {a trait} {friend_kind} named {friend}.
        Behind {him} stood {friend}, {a look} {friend_kind}.
        After a while, {a trait} {friend_kind} called {friend} {came} along.
    """,
    "came": "came|walked|wandered|skipped|strolled|hopped",
    "said": "said|called|whispered|shouted",
    "laughed": "laughed|sang|cheered|giggled",
    "sighed": "sighed|cried|sobbed|whispered",
    "asked_it": "asked|wondered",
    "softly": "softly|happily|quickly|slowly|quietly|gladly|kindly|bravely|loudly",
    # The last name of a story is its hero's.
    "ending": """
        From then on, {friend} and {hero} were best friends.
        That night, {hero} dreamed of {wonder}.
        "What a {lovely} day!" said {hero}.
        And so {hero} learned {moral}.
        Everyone there was very proud of {hero}.
        At home, a plate of {meal} was waiting for {hero}.
        Then {friend} waved for a long time, and so did {hero}.
        {Hero} went home with {a lovely} smile and told {his} {family} about it.
        Everyone in town still tells this story about {hero}.
    """,
    "lovely": "lovely|wonderful|great|perfect|beautiful|special|magical|sweet",
    "moral": """
        that it is good to share|to be patient|that kind words help|never to give up|that a friend is a treasure
        how to say sorry|to ask for help|that small things matter|to tell the truth
    """,
} | PLOTS
