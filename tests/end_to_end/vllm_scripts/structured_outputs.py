"""Answers with a format: one of a list, a regular expression, a JSON schema, a grammar."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


class Animal(StrEnum):
    duck = "duck"
    fox = "fox"


class Hero(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Animal
    is_kind: bool


sentence = """
root ::= "the " animal " is " mood
animal ::= "duck" | "fox"
mood ::= "kind" | "lively"
"""


def generate_output(prompt, llm, **answer_format):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**answer_format), max_tokens=60)
    return llm.generate(prompts=prompt, sampling_params=params)[0].outputs[0].text


def main():
    llm = LLM(model="tiny-qwen3", max_model_len=100)
    print("Choice:", generate_output("Is the duck kind? ", llm, choice=["Positive", "Negative"]))
    print("Regex:", generate_output("Write an address: ", llm, regex=r"[a-z]{3}@[a-z]{3}\.com"))
    print("JSON:", generate_output("Describe the hero: ", llm, json=Hero.model_json_schema()))
    print("Grammar:", generate_output("Write a sentence: ", llm, grammar=sentence))


if __name__ == "__main__":
    main()
