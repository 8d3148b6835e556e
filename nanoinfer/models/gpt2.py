"""GPT-2: learned positions, LayerNorm before attention and MLP, one projection for q, k and v, gelu_new.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". The names are those of its checkpoints.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.base import Attend
from nanoinfer.errors import CheckpointError, shown
from nanoinfer.models.layers import Embedding, Hidden, Ids, gelu_tanh
from nanoinfer.models.registry import ConfigJson, WeightRules, refuse_others


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The fields of config.json that this file reads, under the names of the newer families."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    max_position_embeddings: int
    layer_norm_epsilon: float
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, config: ConfigJson) -> "GPT2Config":
        """Read config.json. Raises: UnsupportedError (a variant), CheckpointError (a range), KeyError (a missing key)."""
        supported = {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        }
        refuse_others(config, activation_function=("gelu_new", "gelu_pytorch_tanh"), **supported)  # two names of one function
        # As in transformers, the file may have the names of the newer families, which take precedence.
        older = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        older |= {"max_position_embeddings": "n_positions", "vocab_size": "vocab_size"}
        fields = {name: config[name if name in config else old] for name, old in older.items()}
        width, num_heads = fields["hidden_size"], fields["num_attention_heads"]
        if width % num_heads:
            raise CheckpointError(f"n_embd must be a multiple of n_head, got {shown(width)} and {shown(num_heads)}")
        fields |= {"intermediate_size": config.get("n_inner") or 4 * width, "head_dim": width // num_heads}
        fields |= {"layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5)}
        return cls(**fields, tie_word_embeddings=config.get("tie_word_embeddings", True))

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads


class GPT2Attention(nn.Module):
    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        self.c_attn = nn.Linear(config.hidden_size, 3 * width)
        self.c_proj = nn.Linear(width, config.hidden_size)

    def forward(self, x: Hidden, attend: Attend) -> Hidden:
        qkv = self.c_attn(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.unbind(1)  # each [num_tokens, num_heads, head_dim]
        return self.c_proj(attend(self.layer, q, k, v).flatten(1))


class GPT2MLP(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, config.intermediate_size)
        self.c_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Hidden) -> Hidden:
        return self.c_proj(gelu_tanh(self.c_fc(x)))


class GPT2Block(nn.Module):
    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(self, x: Hidden, attend: Attend) -> Hidden:
        x = x + self.attn(self.ln_1(x), attend)
        return x + self.mlp(self.ln_2(x))


class GPT2LMHeadModel(nn.Module):
    Config = GPT2Config
    # Conv1D stores [in, out]. attn.c_proj is square, so only the parity tests notice a transpose forgotten there.
    weight_rules = WeightRules(
        prefix="transformer.",
        embedding="wte.weight",
        transpose=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        skip=(".attn.bias", ".attn.masked_bias"),  # causal masks that old checkpoints contain
    )

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocab_size, config.hidden_size)
        self.wpe = Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(GPT2Block(config, layer) for layer in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Ids, positions: Ids, attend: Attend) -> Hidden:
        x = self.wte(input_ids) + self.wpe(positions)  # [num_tokens, hidden]
        for block in self.h:
            x = block(x, attend)
        return self.ln_f(x)

    def compute_logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self.lm_head(hidden)
