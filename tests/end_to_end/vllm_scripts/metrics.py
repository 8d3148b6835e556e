"""The engine's counters after a few requests."""

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge

prompts = ["Once upon a time", "Lily was", "There was"]


def main():
    llm = LLM(model="tiny-qwen3", disable_log_stats=False)
    llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=10, ignore_eos=True))
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")


if __name__ == "__main__":
    main()
