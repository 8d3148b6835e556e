"""From logits to token ids: a visible list of stages (sampler.py, stages.py), then one draw (draw.py)."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # by compat/moved/sampling
