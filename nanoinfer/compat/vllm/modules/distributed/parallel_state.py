from . import cleanup_dist_env_and_memory
