from nanoinfer.compat.vllm.placeholders import get_open_port
