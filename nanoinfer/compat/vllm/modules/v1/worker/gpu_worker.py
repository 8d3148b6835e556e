from nanoinfer.compat.vllm.placeholders import Worker
