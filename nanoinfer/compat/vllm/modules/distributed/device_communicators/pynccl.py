from nanoinfer.compat.vllm.placeholders import PyNcclCommunicator
