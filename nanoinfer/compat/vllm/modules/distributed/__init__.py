"""vLLM's module of ranks, of which scripts call one function."""

import gc


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of LLMs to which nothing refers. It is vLLM's function of this name. LLM.close() does so at once.

    shutdown_ray: has no effect, because an LLM starts no Ray.
    """
    import torch

    gc.collect()  # because the parts of a model may refer to each other in circles
    torch.cuda.empty_cache()  # does nothing without a GPU
