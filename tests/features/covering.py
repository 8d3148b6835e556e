"""All pairs of features in few runs: the features, the pairs that the engine refuses, and the runs that cover the others.

A run takes one value of each factor. refusals.json lists the pairs that the engine refuses, with its error. The other pairs
are in at least one run each of runs.json. docs/supported.md shows which pairs are which.

    python -m tests.features.covering     # try every pair, and write both files and the table of docs/supported.md

Source: Cohen, Dalal, Fredman and Patton 1997, The AETG system, https://doi.org/10.1109/32.605761: one run after the other, each
the best of several candidates, to which a factor after the other adds the value with the most new pairs.
"""

import itertools
import json
import random
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFUSALS = Path(__file__).with_name("refusals.json")
RUNS = Path(__file__).with_name("runs.json")
PAGE = ROOT / "docs/supported.md"
COMMAND = "python -m tests.features.covering"
MARKED = re.compile(rf"(?<=<!-- {COMMAND} -->\n).*?(?=<!-- end -->)", re.DOTALL)

# factor -> its values. "" is the one without a feature. Where two are as good, the greedy choice takes the first.
FACTORS = {
    "model": ("full attention", "sliding windows", "attention sinks", "states", "experts"),
    "dtype": ("float32", "bfloat16", "float16"),
    "quantization": ("", "int8", "int4"),
    "drafts": ("", "drafts: n-gram", "drafts: dense model", "drafts: model of this kind", "drafts: MTP", "drafts: quantized"),
    "adapters": ("", "adapter per request"),
    "disk": ("", "prefix_cache_dir"),
    "async": ("", "async scheduling"),
    "ranks": ("", "two ranks"),
    "execution": ("", "eager"),
    "invariance": ("", "batch_invariant"),
    "prompts": ("", "chunked prompts"),
    "policy": ("", "priority"),
    "form": ("", "structured output"),
    "calls": ("", "required calls", "strict calls"),
    "search": ("", "beam search"),
    "number": ("", "n > 1"),
    "stages": ("", "own stages", "own processors"),
}
FACTOR_OF = {value: factor for factor, values in FACTORS.items() for value in values if value}
FEATURES = tuple(FACTOR_OF)

# What a feature needs of another factor, for a pair that does not say it. A pair is tried with these and the first values.
NEEDS = {"drafts: MTP": {"model": "states"}, "int8": {"dtype": "bfloat16"}, "int4": {"dtype": "bfloat16"}}
# What an error may call a feature. Both features of a refused pair must be in its error.
NAMES = {
    "full attention": ("QwenForCausalLM",),
    "sliding windows": ("sliding windows", "Gemma3ForCausalLM"),
    "attention sinks": ("sliding windows", "GptOssForCausalLM", "gpt-oss"),
    "states": ("states", "Qwen3_5ForCausalLM"),
    "experts": ("QwenMoeForCausalLM",),
    "float32": ("dtype='float32'",),
    "float16": ("dtype='float16'",),
    "int8": ("quantization='int8'",),
    "int4": ("quantization='int4'",),
    "drafts: n-gram": ("speculative_config",),
    "drafts: dense model": ("speculative_config",),
    "drafts: model of this kind": ("speculative_config", "the draft model"),
    "drafts: MTP": ("speculative_config", "'mtp'", "states", "Qwen3_5ForCausalLM"),  # only models with states have it
    "drafts: quantized": ("speculative_config",),
    "adapter per request": ("enable_lora", "lora_request"),
    "prefix_cache_dir": ("prefix_cache_dir",),
    "async scheduling": ("async_scheduling",),
    "two ranks": ("tensor_parallel_size",),
    "eager": ("enforce_eager",),
    "batch_invariant": ("batch_invariant",),
    "priority": ("priority",),
    "structured output": ("structured_outputs",),
    "required calls": ("tool calls", "'tools'"),
    "strict calls": ("tool calls", "'tools'"),
    "beam search": ("beam_search()", "BeamSearchParams", "beams"),
    "n > 1": ("'n'",),
    "own stages": ("stages",),
    "own processors": ("logits_processors",),
}

Run = dict[str, str]  # factor -> value
Pair = tuple[str, str]  # two features, in the order of FEATURES


def pairs_of(run: Run) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """Every two (factor, value) of a run, which may be a part of one."""
    return set(itertools.combinations(((factor, run[factor]) for factor in FACTORS if factor in run), 2))


def pairs_of_features() -> list[Pair]:
    """Every two features that are values of different factors."""
    return [pair for pair in itertools.combinations(FEATURES, 2) if FACTOR_OF[pair[0]] != FACTOR_OF[pair[1]]]


def known_refusals() -> dict[Pair, str]:
    """The refused pairs of features, with the engine's error."""
    return {(one, other): error for one, other, error in json.loads(REFUSALS.read_text(encoding="utf-8"))}


def known_runs() -> list[Run]:
    """The runs with every other pair, in the order of their values."""
    return [dict(zip(FACTORS, values, strict=True)) for values in json.loads(RUNS.read_text(encoding="utf-8"))]


def write_runs(runs: list[Run]) -> None:
    RUNS.write_text("[\n" + ",\n".join(json.dumps([*run.values()]) for run in runs) + "\n]\n", encoding="utf-8")


