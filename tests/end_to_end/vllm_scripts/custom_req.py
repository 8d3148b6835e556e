"""A function for each request that wants one, wrapped as a logits processor of the V1 interface."""

import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

logger = init_logger(__name__)


class OnlyOneToken:
    def __init__(self, target_token: int):
        self.target_token = target_token

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        kept = logits[self.target_token].item()
        logits[:] = float("-inf")
        logits[self.target_token] = kept
        return logits


class Wrapped(AdapterLogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        super().__init__(vllm_config, device, is_pin_memory)
        logger.info("on %s", device)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        target_token = params.extra_args and params.extra_args.get("target_token")
        return None if target_token is None else OnlyOneToken(target_token)


def main():
    llm = LLM(model="tiny-qwen3", logits_processors=[Wrapped])
    params = [SamplingParams(temperature=0.0, max_tokens=4, extra_args={"target_token": 67}), SamplingParams(temperature=0.0)]
    for output in llm.generate(["Once upon a time", "Lily was"], params):
        print(f"Prompt: {output.prompt!r}, only one token: {set(output.outputs[0].token_ids) == {67}}")


if __name__ == "__main__":
    main()
