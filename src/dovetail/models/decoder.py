"""The decoder that the families share: pre-norm blocks on one residual stream.

Owns how the parts are wired. Module names are those of Hugging Face checkpoints, apart from fused
projections, so that a parameter's name says where its weights come from. What an MLP is, dense or a
mixture, is the family's business.

Shape legend: T tokens, N rows, M model dim, V vocabulary.
"""

from collections.abc import Callable

from torch import Tensor, nn

from dovetail.attention.backend import ForwardContext, Rotation
from dovetail.config.model import ModelConfig
from dovetail.layers.attention import Attention
from dovetail.layers.basic import Embedding, Head, RmsNorm
from dovetail.layers.rotary import Rotary
from dovetail.layers.shard import Placement


class DecoderLM(nn.Module):
    """A causal language model; see ``models.causal_lm.CausalLM``.

    ``build_mlp`` makes the MLP of the layer with the given index.
    """

    def __init__(
        self, config: ModelConfig, build_mlp: Callable[[int], nn.Module], *, at: Placement
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, build_mlp, at=at)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = Head(config.vocab_size, config.hidden_size, tied=tied, at=at)

    def hidden(self, ctx: ForwardContext) -> Tensor:
        """Return the hidden states of the step's tokens after the final norm, [T, M]."""
        return self.model(ctx)

    def logits(self, hidden_NM: Tensor) -> Tensor:
        """Return the logits of some rows of hidden states, float32 [N, V]."""
        return self.lm_head(hidden_NM)


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self, config: ModelConfig, build_mlp: Callable[[int], nn.Module], *, at: Placement
    ) -> None:
        super().__init__()
        self.rotary = Rotary(
            config.rope, config.head_dim, config.max_position_embeddings, device=at.device
        )
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, at=at)
        self.layers = nn.ModuleList(
            DecoderLayer(config, Attention(config, i, at=at), build_mlp(i), at=at)
            for i in range(config.num_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, at=at)

    def forward(self, ctx: ForwardContext) -> Tensor:
        """Return hidden states [T, M]."""
        delta_TM: Tensor | None = None
        residual_TM = self.embed_tokens(ctx.token_ids)
        rotation = self.rotary(ctx.positions)
        for layer in self.layers:
            delta_TM, residual_TM = layer(ctx, rotation, delta_TM, residual_TM)
        hidden_TM, _ = self.norm.add(delta_TM, residual_TM)
        return hidden_TM


class DecoderLayer(nn.Module):
    """Attention, then an MLP, each on the normalised residual stream.

    What a part adds to the stream is handed on as ``delta`` and added by the next norm, which is
    one operation with it.
    """

    def __init__(
        self, config: ModelConfig, attention: Attention, mlp: nn.Module, *, at: Placement
    ) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, at=at)
        self.self_attn = attention
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, at=at)
        self.mlp = mlp

    def forward(
        self,
        ctx: ForwardContext,
        rotation: Rotation,
        delta_TM: Tensor | None,
        residual_TM: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return (delta, residual); ``delta_TM`` is None in the first layer."""
        x_TM, residual_TM = self.input_layernorm.add(delta_TM, residual_TM)
        x_TM = self.self_attn(ctx, rotation, x_TM)
        x_TM, residual_TM = self.post_attention_layernorm.add(x_TM, residual_TM)
        return self.mlp(ctx, x_TM), residual_TM
