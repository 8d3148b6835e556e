from nanoinfer.compat.vllm.placeholders import add_dataset_parser, get_samples
