"""Low-rank adapters with the attributes and habits of peft's, so that tests of adapters need no further library."""

import torch
from transformers import PreTrainedModel

RANK = 4
TARGETS = ("q_proj", "v_proj")


class LoraLinear(torch.nn.Module):
    """A linear layer with named low-rank adapters, of which some are active."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.ModuleDict()
        self.lora_B = torch.nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.merged_adapters: list[str] = []
        self._active_adapter: list[str] = []
        self._disable_adapters = False

    @property
    def weight(self) -> torch.nn.Parameter:
        """The weights that the adapters are merged into."""
        weight = self.base_layer.weight
        assert isinstance(weight, torch.nn.Parameter)
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the layer's output what the active adapters have learned."""
        result: torch.Tensor = self.base_layer(x)
        if self._disable_adapters or self.merged_adapters:
            return result
        for name in self._active_adapter:
            result = result + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return result

    def delta(self, name: str) -> torch.Tensor:
        """Return what an adapter adds to the layer's weights."""
        down, up = (part[name].weight for part in (self.lora_A, self.lora_B))
        assert isinstance(down, torch.Tensor), up
        assert isinstance(up, torch.Tensor), down
        return (up @ down).detach() * self.scaling[name]


def layers_of(model: PreTrainedModel) -> list[LoraLinear]:
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


def add_adapter(model: PreTrainedModel, name: str, seed: int) -> None:
    """Give the model an adapter, and make it active if it is the first."""
    generator = torch.Generator().manual_seed(seed)
    if not layers_of(model):
        for module in list(model.modules()):
            for target in TARGETS:
                if isinstance(getattr(module, target, None), torch.nn.Linear):
                    setattr(module, target, LoraLinear(getattr(module, target)))
    for layer in layers_of(model):
        num_out, num_in = layer.weight.shape
        for parts, sizes in ((layer.lora_A, (RANK, num_in)), (layer.lora_B, (num_out, RANK))):
            part = torch.nn.Linear(sizes[1], sizes[0], bias=False)
            with torch.no_grad():
                part.weight.copy_(torch.randn(sizes, generator=generator) * 0.3)
            parts[name] = part
        layer.scaling[name] = 2.0
        layer._active_adapter = layer._active_adapter or [name]


def set_adapter(model: PreTrainedModel, name: str) -> None:
    for layer in layers_of(model):
        layer._active_adapter = [name]


def disable_adapters(model: PreTrainedModel, *, is_disabled: bool = True) -> None:
    for layer in layers_of(model):
        layer._disable_adapters = is_disabled


def set_scale(model: PreTrainedModel, name: str, scale: float) -> None:
    for layer in layers_of(model):
        layer.scaling[name] = scale


def merge_adapter(model: PreTrainedModel, name: str) -> None:
    """Add an adapter to the weights below it, through ``.data`` as peft does."""
    for layer in layers_of(model):
        layer.weight.data += layer.delta(name)
        layer.merged_adapters.append(name)


def unmerge_adapter(model: PreTrainedModel, name: str) -> None:
    for layer in layers_of(model):
        layer.weight.data -= layer.delta(name)
        layer.merged_adapters.remove(name)
