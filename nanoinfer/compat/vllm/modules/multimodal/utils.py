from nanoinfer.compat.vllm.placeholders import fetch_image
