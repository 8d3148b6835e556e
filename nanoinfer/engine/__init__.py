"""Requests in, outputs out."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # by compat/vllm/modules/engine and compat/moved/engine
