"""Every number in a notebook's prose occurs in an output or in the code of the same notebook.

So a figure cannot outlive the run that it was read from. This does not understand the sentence: which of the notebook's
numbers is meant, an assert says. `python notebooks/stated.py` lists what is missing.
"""

import re
from pathlib import Path

import nbformat

NOTEBOOKS = sorted(Path(__file__).parent.glob("[0-9d]*.ipynb"))

WORDS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
NUMBER_WORDS = {word: 13 + i for i, word in enumerate(WORDS)}
NUMBER_WORDS |= {word: 20 + 10 * i for i, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split())}
NUMBER_WORDS |= {"hundred": 100, "thousand": 1000}
SMALL_WORDS = "one two three four five six seven eight nine ten eleven twelve".split()
NUMBER_WORDS |= {word: 1 + i for i, word in enumerate(SMALL_WORDS)}

NOT_PROSE = re.compile(
    r"<!-- header -->.*"  # written by notebooks/header.py
    r"|```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$"  # code, formulas
    r"|\]\([^)]*\)|https?://\S+|<(?:figure|img)\b[^>]*>"  # link targets, markers of interactive parts
    r"|^#.*?$|^ {4}.*?$|^\s*\d+\.\s"  # headings, indented formulas, numbers of lists
    r"|\b[Nn]otebooks? d?\d+[a-d]?(?:(?:, | and | to )d?\d+[a-d]?)*|\b[Ss]ections? \d+|\brule \d+|\bTrap \w+",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w.])(\d[\d,]*\d|\d)?(\.\d+)?(?![\d])(\s?%| times\b)?")
WORD = re.compile(rf"\b({'|'.join(NUMBER_WORDS)})\b( times\b)?", re.IGNORECASE)
MAX_SMALL = 12  # whole numbers up to this are words of the language: "two rows", "the 4th"


def numbers_in(text: str) -> set[float]:
    """The values of all numbers in code or an output."""
    found = re.findall(r"\d[\d,_]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+", text)
    return {float(one.replace(",", "").replace("_", "").rstrip(".") or 0) for one in found if one.strip(",_.")}


def stated_in(markdown: str) -> list[str]:
    """The numbers that the prose states, as they are written."""
    text = NOT_PROSE.sub(" ", re.split("^## Exercises", markdown, flags=re.MULTILINE)[0])
    found = []
    for whole, fraction, unit in NUMBER.findall(text):
        if not whole and not fraction:
            continue
        value = value_of(whole + fraction)
        is_year = not fraction and "," not in whole and 1900 <= value <= 2099
        if unit or (not is_year and (fraction or value > MAX_SMALL)):
            found.append(whole + fraction + unit)
    for word, unit in WORD.findall(text):
        if unit or NUMBER_WORDS[word.lower()] > MAX_SMALL:
            found.append(word + unit)
    return found


def value_of(stated: str) -> float:
    digits = re.sub(r"[,%]| times", "", stated).strip()
    return float(NUMBER_WORDS[digits.lower()] if digits.isalpha() else digits)


def missing_in(notebook: nbformat.NotebookNode) -> list[str]:
    """The stated numbers that neither an output nor the code of the notebook has."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    texts = [cell.source for cell in code]
    texts += [output.get("text", "") for output in outputs]
    texts += [data.get("text/plain", "") for data in (output.get("data", {}) for output in outputs) if "image/png" not in data]
    known = set().union(*map(numbers_in, texts))
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return [
        stated
        for text in prose
        for stated in stated_in(text)
        if not {value_of(stated), value_of(stated) / 100 if "%" in stated else value_of(stated)} & known
    ]


if __name__ == "__main__":
    for notebook_path in NOTEBOOKS:
        print(notebook_path.stem, missing_in(nbformat.read(notebook_path, as_version=4)))
