"""The twelve plots of the stories: what happens between the day and the ending, a few sentences each.

These rules and those of sentences.py form one grammar and use each other. sentences.py says what a plot must keep to.
"""

PLOTS = {
    # Lost: the colour of the toy comes back when it is found.
    "lost": "{lost_it} {sad} {meet} {whats_wrong} {look_first} {look_then} {thanks}",
    "lost_it": """
        {He} wanted to play with {his} {color} {toy}, but it was gone.
        There {he} lost {a color} {toy}, a present from {his} {family}.
        {He} reached into {his} bag, but the {color} {toy} was not there.
        A strong wind blew {his} {color} {toy} away.
    """,
    "sad": """
        {He} sat down and cried {bitterly}.
        "Oh no, where can it be?" {he} {sighed}.
        {He} looked left and right, but {he} could not see it.
        It made {him} very {sad_mood}.
    """,
    "bitterly": "for a while|bitterly|quietly|without a sound",
    "sad_mood": "sad|lonely|worried|unhappy|upset|angry",
    "whats_wrong": """
        "Why are you so {sad_mood}?" asked {friend}.
        "What is the matter?" {friend.he} {asked_it} {softly}.
        "I lost my {color} {toy}," {he} {sighed}, and {friend} promised to help.
        "Do not be {sad_mood}," {friend.he} {said}, "I will help you."
    """,
    "look_first": """
        First they looked {elsewhere}, but there was only {a thing}.
        They searched for {number} {long_time}.
        They asked {a look} {animal}, but the answer was no.
        {Elsewhere} they found {a thing}, but nothing else.
    """,
    "elsewhere": "in every corner|behind a box|under a bag|behind the door|on the ground|around the corner|in the dark",
    "thing": "broken cup|shoe|feather|snail|spoon|leaf|spider|bottle|sock|worm|key|beetle",
    "long_time": "minutes|hours",
    "look_then": """
        At last, {friend} found the {color} {toy} {spot}.
        Then {friend.he} looked {spot}, and there was the {color} {toy}!
        "Look, here is your {color} {toy}!" {friend.he} {laughed}.
        Suddenly {he} saw something {color} {spot}, and it was the {toy}.
    """,
    "thanks": """
        "Thank you, {friend}," said {hero} {softly}.
        {Hero} jumped for joy and gave {friend} a big hug.
        "You are a true friend," said {hero}.
        {Hero} was so {good_mood} that {he} began to dance.
        "How can I ever thank you?" {hero} {asked_it}.
    """,
    "good_mood": "happy|glad|proud|excited|pleased|cheerful|thankful|relieved",
    # Gift: one of two gets a thing, and later the thing is found there.
    "gift": "{a_gift} {meet_two} {give} {play} {ask} {answer}",
    "a_gift": """
        {He} carried {a color} {toy} with {him}.
        In {his} bag, {he} had {a color} {toy}.
        {His} {family} had made {him} {a color} {toy}.
    """,
    "meet_two": """
        There {he} met {friend} the {friend_kind} and {a look} {animal}, who had no toys.
        Then {friend} the {friend_kind} and {a look} {animal} {came} by, and they looked {sad_mood}.
        Soon {he} saw {friend} the {friend_kind} with {a look} {animal}, who were both very bored.
    """,
    "give": """
        {He} gave the {toy} to {owner}.
        "You can have my {toy}," {he} {said} to {owner}.
        {He} saw that {owner} loved the {toy} and gave it away {softly}.
    """,
    "play": """
        All three of them played until {evening}.
        They sat in the {sun} and ate {snack}.
        They told stories about {wonder} for {number} {long_time}.
        Then {he} went home {softly}, and they waved goodbye.
    """,
    "evening": "dinner|the sun went down|it began to rain|the stars came out|they were tired|a bell rang",
    "sun": "sun|shade|grass|sand|wind",
    "ask": """
        "Where is your {toy}?" asked {his} {family} that night.
        The next {weekday}, {his} {family} looked for the {toy}.
        "Did you lose the {toy}?" {his} {family} {asked_it}.
    """,
    "answer": """
        "Now it belongs to {owner}," said {hero} {softly}.
        "I gave it to {owner}," {hero} {said}.
        But {owner} still had the {toy}, and that made {hero} {good_mood}.
        They found it with {owner}, who thanked {hero} again.
    """,
    # Found: the friend knows the colour, so the toy is the friend's.
    "found": "{found_it} {keep_it} {meet} {whose} {tell_color} {give_back}",
    "found_it": """
        There, {spot}, {he} found {a toy}.
        {He} looked down and saw {a toy} {spot}.
        There lay {a toy} {spot}, and nobody was near.
        {He} almost stepped on {a toy} that lay {spot}.
    """,
    "keep_it": """
        It was {color}, and it was the prettiest {toy} in the world.
        "What a pretty {color} {toy}!" {he} {laughed}.
        The {toy} was {color}, and {he} wanted to keep it.
    """,
    "whose": """
        "I lost my {toy}," {friend} {sighed}, "and I miss it."
        "Have you seen my {toy}?" {asked_it} {friend}.
        {Friend} was looking for a lost {toy}.
    """,
    "tell_color": """
        "What color is it?" {he} {asked_it}, and {friend.he} said, "It is {color}."
        "Is it {color}?" {he} {asked_it}, and {friend.he} nodded {softly}.
        {Friend.he} knew that it was {color}, so it had to be the right one.
    """,
    "give_back": """
        "Then it is yours," said {hero}, and gave it back.
        So {hero} gave {friend} the {toy}, and {friend.he} was {good_mood}.
        "Here you are," said {hero} with a smile.
        "Thank you, {hero}!" {friend} {laughed}, and {friend.he} danced with the {color} {toy}.
    """,
    # Share: what is left is a matter of counting.
    "share": "{have} {meet} {may_i} {give_some} {eat} {glad}",
    "have": """
        {He} had a basket with {n} {fruit}.
        {His} {family} had given {him} {n} sweet {fruit}.
        {He} had bought {n} {fruit} from an old {animal}.
    """,
    "slowly": "slowly|quickly|quietly|happily|together",
    "may_i": """
        "May I have some {fruit}, please?" {asked_it} {friend}.
        "I am so hungry," {friend} {sighed}, "and those {fruit} look good."
        {Friend} had not eaten since {weekday}.
        "I have no lunch today," {said} {friend} {softly}.
    """,
    "give_some": """
        {He} gave away {given} of the {n}, so {left} of them stayed in the basket.
        Of the {n} {fruit}, {he} gave {friend.him} {given} and kept {left}.
    """,
    "eat": """
        They ate {slowly} and watched the clouds.
        The {fruit} tasted like {meal}.
        Then they sat in the {sun} and talked about {wonder}.
        "You are very {trait}," {friend} {said}.
    """,
    "glad": """
        {Hero} was glad to have company.
        "Come again on {weekday}," said {hero}.
        So {friend} sang a song for {hero}.
        "There is enough for both of us," {said} {hero}.
    """,
    # Help: somebody is stuck.
    "help": "{call} {it_was} {coming} {pull} {free} {home_again}",
    "call": """
        Suddenly {he} heard a small voice call, "Help!"
        Then somebody cried for help not far away.
        {He} heard {a animal} and then a cry for help.
    """,
    "it_was": """
        It was {friend} the {friend_kind}, who was stuck {trap}.
        {He} ran there and saw {friend} the {friend_kind} {trap}.
        {Friend}, {a trait} {friend_kind}, had fallen down and sat {trap}.
    """,
    "trap": "in the mud|in a deep hole|in a thorny bush|under a heavy branch|in an old net|between two rocks|on thin ice",
    "coming": """
        "Do not worry, I am coming!" {he} {said}.
        "Hold on!" {he} {said}, and {he} was not afraid.
        "Please help me," {friend.he} {sighed} again.
    """,
    "pull": """
        {He} took a long {rope} and pulled {number} times.
        {He} held out a {rope} and pulled very hard.
        It took {him} {number} {long_time} and a strong {rope}.
    """,
    "rope": "rope|stick|vine|ladder|pole|branch|string",
    "free": """
        Pop, {friend} was free!
        At last, {friend} was safe, but {friend.he} had lost a {shoe}.
        Soon {friend.he} could laugh again.
    """,
    "shoe": "shoe|sock|glove|tooth|sandal|boot",
    "home_again": """
        "You saved me, {hero}," {friend} {laughed}.
        Then {hero} helped {friend} wash off the dirt.
        "I would do it again," {said} {hero}.
        {Hero} was not a bit {sad_mood} after that.
    """,
    # Hide: the hero counts, and the friend is not in the first spot that the hero searches.
    "hide": "{meet} {a_game} {count} {search_first} {search_then} {winner}",
    "a_game": """
        "Let us play hide and seek," {friend.he} {said}, "and you count to {n}."
        "Can you count to {n}?" {friend.he} {asked_it}. "Then I will hide."
        {Friend} wanted to hide, so {he} had to count to {n}.
    """,
    "count": """
        "{Counting}, here I come!" {he} {said}.
        {He} closed {his} eyes and counted: {counting}.
    """,
    "search_first": """
        {He} looked {elsewhere}, but there was only {a thing}.
        {He} peeked {elsewhere} and saw nothing but {a animal}.
        Was {friend.he} {elsewhere}? No, there was just {a thing}.
    """,
    "search_then": """
        Then {he} heard a giggle {spot}.
        A {tail} stuck out {spot}, and that was {friend}.
        At last, {he} found {friend.him} {spot}.
    """,
    "tail": "tail|nose|foot|hand|knee|toe",
    "winner": """
        "Found you!" {laughed} {hero}.
        "You are too clever, {hero}," {friend} {laughed}.
        Then it was time for {hero} to hide.
        {Hero} laughed until it hurt.
    """,
    # Dark: a storm, and a light in a colour that comes back.
    "dark": "{meet} {storm} {afraid} {a_light} {comfort} {not_afraid}",
    "storm": """
        Suddenly the sky grew dark, and a big storm came.
        Soon thunder rolled over {place}, and it began to rain.
        But then it grew dark, and they could not find the way home.
    """,
    "afraid": """
        They were both very {sad_mood}, so they hid {spot}.
        "I am scared," {friend.he} {sighed}, and {he} was scared too.
        {He} held {friend.him} tight, and they waited {spot}.
    """,
    "a_light": """
        {He} had {a color} {lamp}, and {he} lit it {softly}.
        Far away they saw {a color} {lamp}.
        Then {his} {family} came with {a color} {lamp}.
    """,
    "lamp": "lamp|candle|torch|light",
    "comfort": """
        "Look at the {color} light and count to {n}," {he} {said}.
        They sang {number} songs, and the storm went by.
        The {color} light shone until the morning.
    """,
    "not_afraid": """
        After that, {hero} was not afraid of the dark.
        "With you I am not afraid," {friend} {said} to {hero}.
        "See, it was only rain," {said} {hero}.
        {Hero} counted {number} stars in the sky.
    """,
    # Learn: a skill that comes back.
    "learn": "{wanted} {tried} {meet} {show} {again} {worked}",
    "wanted": """
        {He} wanted to learn to {skill}.
        Everyone there could {skill}, but {he} could not.
        "Today I will learn to {skill}," {he} {said}.
    """,
    "tried": """
        {He} tried {number} times, but it was too hard.
        {He} fell down, and {he} hurt {his} {tail}.
        "I will never learn it," {he} {sighed}.
        It did not work, and that made {him} {sad_mood}.
    """,
    "show": """
        "Try again, and I will show you how," {friend.he} {said}.
        "To {skill}, you must be {trait}," {friend.he} {said}.
        "I learned to {skill} last {season}," {friend.he} {said}, "and you can, too."
    """,
    "again": """
        {He} took a deep breath and tried once more.
        So they trained until {evening}.
        {He} tried to {skill} again and again for {number} {long_time}.
    """,
    "worked": """
        This time it worked, and {hero} could {skill}!
        "I can {skill}!" {laughed} {hero}.
        "Look at {hero}!" {said} {friend}.
        Soon {hero} could {skill} better than {friend.him}.
    """,
    # Birthday: as many candles as years.
    "birthday": "{meet} {how_old} {bake} {candles} {a_present} {wish}",
    "how_old": """
        "Today is my birthday," {friend.he} {said}, "and I am {n}."
        {Friend} was {n} years old that day.
        It was the day when {friend} turned {n}, but {friend.he} had no cake.
    """,
    "bake": """
        {He} took {number} eggs, milk and {sugar}, and baked a cake.
        {His} {family} brought a cake with {fruit} on top.
        They made a cake of {sugar} and {fruit}.
    """,
    "sugar": "flour|sugar|butter|honey|cream|cinnamon|chocolate|jam",
    "candles": """
        They put {n} candles on it.
        With {n} candles, the cake looked wonderful.
        {Friend} blew out all {n} candles.
    """,
    "a_present": """
        {He} also gave {friend.him} {a color} {toy}.
        The present was {a color} {toy}, and {friend.he} loved it.
        "This {color} {toy} is for you," {he} {said}.
    """,
    "wish": """
        "This is my best birthday, {hero}," {friend} {laughed}.
        {Hero} sang a song, and {friend} danced with the {toy}.
        "Happy birthday!" {laughed} {hero} {softly}.
        "I wish for {wonder}," {said} {friend}, and {hero} laughed.
    """,
    # Treasure: the map says how many steps.
    "treasure": "{a_map} {meet} {read_map} {dig} {inside_it} {halves}",
    "a_map": """
        There {he} found an old map with {a color} cross on it.
        An old {animal} gave {him} a map with {a color} cross.
        A map with {a color} cross lay {spot}.
    """,
    "read_map": """
        "The treasure is {n} steps from here," {friend.he} {said}.
        "We must walk {n} steps," {he} {said}, "and then dig."
        "Go {n} steps to the {north}," {friend.he} read.
    """,
    "north": "north|south|east|west|left|right",
    "dig": """
        They counted {n} steps, and there was the {color} cross.
        After {n} steps they began to dig with a {shovel}.
        So they walked the {n} steps and dug a hole {softly}.
    """,
    "shovel": "shovel|spoon|stick|bucket|stone",
    "inside_it": """
        Under the {color} cross was a chest full of {gold}.
        Soon they found a box, and in it were {gold} and {a thing}.
        They found {gold} there, and even a ring.
    """,
    "gold": "gold|pearls|coins|jewels|candy|diamonds|letters|buttons",
    "halves": """
        "Half of it is yours," {said} {hero}.
        {Hero} gave half of it to {friend}.
        "We are rich!" {laughed} {hero}.
        So {friend} and {hero} shared it with the whole town.
    """,
    # Seed: the flower comes up in the end.
    "seed": "{plant} {water} {meet} {what_is_it} {grow} {bloom}",
    "plant": """
        {He} planted the seed of {a flower} in a pot.
        {His} {family} gave {him} the seed of {a flower}.
        {He} found a seed in {his} pocket and planted it, and it was {a flower}.
    """,
    "water": """
        {He} gave it water for {number} days.
        Every {weekday}, {he} sang to it {softly}.
        {He} built a fence, so that no {animal} could eat it.
    """,
    "what_is_it": """
        "What will it be?" {friend.he} {asked_it}, and {he} {said}, "A {flower}."
        "I would love to have a {flower}," {friend.he} {said}.
        "Is it a {flower}?" {friend.he} {asked_it}, and {he} nodded.
    """,
    "grow": """
        Then the sun came out, and the seed began to grow.
        It rained for {number} {long_time}, and the plant grew taller.
        They waited {softly} until {season} came.
    """,
    "bloom": """
        One {daytime}, {hero} saw {a color} {flower}.
        "Look, {a color} {flower}!" {said} {hero}.
        {Hero} gave the first {flower} to {friend}.
        The {flower} smelled so sweet that {hero} smiled.
    """,
    # Build: as many stones as it takes, twice.
    "build": "{meet} {collect} {stack} {fall} {stack_again} {stands}",
    "collect": """
        Together they collected {n} {stones}.
        "With {n} {stones} we can build something big," {friend.he} {said}.
        {He} had {n} {stones}, and {friend.he} had an idea.
    """,
    "stack": """
        With all {n} of them, they built a {bridge}.
        {Softly} they put one on top of the other.
        They worked until {evening}.
    """,
    "bridge": "bridge|wall|tower|house|castle|raft",
    "fall": """
        But {a animal} ran into it, and everything fell down.
        Then the wind came, and all the {stones} fell down.
        "Oh no, it is broken," {friend.he} {sighed}.
    """,
    "stack_again": """
        "We still have {n} {stones}," {he} {said}, "so let us try again."
        They picked up the {n} {stones} and started again.
        {He} was {sad_mood} for a while, but {friend.he} did not give up.
    """,
    "stands": """
        This time it was strong, and {hero} stood on top.
        "It stands!" {laughed} {hero}.
        So {friend} made {a color} flag for {hero}.
        "We did it, {hero}!" {laughed} {friend}.
    """,
}
