"""The model of a chat: in this process, or on a server. Both have the same methods.

In: messages and parameters. Out: Deltas, the last of which has the RequestOutput.

    max_model_len    the tokens of the context. None: unknown, so no turn is left out
    given            names of the parameters that the user gave. The server decides the others. None: the session decides all
    render()         the prompt for stream(). With a known max_model_len, it has "prompt_token_ids"
    check()          raises NanoinferError for parameters that the model cannot have
    stream()         generates an answer. Closing the generator ends it
    describe()       one line about the model, and describe_speed() one about the newest answer
"""

import re
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from nanoinfer.errors import NanoinferError
from nanoinfer.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.server.client import Client

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

Messages = list[dict[str, str]]
THINKING = re.compile(r"<think>.*?</think>\s*|\A<think>.*", re.DOTALL)  # \A: an answer that ended while thinking


class LocalModel:
    """An LLM in this process."""

    given: set[str] | None = None

    def __init__(self, llm: "LLM", name: str = "", chat_template_kwargs: dict[str, object] | None = None) -> None:
        self._llm, self._name, self._chat_template_kwargs = llm, name, chat_template_kwargs
        self.max_model_len: int | None = llm.info.max_model_len

    def render(self, messages: Messages) -> Any:
        return self._llm.render_chat(messages, chat_template_kwargs=self._chat_template_kwargs)

    def check(self, params: SamplingParams) -> None:
        self._llm.engine.inputs.prepare([0], params)  # refuses token ids that this model lacks

    def stream(self, prompt: Any, params: SamplingParams) -> Generator[Delta, None, None]:
        return self._llm.stream(prompt, params)

    def describe(self) -> str:
        info = self._llm.info
        return f"{self._name}, {info.device}, {info.dtype}, context of {info.max_model_len} tokens"

    def describe_speed(self, output: RequestOutput) -> str:
        speed = describe_speed(output.metrics, len(output.prompt_token_ids))
        return f"{speed}, context of {self.max_model_len} tokens"


class RemoteModel:
    """A model of an OpenAI-compatible server. Its reasoning becomes text between <think> and </think>, as in Qwen3."""

    max_model_len: int | None = None

    def __init__(self, client: Client, name: str, given: set[str], chat_template_kwargs: dict[str, Any] | None = None) -> None:
        self._client, self._name, self._chat_template_kwargs = client, name, chat_template_kwargs
        self.given: set[str] | None = given
        self._usage: dict[str, Any] = {}  # the usage of the newest answer

    def render(self, messages: Messages) -> Any:
        """Return the messages without the thinking in earlier answers, which servers do not expect."""
        return [
            message | {"content": THINKING.sub("", message["content"])} if message["role"] == "assistant" else message
            for message in messages
        ]

    def check(self, params: SamplingParams) -> None:
        """Accept everything, because only the server knows the model. The server will refuse the next question."""

    def stream(self, prompt: Any, params: SamplingParams) -> Generator[Delta, None, None]:
        given = {name: getattr(params, name) for name in self.given or ()}
        body = {"model": self._name, "messages": prompt} | {name: value for name, value in given.items() if value is not None}
        if self._chat_template_kwargs:
            body["chat_template_kwargs"] = self._chat_template_kwargs
        self._usage = {}
        metrics, answer = RequestMetrics(time.perf_counter()), CompletionOutput(0, "", [], finish_reason="stop")
        is_thinking = False
        try:
            for chunk in self._client.stream("/chat/completions", body):
                self._usage = chunk.get("usage") or self._usage
                for choice in chunk.get("choices") or ():
                    if choice.get("finish_reason") == "length":
                        answer.finish_reason = "length"
                    text, is_thinking = _text_of(choice.get("delta") or {}, is_thinking)
                    if text:
                        answer.text += text
                        metrics.finished_time = time.perf_counter()
                        metrics.first_token_time = metrics.first_token_time or metrics.finished_time
                        yield Delta(text, [])
        except NanoinferError as error:
            if not answer.text:
                raise
            answer.finish_reason, answer.error = "error", str(error)
        metrics.num_output_tokens = self._usage.get("completion_tokens") or 0
        metrics.num_cached_tokens = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        yield Delta("", [], RequestOutput("", None, [], [answer], finished=True, metrics=metrics))

    def describe(self) -> str:
        return f"{self._name} at {self._client.url}"

    def describe_speed(self, output: RequestOutput) -> str:
        if not self._usage:
            return "the server reports no numbers of tokens"
        return describe_speed(output.metrics, self._usage.get("prompt_tokens") or 0) + ", measured from outside"


ChatModel = LocalModel | RemoteModel


def _text_of(delta: dict[str, Any], is_thinking: bool) -> tuple[str, bool]:
    """Return the text of a chunk's delta, and whether the model still thinks after it. Servers use two names for reasoning."""
    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
    content = delta.get("content") or delta.get("refusal") or ""
    if reasoning and not is_thinking:
        reasoning = f"<think>\n{reasoning}"
    if content and (is_thinking or reasoning):
        content = f"\n</think>\n\n{content}"
    return reasoning + content, bool(is_thinking or reasoning) and not content


def describe_speed(metrics: RequestMetrics, num_prompt_tokens: int) -> str:
    """Describe the numbers of tokens and the speed of a finished request in one line."""
    phrases = [f"prompt {num_prompt_tokens} tokens ({metrics.num_cached_tokens} cached)"]
    if metrics.ttft is not None:
        phrases.append(f"first token after {metrics.ttft:.2f} s")
    phrases.append(f"output {metrics.num_output_tokens} tokens")
    if metrics.tpot:
        phrases.append(f"{1 / metrics.tpot:.1f} tokens/s")
    return ", ".join(phrases)
