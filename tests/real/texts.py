"""315 texts in which tokenizers differ: scripts, digits, spaces, code, emoji, special tokens, and random mixtures of them."""

import random

LANGUAGES = """
The quick brown fox doesn't jump over the lazy dog's tail; it's 25 °C, isn't it?
I'M SURE THEY'LL SAY WE'VE WON, HE'D SAID. don't DON'T Don’t
Der Fluß fließt übers Gebirge, während Jürgen „Straßenbahn“ schreibt.
Où est l'hôtel ? C'était déjà l'été à Noël, garçon, cœur, œuvre.
¿Dónde está el niño? ¡Mañana será otro día, señor Muñoz!
São Paulo não é a capital do Brasil; coração, avó, pão.
L'università è più vicina perché c'è già un'autostrada.
Het ijsje van Zoë kostte één euro vijftig in 's-Hertogenbosch.
Smørrebrød og rødgrød med fløde på Ærø.
Åskväder över Örebro i går kväll.
Yötä myöten työskennellyt äiti söi hyvää jäätelöä.
Það er ekki hægt að þýða þetta ævintýri.
Zażółć gęślą jaźń, Łódź, Kraków.
Příliš žluťoučký kůň úpěl ďábelské ódy.
Árvíztűrő tükörfúrógép, őszi eső.
Țara noastră și învățătura, mâine dimineață.
Pijamalı hasta yağız şoföre çabucak güvendi. İstanbul ılık.
Đường phố Hà Nội rất đẹp vào mùa thu, phở ngon quá.
Съешь же ещё этих мягких французских булок, да выпей чаю.
Жебракують філософи при ґанку церкви в Гадячі, ще й шатро їхнє п'яне.
Щастлив ли си днес, приятелю мой?
Љубазни фењерџија чађавог лица хоће да ми покаже штос.
Ο καφές είναι έτοιμος, μητέρα μου· πού πάμε;
Կարդում եմ հայերեն գիրք։
ქართული ენა ძალიან ლამაზია.
שלום עולם, מה שלומך היום? בְּרֵאשִׁית
مرحبا بالعالم، كيف حالك اليوم؟ العَرَبِيَّة ١٢٣
سلام دنیا، می‌خواهم کتاب بخوانم.
اردو میں لکھنا آسان ہے۔
नमस्ते दुनिया, आप कैसे हैं? क्षत्रिय १२३४
বাংলা ভাষায় লিখতে ভালো লাগে।
ਪੰਜਾਬੀ ਬੋਲੀ ਬਹੁਤ ਮਿੱਠੀ ਹੈ।
ગુજરાતી ભાષા સુંદર છે.
தமிழ் மொழி மிகவும் பழமையானது.
తెలుగు భాష చాలా తీయగా ఉంటుంది.
ಕನ್ನಡ ಭಾಷೆ ಸುಂದರವಾಗಿದೆ.
മലയാളം വളരെ മനോഹരമാണ്.
සිංහල භාෂාව ලස්සනයි.
สวัสดีชาวโลก วันนี้อากาศดีมาก ๑๒๓
ສະບາຍດີຊາວໂລກ
မြန်မာဘာသာစကား
សួស្តីពិភពលោក
བོད་སྐད་ཀྱི་ཡི་གེ
አማርኛ የኢትዮጵያ ቋንቋ ነው።
今天天气很好，我们去公园散步吧！
繁體中文與簡體中文的差別，龍龜鬱。
日本語の文章をトークン化します。カタカナとひらがな、漢字ｶﾅ。
한국어 문장을 토큰으로 나눕니다. 각하 ㄱㄴㄷ
Сайн байна уу, дэлхий?
Ndiyabulela kakhulu, molo Mhlaba!
Ọjọ́ dára púpọ̀, ẹ káàárọ̀.
Habari za asubuhi, rafiki yangu?
Mixed 日本語 and English, русский и العربية in one 文.
""".strip("\n").split("\n")

NUMBERS = """
0
7
42
123
1234
12345
1234567890123456789
3.14159 -2.5e-10 1_000_000 1,234,567.89
0x1F 0b1010 0o17 1e9
2024-02-29T23:59:59.999Z
+49 (0)30 1234-5678
192.168.0.1:8080 ::1
½ ¼ ² ³ ① Ⅳ ٣ ३ ๓ 三 𝟘𝟙
10% of €1,000.50 is £100; $5 ¥500
a1b2c3 x86_64 B2B 3D 4th
""".strip("\n").split("\n")

SPACES = [
    "",
    *(" " * n for n in (1, 2, 3, 4, 7, 16, 33)),
    *("\n" * n for n in (1, 2, 3, 5)),
    *("\t", "\t\t", "\t \t", " \n", "\n ", "\r\n", "\r", "\r\n\r\n", " \t\n\r "),
    *(" a", "a ", "  a", "a  ", "a b", "a  b", "a   b", "a\nb", "a\n\nb", "a \n b", "a\n  b", "a\tb", "\ta", "a\r\nb"),
    *("a\u00a0b", "a\u2003b", "a\u3000b", "a\u200bb", "a\u2028b", "a\u0085b", "\u00a0", "\ufeffa", "a\x0bb\x0cc"),
    "x = 1\n    y = 2\n\n\n        z = 3   \n",
]

