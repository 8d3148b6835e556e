"""The names that vllm and vllm.config have, and nanoinfer and nanoinfer.config lack. Imported when first used."""

from builtins import dict as ReasoningConfig  # LLM(reasoning_config=...) accepts the tags that it knows

from nanoinfer import AsyncLLM as AsyncLLMEngine
from nanoinfer.compat.vllm.engine import VLLMEngine as LLMEngine
from nanoinfer.compat.vllm.placeholders import (
    AttentionConfig,
    ClassificationRequestOutput,
    CompilationConfig,
    KVTransferConfig,
    ModelRegistry,
    ProfilerConfig,
    StructuredOutputsConfig,
)
from nanoinfer.features.embedding.pooling import (
    EmbeddingRequestOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from nanoinfer.features.own_code.logits_processors import VllmConfig
