from nanoinfer.features.adapters.request import LoRARequest
