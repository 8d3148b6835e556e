from nanoinfer.compat.vllm.parser import FlexibleArgumentParser
