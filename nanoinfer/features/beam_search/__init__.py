"""Beam search: LLM.beam_search finds the most likely answers to a prompt."""

from nanoinfer.features.beam_search.params import BeamSearchOutput as BeamSearchOutput
from nanoinfer.features.beam_search.params import BeamSearchParams as BeamSearchParams
from nanoinfer.features.beam_search.params import BeamSearchSequence as BeamSearchSequence
