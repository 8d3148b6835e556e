"""LoRARequest: the adapter that a request uses. The names and the module are vLLM's."""

from dataclasses import dataclass

from nanoinfer.errors import InvalidTypeError, InvalidValueError, check_integer, shown

MAX_NAME = 256  # characters of an adapter's name


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for one request: `LLM(enable_lora=True).generate(prompt, lora_request=LoRARequest("sql", 1, "adapters/sql"))`.

    Args:
        lora_name: the adapter's name, for people: at most 256 printable characters.
        lora_int_id: identifies the adapter, >= 1. An id keeps its name and its path until it is removed.
        lora_path: a folder in the format of peft, or a hub name.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        check_integer("lora_int_id", self.lora_int_id, 1, None, ">= 1")
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str):
                raise InvalidTypeError(f"{name} must be a string, got {shown(value)}")
            if not value:
                raise InvalidValueError(f"{name} is empty; give the adapter's {name.removeprefix('lora_')}")
        if len(self.lora_name) > MAX_NAME or not self.lora_name.isprintable():
            raise InvalidValueError(f"lora_name must have at most {MAX_NAME} printable characters, got {shown(self.lora_name)}")