def with_most_pairs(runs: list[Run], num: int) -> list[Run]:
    """So many of the runs, which together have as many pairs as possible: one after the other, that with the most new pairs."""
    chosen: list[Run] = []
    missing = set().union(*map(pairs_of, runs))
    for _ in range(num):
        chosen.append(max(runs, key=lambda run: len(pairs_of(run) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen


def run_of(*features: str) -> Run:
    """The run with these features, what they need, and otherwise the first values."""
    chosen = {FACTOR_OF[feature]: feature for feature in features}
    for feature in features:
        chosen = NEEDS.get(feature, {}) | chosen
    return {factor: chosen.get(factor, values[0]) for factor, values in FACTORS.items()}


def covering_array(refused: set[Pair], num_candidates: int = 20) -> list[Run]:
    """Runs with every pair of values at least once, except refused ones and those that no run can have. The same each time."""
    rng, runs = random.Random(0), []
    refused_with: dict[str, set[str]] = {}  # asked for 350,000 runs, most of them parts
    for one, other in refused:
        refused_with.setdefault(one, set()).add(other)

    def is_allowed(run: Run) -> bool:
        values = set(run.values())
        return all(values.isdisjoint(refused_with[one]) for one in refused_with.keys() & values)

    def can_be_completed(run: Run) -> bool:
        factor = next((name for name in FACTORS if name not in run), None)
        return factor is None or any(
            is_allowed(longer) and can_be_completed(longer) for value in FACTORS[factor] for longer in [run | {factor: value}]
        )

    def candidate() -> Run:
        run = dict(rng.choice(sorted(missing)))
        for factor in rng.sample(sorted(FACTORS.keys() - run.keys()), len(FACTORS) - 2):
            longer = [run | {factor: value} for value in FACTORS[factor]]
            longer = [one for one in longer if is_allowed(one) and can_be_completed(one)]
            run = max(longer, key=lambda one: len(pairs_of(one) & missing))
        return run

    values = [(factor, value) for factor, several in FACTORS.items() for value in several]
    pairs = [pair for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]]
    missing = {pair for pair in pairs if is_allowed(dict(pair)) and can_be_completed(dict(pair))}
    while missing:
        run = max((candidate() for _ in range(num_candidates)), key=lambda run: len(pairs_of(run) & missing))
        missing -= pairs_of(run)
        runs.append({factor: run[factor] for factor in FACTORS})
    return sorted(runs, key=lambda run: [FACTORS[factor].index(value) for factor, value in run.items()])


def has_exact_scores(run: Run) -> bool:
    """Whether log-probabilities are compared bit by bit: where these are promised, but for ranks, whose sums are other ones."""
    return bool(run["invariance"]) and not run["ranks"]


def covered_exactly(runs: list[Run]) -> set[Pair]:
    """The pairs of batch_invariant and another feature whose log-probabilities are compared."""
    pairs = {(one, other) for run in runs if has_exact_scores(run) for (_, one), (_, other) in pairs_of(run)}
    return {pair for pair in pairs if "batch_invariant" in pair}


def table(refusals: dict[Pair, str], runs: list[Run]) -> str:
    """The features that are compared bit by bit with batch_invariant, and the refused pairs, in Markdown."""
    others = [value for value in FEATURES if FACTOR_OF[value] != "invariance"]
    exact = {value for pair in covered_exactly(runs) for value in pair}
    refused = {value for pair in refusals if "batch_invariant" in pair for value in pair}
    bits = ", ".join(value for value in others if value not in exact | refused)
    rows: dict[str, list[str]] = {}
    left = list(refusals)
    while left:  # the feature with the most refused pairs first, so that there are few rows
        most = max(FEATURES, key=lambda value: sum(value in pair for pair in left))
        rows.setdefault(", ".join(value for pair in left if most in pair for value in pair if value != most), []).append(most)
        left = [pair for pair in left if most not in pair]
    compared = f"With batch_invariant the bits of log-probabilities are compared, too, but not with: {bits}."
    return "\n".join(
        [
            compared,
            "",
            "| feature | refused together with |",
            "|---|---|",
            *(f"| {', '.join(features)} | {others} |" for others, features in rows.items()),
            "",
        ]
    )


def with_table(page: str, refusals: dict[Pair, str], runs: list[Run]) -> str:
    return MARKED.sub(lambda _: table(refusals, runs), page)


def main() -> None:
    """Try every pair, and write down which are refused."""
    import tempfile

    from tests.features import engines

    with tempfile.TemporaryDirectory() as folder:
        checkpoints, refusals = engines.Checkpoints(Path(folder)), []
        for pair in pairs_of_features():
            if error := engines.refusal(checkpoints, run_of(*pair)):
                print(*pair, error, sep=" | ", flush=True)
                refusals.append([*pair, error])
    REFUSALS.write_text(json.dumps(refusals, indent=0) + "\n", encoding="utf-8")
    recorded = known_refusals()
    write_runs(covering_array(set(recorded)))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_table(page, recorded, known_runs()), encoding="utf-8")


if __name__ == "__main__":
    main()