CODE = [
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; } // dot product\n",
    "#include <vector>\ntemplate <typename T> auto f(T&& x) -> decltype(x) { return x; }",
    "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name HAVING COUNT(*) > 1;",
    '{"name": "Lily", "age": 7, "likes": ["cats", null, true, 1.5e3], "nested": {"a": {}}}',
    '<div class="row"><p>Hello &amp; bye</p><br/></div><!-- comment -->',
    "const f = async (x) => { await g(`${x}`); return x?.y ?? null; };",
    'fn main() { let v: Vec<&str> = vec!["a"]; println!("{:?}", v); }',
    "\\begin{equation} \\frac{\\partial L}{\\partial \\theta} = \\sum_{i=1}^{n} x_i^2 \\end{equation}",
    "$ grep -rn 'foo\\|bar' --include=\"*.py\" . | xargs sed -i 's/foo/bar/g' && echo $?",
    "https://example.org/a/b?c=d&e=%20f#g user@example.org C:\\Users\\x\\y.txt",
    "if(x!=y||z==w&&!v){x<<=2;y>>>=1;z**=3;w//=4;}",
    '\tif err != nil {\n\t\treturn nil, fmt.Errorf("%w: %d", err, n)\n\t}\n',
    "| a | b |\n|---|:-:|\n| 1 | *2* |\n\n> quote\n\n- [x] done\n",
    "yaml:\n  - key: 'value'\n    other: >-\n      folded\n      text\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "................................ !!!!!!!! ???? ---- ==== ____ ~~~~ ####",
    "camelCaseWord snake_case_word SCREAMING_CASE PascalCase kebab-case-word",
    "...—–-“quoted”‘single’«guillemets»„low“",
    "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'VE 'M 'LL 'D ’s",
]

SYMBOLS = [
    *("👍", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "☺︎", "1️⃣", "🧑🏿‍🚀 to the 🌕!", "😀😃😄😁", "a👍b", " 👍 "),
    *("é", "e\u0301", "Å", "A\u030a", "ﬁ ﬂ ﬃ", "ǅ", "ẞß", "İi̇Iı", "ﷺ", "각", "\u1100\u1161\u11a8", "が", "か\u3099"),
    *("∑∏∫√∞≠≤≥±×÷", "αβγδ ΑΒΓΔ", "→←↑↓⇒⇔", "♠♥♦♣♔♕", "■□▪▫●○", "┌─┐│└┘", "™®©§¶†‡", "⠓⠑⠇⠇⠕", "𝒜𝓑𝔠𝕕", "𐍈𒀀𓀀𠜎"),
    *("a\u0300\u0301\u0302\u0303b", "z̴̛a̵l̶g̷o̸", "\u202eabc\u202c", "\u2066x\u2069", "\ue000\uf8ff", "\U0010ffff\U000e0041"),
    *(
        "\ufffd",
        "a\ufffdb",
        "\x00",
        "\x01\x02\x1b[0m",
        "\x7f\x80\x9f",
        "\u2581",
        "a\u2581b",
        "Ġ Ċ ĉ Âł",
        "<0x41><0x0A>",
        "##ing",
    ),
]

SPECIAL = r"""
<|endoftext|>
<|endofprompt|>
<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n
<s>
</s>
<unk>
<pad>
<s>[INST] Hello [/INST] Hi </s>
[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello [/INST]
<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>
<|end_of_text|><|finetune_right_pad_id|><|python_tag|><|eom_id|>
<bos><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n
<eos><mask><unused7>
<think>\nLet me see.\n</think>\n\nYes.
<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>
<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜><｜end▁of▁sentence｜>
<｜tool▁calls▁begin｜><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>
[AVAILABLE_TOOLS][]​[/AVAILABLE_TOOLS][TOOL_CALLS]
  <|im_end|>\n  a
a<|im_end|>b
a <s> b</s> c
<|im_start|
|im_end|>
<<s>>
< s >
<|IM_END|>
<|endoftext|><|endoftext|>
\n<|endoftext|>\n
日本<|im_end|>語
<bos><bos>x<eos>
"""
SPECIAL_TEXTS = [line.replace("\\n", "\n") for line in SPECIAL.strip("\n").split("\n")]


def mixtures(num: int) -> list[str]:
    """Return texts of up to ten random parts of the others, some of them with random characters of the whole of Unicode."""
    rng, parts = random.Random(0), [*LANGUAGES, *NUMBERS, *SPACES, *CODE, *SYMBOLS, *SPECIAL_TEXTS]
    texts = []
    for _ in range(num):
        text = ""
        for part in rng.choices(parts, k=rng.randint(2, 10)):
            start = rng.randrange(len(part) + 1)
            text += part[start : start + rng.randint(1, 40)]
            text += chr(rng.choice([rng.randrange(32, 0xD800), rng.randrange(0xE000, 0x110000)])) if rng.random() < 0.2 else ""
        texts.append(text)
    return texts


TEXTS = [*LANGUAGES, *NUMBERS, *SPACES, *CODE, *SYMBOLS, *SPECIAL_TEXTS]
TEXTS += mixtures(315 - len(TEXTS))
