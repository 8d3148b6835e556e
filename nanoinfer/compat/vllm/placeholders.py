"""vLLM's names for what nanoinfer does not have. Each says what to do instead when it is used."""

from typing import NoReturn

from nanoinfer.compat.vllm.neutral import METHODS, NEUTRAL
from nanoinfer.errors import UnsupportedError


class Placeholder:
    """A name that can be imported, and can stand in annotations. Any other use raises UnsupportedError, with a hint."""

    def __init__(self, name: str, hint: str) -> None:
        self._refusal = f"{name} is vLLM's: {hint}"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedError(self._refusal)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self()

    def __mro_entries__(self, bases: tuple[object, ...]) -> NoReturn:  # called when a class derives from it
        self()

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __or__(self, other: object) -> "Placeholder":  # in an annotation
        return self

    __ror__ = __or__


_HINTS = NEUTRAL["LLM()"]
_WEIGHTS = METHODS["init_weight_transfer_engine"]
_DATASETS = "nanoinfer has no datasets; use prompts of your own, or the command nanoinfer bench"

AttentionConfig = Placeholder("AttentionConfig", "use LLM(attention_backend=...)")
ClassificationRequestOutput = Placeholder("ClassificationRequestOutput", METHODS["classify"])
CompilationConfig = Placeholder(
    "CompilationConfig",
    "nanoinfer compiles by itself; leave it out, or use LLM(enforce_eager=True) to run the model's file",
)
KVTransferConfig = Placeholder("KVTransferConfig", _HINTS["kv_transfer_config"][1])
ModelRegistry = Placeholder("ModelRegistry", "use nanoinfer.register_model(name, Model), as notebook d5a does")
ProfilerConfig = Placeholder("ProfilerConfig", _HINTS["profiler_config"][1])
PyNcclCommunicator = Placeholder("PyNcclCommunicator", _WEIGHTS)
StatelessProcessGroup = Placeholder("StatelessProcessGroup", _WEIGHTS)
StructuredOutputsConfig = Placeholder("StructuredOutputsConfig", _HINTS["structured_outputs_config"][1])
Worker = Placeholder("Worker", METHODS["collective_rpc"])
add_dataset_parser = Placeholder("add_dataset_parser", _DATASETS)
fetch_image = Placeholder("fetch_image", "no model of nanoinfer reads images; use text prompts")
get_open_port = Placeholder(
    "get_open_port",
    "nanoinfer has no data parallel ranks to connect; use nanoinfer batch --replicas N, or a port of your own",
)
get_samples = Placeholder("get_samples", _DATASETS)
random_uuid = Placeholder("random_uuid", "use str(uuid.uuid4())")
