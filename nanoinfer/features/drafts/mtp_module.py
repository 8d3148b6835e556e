"""The module of Qwen3.5's and Qwen3-Next's checkpoints for multi-token prediction, and how it is loaded.

In: a loaded model, and the weights of its checkpoint whose names begin with "mtp.". Out: a module that drafts for the model.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.base import Recur
from nanoinfer.errors import UnsupportedError
from nanoinfer.loading.loader import Loaded, open_weights
from nanoinfer.loading.weights import fill, place_weights
from nanoinfer.models.layers import Hidden, Ids, ZeroCentredRMSNorm
from nanoinfer.models.qwen import QwenForCausalLM
from nanoinfer.models.qwen_next import Qwen3_5ForCausalLM, QwenNextConfig, QwenNextDecoderLayer
from nanoinfer.models.registry import WeightRules


class QwenNextDrafter(nn.Module):
    """Multi-token prediction: maps a token and the model's hidden row before it to a row from which the head reads the next.

        fc([norm(embedding of token t + 1), norm(hidden row t)]), then a layer with attention and a norm

    The model's row is the row after the last norm, as the head reads it. For a second draft, the module's own row takes its
    place. The embedding, the angles and the head are the model's.

    Source: https://arxiv.org/abs/2412.19437, section 2.2, as Qwen's checkpoints have it, where the embedding comes first.
    """

    Config = QwenNextConfig
    weight_rules = WeightRules(prefix="mtp.", embedding="", ignored=("model.", "lm_head."))
    target: tuple[QwenForCausalLM]  # in a tuple, so that its parameters are not this module's

    def __init__(self, config: QwenNextConfig) -> None:
        super().__init__()
        sparse = replace(
            config, num_hidden_layers=1, layer_types=("full_attention",), decoder_sparse_step=1, mlp_only_layers=()
        )
        self.config = config = sparse if config.sparse_layers else replace(sparse, mlp_only_layers=(0,))
        self.pre_fc_norm_embedding = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([QwenNextDecoderLayer(config, 0)])
        self.norm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Ids, positions: Ids, attend: Recur, hidden: Hidden) -> Hidden:
        [model] = self.target
        embedded = self.pre_fc_norm_embedding(model.embed_tokens(input_ids))
        x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(hidden)), dim=-1))
        cos, sin = model.rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def compute_logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self.target[0].compute_logits(hidden)


def load_module(target: Loaded) -> QwenNextDrafter:
    """Load the module of a checkpoint. It will share the model's embedding and head.

    Raises:
        UnsupportedError: a family without such a module, or a checkpoint without its weights.
        WeightsError: weights that do not fit.
    """
    model, hint = target.model, "use method 'ngram', or 'draft_model' with a smaller model"
    if not isinstance(model, Qwen3_5ForCausalLM):
        raise UnsupportedError(f"method 'mtp' needs Qwen3.5 or Qwen3-Next, got a {type(model).__name__}; {hint}")
    weights, rules = open_weights(target.checkpoint), QwenNextDrafter.weight_rules
    if not any(name.startswith(rules.prefix) for name in weights):
        raise UnsupportedError(
            f"method 'mtp' needs weights whose names begin with {rules.prefix!r}, and the checkpoint has none: transformers "
            f"leaves them out when it saves a model; take the published checkpoint, or {hint}"
        )
    with torch.device("meta"):
        module = QwenNextDrafter(model.config)
    weight = next(model.parameters())
    place_weights(module, weights, rules, weight.dtype)
    fill(module, weight.device)
    return module.to(weight.device).eval()
