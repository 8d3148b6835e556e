from nanoinfer.compat.vllm.parser import FlexibleArgumentParser
from nanoinfer.compat.vllm.placeholders import get_open_port, random_uuid
