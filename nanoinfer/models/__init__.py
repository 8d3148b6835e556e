"""GPT-2, Llama, Qwen, Gemma 3 and gpt-oss as in a textbook: a file for each family, in Python alone."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # by compat/moved/models
