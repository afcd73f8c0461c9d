"""A frozen vision transformer with adapters that are trained."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import ViTConfig, ViTForImageClassification


class Adapted(torch.nn.Module):
    """A transformer for images [n, 3, 32, 32], of which adapters and classifier are trained."""

    def __init__(self):
        super().__init__()
        config = ViTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            num_labels=10,
        )
        adapters = LoraConfig(
            r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)  # the frozen weights are the same everywhere
            self.body = get_peft_model(ViTForImageClassification(config), adapters)

    def forward(self, x):
        """Return the scores [n, 10] of the classes."""
        return self.body(x).logits
